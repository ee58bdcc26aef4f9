"""The model under construction as an ``onnx.ModelProto``, for programs that read and write one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.ir.reading import restore_weights
from onnxtrain.ir.standard_form import attach

_OF_MODEL = ("opset_import", "functions", "metadata_props")
_OF_GRAPH = ("node", "initializer", "input", "output", "value_info")
_LARGEST = 2**31 - 2**20  # bytes that protobuf serializes, with room for the rest


class LentProto:
    """A ``ModelProto`` that a program holds and writes to; what it wrote is told by comparing bytes.

    The message and its graph are the same objects for as long as the model is built: only lists in them are replaced,
    from the first element on that differs.
    """

    def __init__(self) -> None:
        self.proto, self._seen = onnx.ModelProto(), b""

    def shown(self, model: ir.Model, weights: Mapping[str, ir.TensorProtocol]) -> onnx.ModelProto:
        """The message with the content of this model.

        Raises:
            ArtifactError: the model is too large for a message.
        """
        if sum(tensor.nbytes for tensor in weights.values()) > _LARGEST:
            raise ArtifactError(
                "the model is larger than 2 GB, which no ModelProto holds", cure="add nodes by self.op, or by blocks"
            )
        made = model.clone()
        restore_weights(made, weights)
        new = ir.to_proto(ir.external_data.load_to_model(attach(made)))
        self.proto.ir_version, self.proto.graph.name = new.ir_version, new.graph.name
        for name in _OF_MODEL:
            _follow(getattr(self.proto, name), getattr(new, name))
        for name in _OF_GRAPH:
            _follow(getattr(self.proto.graph, name), getattr(new.graph, name))
        self._seen = self.proto.SerializeToString()
        return self.proto

    def written(self) -> onnx.ModelProto | None:
        """A copy with what the program wrote since; None where that is nothing."""
        now = self.proto.SerializeToString()
        if now == self._seen:
            return None
        self._seen = now
        made, known = onnx.ModelProto.FromString(now), dict[str, int]()
        for entry in made.opset_import:  # nodes are in the form of the operator set that was there first
            known.setdefault(entry.domain, entry.version)
        del made.opset_import[:]
        made.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in known.items())
        return made


def _follow(old: Any, new: Any) -> None:
    """Make a list of messages the same as another; elements that are the same stay as they are."""
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    del old[same:]
    old.extend(new[same:])
