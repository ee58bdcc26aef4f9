"""One model of the artifacts as a session of onnxruntime: known to be whole, bound once, run in place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxtrain.api.tensors import Place, Tensor
from onnxtrain.errors import ArtifactError, BackendError, DataError, first_line
from onnxtrain.execute.sessions import session_options
from onnxtrain.files import read_artifact
from onnxtrain.ir.bounds import stored_tensors
from onnxtrain.portable import facts_of, unsealed

Source = str | os.PathLike[str] | bytes
_FACTS = {  # what each kind of model says of itself
    "training": ("inputs", "outputs", "trainable", "frozen", "reset", "gradients", "updates", "draws"),
    "evaluation": ("inputs", "outputs", "weights", "predictions"),
    "optimizer": ("optimizer", "parameters", "states", "updates", "step", "learning_rate"),
}
_DISABLED = {"EliminateDropout"}  # it also removes Dropout in training mode where nobody reads the mask
_NODE = re.compile(r"while running (\w+) node")
_OUT_OF_RANGE = ("Out of range value in index tensor", "indices element out of data bounds")


def read_model(source: Source, kind: str) -> tuple[onnx.ModelProto, dict[str, Any], str]:
    """A model of the artifacts, the facts it states, and what errors call it.

    Args:
        source: the file, or its bytes.
        kind: ``"training"``, ``"evaluation"`` or ``"optimizer"``.

    Raises:
        ArtifactError: there is no such file, it is damaged, or it is another kind of model.
    """
    name = f"the {kind} model" if isinstance(source, bytes) else str(source)
    cure = "give a file of the artifacts"
    content = source if isinstance(source, bytes) else read_artifact(source, ArtifactError, cure)
    proto, facts = _parsed(unsealed(content, name), name)
    if facts.get("kind") != kind:
        raise ArtifactError(
            f"{name} is the {facts.get('kind', 'unknown')} model", cure=f"give the {kind} model of the artifacts"
        )
    if missing := [key for key in _FACTS[kind] if key not in facts]:
        what = f"{name} does not say its {missing[0]}: another version of onnxtrain made it"
        raise ArtifactError(what, cure="generate the artifacts again")
    return proto, facts, name


def _parsed(content: bytes, name: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model, all of which is in its file, and the facts that it states."""
    try:
        proto = onnx.load_model_from_string(content)
        facts = facts_of({p.key: p.value for p in proto.metadata_props}) or {}
    except Exception as error:  # protobuf and json raise many types
        raise ArtifactError(f"{name} is damaged: {first_line(error)}", cure="generate the artifacts again") from error
    if outside := next((t.name for t in stored_tensors(proto) if t.external_data), None):
        what = f"{name} has the data of {outside} in another file, which artifacts never have"
        raise ArtifactError(what, cure="generate the artifacts again")
    return proto, facts


class Session:
    """A model some of whose inputs and outputs are always the same tensors.

    Args:
        proto: the model.
        name: what errors call it.
        place: where it runs.
        options: of onnxruntime's session.

    Raises:
        BackendError: onnxruntime cannot load the model there.
    """

    def __init__(self, proto: onnx.ModelProto, name: str, place: Place, options: ort.SessionOptions | None) -> None:
        self.name, self.place = name, place
        options = options or session_options()
        try:
            content = proto.SerializeToString()
            self.session = ort.InferenceSession(content, options, place.providers, disabled_optimizers=_DISABLED)
        except Exception as error:  # onnxruntime raises many types
            what = f"onnxruntime {ort.__version__} cannot load {name}: {first_line(error)}"
            raise BackendError(what, cure="check the provider and the version of onnxruntime") from error
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self._has_strings = any(i.type == "tensor(string)" for i in self.inputs.values())
        self._binding = self.session.io_binding()
        self._fixed: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self._free: tuple[str, ...] = ()

    def bind(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], free: Sequence[str] = ()) -> None:
        """Bind the tensors that stay.

        Args:
            inputs: by input name; names that the model does not have are left out.
            outputs: by output name; they may be tensors of ``inputs``, which are then written over.
            free: outputs that onnxruntime allocates and ``run`` returns.
        """
        self._fixed = {n: t for n, t in inputs.items() if n in self.inputs}
        self._written, self._free = dict(outputs), tuple(free)
        for name, tensor in self._fixed.items():
            self._binding.bind_ortvalue_input(name, tensor.value)
        for name, tensor in self._written.items():
            self._binding.bind_ortvalue_output(name, tensor.value)

    def run(self, inputs: Mapping[str, Any], as_numpy: bool = True) -> list[Any]:
        """Run once; the free outputs as arrays, or as OrtValues.

        Raises:
            DataError: an index is out of range.
            BackendError: onnxruntime fails otherwise.
        """
        if self._has_strings:
            return self._run_with_strings(inputs)
        binding = self._binding
        # kept until after the run: a binding does not hold the memory of the arrays that it reads
        given = {name: self._value(value) for name, value in inputs.items() if name in self.inputs}
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._free:
            binding.bind_output(name, "cpu" if as_numpy else self.place.kind, 0 if as_numpy else self.place.index)
        self._call(lambda: self.session.run_with_iobinding(binding))
        # outputs come in the order in which they were first bound: those that stay, then the free ones
        made = binding.get_outputs()[len(self._written) :]
        return [v.numpy() for v in made] if as_numpy else list(made)

    def _value(self, given: Any) -> ort.OrtValue:
        if isinstance(given, ort.OrtValue):
            return given
        return self.place.value(np.asarray(given, order="C"))  # np.ascontiguousarray makes a vector of a scalar

    def _run_with_strings(self, inputs: Mapping[str, Any]) -> list[Any]:
        """onnxruntime binds no strings: everything is handed over as arrays, and results are copied to their places."""
        feeds = {n: t.view() for n, t in self._fixed.items()}
        feeds |= {n: v.numpy() if isinstance(v, ort.OrtValue) else v for n, v in inputs.items() if n in self.inputs}
        made: list[Any] = []
        self._call(lambda: made.extend(self.session.run([*self._written, *self._free], feeds)))
        for tensor, array in zip(self._written.values(), made, strict=False):
            tensor.assign(array)
        return made[len(self._written) :]

    def _call(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:  # onnxruntime raises many types
            found = _NODE.search(str(error))
            node = found.group(1) if found else ""
            if any(text in str(error) for text in _OUT_OF_RANGE):
                what = "a label outside of the classes, or an id outside of the vocabulary"
                cure = "check the labels and the ids of the batch"
                raise DataError(f"{self.name}: an index is out of range: {what}", node=node, cure=cure) from error
            what = f"{self.name} failed in onnxruntime: {first_line(error)}"
            raise BackendError(what, node=node, cure="check the sizes of the batch") from error
