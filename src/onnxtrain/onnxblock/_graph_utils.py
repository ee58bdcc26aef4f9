"""Names and look-ups for blocks that write nodes into ``self.base``, where onnxruntime-training had them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from onnxtrain.errors import ArtifactError

_NUMBERS = itertools.count(1)
_CURE = "name a value of the model"


def generate_graph_name(token: str) -> str:
    """A name for a node or a value that no other call gives."""
    return f"onnx::{token}::{next(_NUMBERS)}"


def get_output_from_output_name(onnx_model: Any, output_name: str) -> Any:
    """The graph's output of that name.

    Raises:
        ArtifactError: there is none.
    """
    return _found(onnx_model.graph.output, output_name, "output")


def get_input_from_input_name(onnx_model: Any, input_name: str) -> Any:
    """The graph's input of that name.

    Raises:
        ArtifactError: there is none.
    """
    return _found(onnx_model.graph.input, input_name, "input")


def node_arg_exists(model: Any, node_arg_name: str) -> bool:
    """Whether a node reads or makes a value of that name."""
    return any(node_arg_name in (*node.input, *node.output) for node in model.graph.node)


def register_graph_outputs(model: Any, output_names: Sequence[str] | str) -> None:
    """Make these values the graph's outputs, and no others.

    Raises:
        ArtifactError: the type of one is not known.
    """
    names = [output_names] if isinstance(output_names, str) else list(output_names)
    graph = model.graph
    found = [_found([*graph.output, *graph.value_info], name, "value") for name in names]
    copies = [type(value).FromString(value.SerializeToString()) for value in found]
    del graph.output[:]
    graph.output.extend(copies)


def _found(values: Sequence[Any], name: str, kind: str) -> Any:
    for value in values:
        if value.name == name:
            return value
    raise ArtifactError(f"the model has no {kind} {name} with a type", cure=_CURE)
