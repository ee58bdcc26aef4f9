"""Graphs as files for any ONNX runtime: standard operators and functions with bodies, checked and sealed."""

from __future__ import annotations

import collections
import glob
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError, first_line
from onnxtrain.files import partial_of, write_atomically
from onnxtrain.ir.functions import OPAQUE
from onnxtrain.ir.graphs import DOMAIN, describe, source_of, values
from onnxtrain.ir.standard_form import attach

_FACTS = "onnxtrain.facts"  # key in the model's metadata: JSON for whoever runs it
_SEAL = "onnxtrain.sha256"  # key in the model's metadata: digest of the file with zeros in its place
_ZEROS = "0" * 64
_SEALED = re.compile(re.escape(_SEAL.encode()) + rb"\x12\x40([0-9a-f]{64})")
_IR_VERSION = 10  # the newest that onnxruntime 1.20 reads
_DATA = re.compile(r"(\.[0-9a-f]{8})?\.data")  # how the names of files of weights end
_LARGEST = 2**31 - 2**20  # bytes that protobuf serializes, with room for the rest


def to_proto(model: ir.Model, facts: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    """A model that any ONNX runtime runs: our operators have their bodies, control flow is ONNX's.

    Args:
        model: the model; it is not changed.
        facts: what a program that runs the model must know; plain data, read by ``facts_of``.

    Raises:
        ArtifactError: an operator is not ONNX's and has no body, or ``onnx.checker`` refuses the model.
    """
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and node.op_type in OPAQUE:
            raise ArtifactError(
                f"{node.op_type} runs in PyTorch alone", node=describe(node), source=source_of(node), cure="remove it"
            )
    names = collections.Counter(v.name for v in values(model.graph) if v.name)
    if twice := [name for name, count in names.items() if count > 1]:
        what = f"two values would be called {twice[0]}: the model has one, the artifacts need another"
        raise ArtifactError(what, cure="rename the value of the model")
    model = ir.external_data.load_to_model(attach(model))  # the data lie beside another file
    needed = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid("", model.graph.opset_imports.get("", 20))], ignore_unknown=True
    )
    model.ir_version = max(_IR_VERSION, needed)
    proto = ir.to_proto(model)
    if facts is not None:
        onnx.helper.set_model_props(proto, {_FACTS: json.dumps(facts)})
    if proto.ByteSize() < _LARGEST:
        _check(proto)
    return proto


def _check(proto: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(f"the graph is not valid ONNX: {first_line(error)}", cure="report this model") from error


def add_facts(proto: onnx.ModelProto, facts: Mapping[str, Any]) -> None:
    """Add to what a model's metadata says for whoever runs it."""
    kept = {p.key: p.value for p in proto.metadata_props}
    known = facts_of(kept) or {}
    onnx.helper.set_model_props(proto, kept | {_FACTS: json.dumps({**known, **facts})})


def facts_of(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The facts in a model's metadata; None where it has none."""
    return json.loads(metadata[_FACTS]) if _FACTS in metadata else None


def save(model: ir.Model, path: Path | str) -> None:
    """Write a model: in one file, or with its weights in another beside it where they are larger than 2 GB.

    That other file is ``{name}.data``, or has a number in its name where there is one: a kill at any moment leaves the
    old model with its old weights or the new one with the new.
    """
    path = Path(path)
    if sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value) < _LARGEST:
        write_atomically(path, ir.to_proto(model).SerializeToString())
        return
    with partial_of(path) as (partial, target):
        known = target.parent.glob(f"{glob.escape(target.name)}.*")
        before = [p for p in known if _DATA.fullmatch(p.name.removeprefix(target.name))]
        data = f"{target.name}.data" if not before else f"{target.name}.{uuid.uuid4().hex[:8]}.data"
        try:
            ir.save(model, partial, external_data=data)
            partial.replace(target)
        except BaseException:
            if partial.exists():  # else the new model is there, and reads it
                (target.parent / data).unlink(missing_ok=True)
            raise
    for old in before:
        old.unlink()


def sealed(proto: onnx.ModelProto) -> bytes:
    """The model's bytes with their own SHA-256 in its metadata, so that a damaged file is told from a whole one."""
    kept = [entry for entry in proto.metadata_props if entry.key != _SEAL]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=_SEAL, value=_ZEROS)
    content = proto.SerializeToString()
    start, end = _SEALED.search(content).span(1)  # type: ignore[union-attr]
    return content[:start] + hashlib.sha256(content).hexdigest().encode() + content[end:]


def unsealed(content: bytes, name: str) -> bytes:
    """The content of a sealed file, once it is known to be whole.

    Raises:
        ArtifactError: the file was changed since it was written, or is no file of ``generate_artifacts``.
    """
    found = _SEALED.search(content)
    if found is None:
        raise ArtifactError(
            f"{name} is damaged, or no model of generate_artifacts", cure="generate the artifacts again"
        )
    blank = content[: found.start(1)] + _ZEROS.encode() + content[found.end(1) :]
    if hashlib.sha256(blank).hexdigest().encode() != found.group(1):
        raise ArtifactError(
            f"{name} is damaged: its content is not what was written",
            cure="generate the artifacts again; where it was changed on purpose, onnxtrain.artifacts.seal(path)",
        )
    return content
