"""The checkpoint file: safetensors under the model's own names, all else as JSON in its header; never pickle.

Trainable and frozen parameters have the names of the model's initializers; tensors of the optimizer begin with
``optimizer/``, and a parameter of such a name is stored with ``parameter/`` before it. The header's entry ``onnxtrain``
is JSON with what a ``Checkpoint`` holds besides tensors, and a SHA-256 of all of it: a file that was changed by a
single bit is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors import numpy as safetensors

from onnxtrain.errors import CheckpointError, first_line
from onnxtrain.files import read_artifact, write_atomically

_KEY, _FORMAT, _OPTIMIZER, _PARAMETER = "onnxtrain", 1, "optimizer/", "parameter/"
_TAKEN = re.compile(f"({_PARAMETER})*({_OPTIMIZER}.*|__metadata__)", re.DOTALL)  # names that mean something else here
_SAVE = "give a file that save_checkpoint wrote"
_KINDS = {"F": "float", "I": "int", "U": "uint"}
_OTHERS = {
    "BOOL": np.bool_,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
# element types by their names in safetensors, those included that its own reader for numpy leaves out
_TYPES = {f"{k}{n}": np.dtype(f"{name}{n}") for k, name in _KINDS.items() for n in (8, 16, 32, 64) if f"{k}{n}" != "F8"}
_TYPES |= {name: np.dtype(kind) for name, kind in _OTHERS.items()}


@dataclasses.dataclass(frozen=True)
class Form:
    """Element type, as numpy names it, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Form:
        """The form of an array."""
        return cls(array.dtype.name, tuple(array.shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass
class Checkpoint:
    """What a checkpoint file holds.

    Args:
        trainable: name and form of every trained parameter, in the order of the model.
        frozen: the same of parameters that are not trained, running statistics among them.
        tensors: their content; empty in a nominal checkpoint, which says forms alone.
        optimizer: tensors of the optimizer by input name; empty where they were not saved.
        settings: learning rate and schedule of the optimizer, plain data.
        random: seed and number of draws of the random generators.
        properties: the user's own values: int, float, str and bool.
        set_id: of the set of artifacts that it belongs to; empty where it belongs to none.
    """

    trainable: dict[str, Form]
    frozen: dict[str, Form]
    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    random: dict[str, int] = dataclasses.field(default_factory=dict)
    properties: dict[str, int | float | str | bool] = dataclasses.field(default_factory=dict)
    set_id: str = ""

    @property
    def forms(self) -> dict[str, Form]:
        """Name and form of all parameters, trainable ones first."""
        return self.trainable | self.frozen

    @property
    def is_nominal(self) -> bool:
        """Whether there are forms alone, no content."""
        return not self.tensors


def write(checkpoint: Checkpoint, path: Path | str) -> None:
    """Write a checkpoint; a kill at any moment leaves the old file or the new one.

    Raises:
        CheckpointError: a parameter has no content, or one of another form than was said.
        WriteError: the file cannot be written.
    """
    write_atomically(Path(path), encoded(checkpoint, str(path)))


def encoded(checkpoint: Checkpoint, name: str) -> bytes:
    """What the file of a checkpoint holds; errors call it by the name."""
    if not checkpoint.is_nominal:
        _validate(checkpoint, name)
    tensors = {_stored(n): np.ascontiguousarray(a).reshape(a.shape) for n, a in checkpoint.tensors.items()}
    tensors |= {_OPTIMIZER + n: np.ascontiguousarray(a).reshape(a.shape) for n, a in checkpoint.optimizer.items()}
    header = {
        "format": _FORMAT,
        "trainable": _listed(checkpoint.trainable),
        "frozen": _listed(checkpoint.frozen),
        "settings": checkpoint.settings,
        "random": checkpoint.random,
        "properties": checkpoint.properties,
    }
    if checkpoint.set_id:
        header["set"] = checkpoint.set_id
    header["sha256"] = _digest(header, tensors)
    return safetensors.save(tensors, {_KEY: json.dumps(header)})


def _stored(parameter: str) -> str:
    """The name under which a parameter is stored."""
    return _PARAMETER + parameter if _TAKEN.fullmatch(parameter) else parameter


def _called(stored: str) -> str:
    """The name of the parameter that is stored under a name."""
    return stored.removeprefix(_PARAMETER) if _TAKEN.fullmatch(stored) else stored


def read(source: str | os.PathLike[str] | bytes) -> Checkpoint:
    """Read a checkpoint from a file or from its bytes.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it is no checkpoint of onnxtrain.
    """
    name = "the checkpoint" if isinstance(source, bytes) else str(source)
    cure = "give the file of a checkpoint"
    content = source if isinstance(source, bytes) else read_artifact(source, CheckpointError, cure)
    header, tensors = _parse(content, name)
    given = header.pop("sha256", None)
    if given != _digest(header, tensors):
        raise CheckpointError(f"{name} is damaged: its content is not what was written", cure="use an earlier one")
    if header.get("format") != _FORMAT:
        raise CheckpointError(
            f"{name} has format {header.get('format')}, this version reads {_FORMAT}", cure="update onnxtrain"
        )
    made = _decoded(header, tensors, name)
    if not made.is_nominal:
        _validate(made, name)
    return made


def _decoded(header: dict[str, Any], tensors: Mapping[str, np.ndarray], name: str) -> Checkpoint:
    try:
        return Checkpoint(
            _forms(header["trainable"]),
            _forms(header["frozen"]),
            {_called(n): a for n, a in tensors.items() if not n.startswith(_OPTIMIZER)},
            {n.removeprefix(_OPTIMIZER): a for n, a in tensors.items() if n.startswith(_OPTIMIZER)},
            dict(header["settings"]),
            dict(header["random"]),
            dict(header["properties"]),
            str(header.get("set", "")),
        )
    except (KeyError, TypeError, ValueError) as error:  # whole, and written by something else
        raise CheckpointError(f"{name} is no checkpoint of onnxtrain: {first_line(error)}", cure=_SAVE) from error


def _parse(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header's JSON and all tensors."""
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        tensors = {
            name: np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in deserialize(content)
        }
        header = json.loads(metadata[_KEY]) if _KEY in metadata else None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {first_line(error)}", cure="use an earlier checkpoint") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{name} is no checkpoint of onnxtrain", cure=_SAVE)
    return header, tensors


def _digest(header: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        digest.update(json.dumps([name, array.dtype.name, array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _listed(forms: Mapping[str, Form]) -> list[list[Any]]:
    return [[name, form.dtype, list(form.shape)] for name, form in forms.items()]


def _forms(listed: list[list[Any]]) -> dict[str, Form]:
    return {name: Form(dtype, tuple(shape)) for name, dtype, shape in listed}


def _validate(checkpoint: Checkpoint, name: str) -> None:
    """Every parameter has content of its form, and nothing else does.

    Raises:
        CheckpointError: else.
    """
    forms = checkpoint.forms
    for parameter in dict.fromkeys([*forms, *checkpoint.tensors]):
        if parameter not in forms or parameter not in checkpoint.tensors:
            there = "has no content" if parameter in forms else "is none of the model's parameters"
            raise CheckpointError(f"{name}: {parameter} {there}", cure="use a checkpoint of this model")
        found = Form.of(checkpoint.tensors[parameter])
        if found != forms[parameter]:
            raise CheckpointError(
                f"{name}: {parameter} is {found.dtype} {list(found.shape)}, "
                f"not {forms[parameter].dtype} {list(forms[parameter].shape)}",
                cure="use a checkpoint of this model",
            )
