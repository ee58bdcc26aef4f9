"""The nouns that cross a stage border: Signature, ForwardGraph, TrainingGraph, Plan and its segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir.layers import Layers
from onnxtrain.ir.modules import NAMESPACE
from onnxtrain.ir.shards import Gathering

BACKWARD = "onnxtrain.backward"  # key in Node.meta: the node was emitted by the gradient builder
RECOMPUTED = "onnxtrain.recomputed"  # key in Node.meta: a copy that computes a value of the forward pass again
SOURCE = "onnxtrain.source"  # key in Node.metadata_props: "file.py:12" of the user's line
DRAWN = "onnxtrain.drawn"  # key in Node.metadata_props: it draws random numbers that nothing reads, as eager does
SIZE = "onnxtrain.size"  # key in Value.metadata_props: it is a number, and the sizes of these names
DOMAIN = "onnxtrain"  # domain of our own operators
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Cast:
    """A parameter in another element type, an input of the graph.

    Args:
        parameter: the parameter's name.
        dtype: ONNX number of the element type.
    """

    parameter: str
    dtype: int


@dataclasses.dataclass(frozen=True)
class Signature:
    """Who the graph's inputs and outputs are, by value name.

    Args:
        user_inputs: tensors given at every call, in call order.
        parameters: weights, under the user's own names; graph inputs, never initializers.
        buffers: the module's buffers that the graph reads, under the user's own names.
        outputs: values handed back to the user, in order.
        buffer_updates: buffer name to the output value that holds its new content.
        differentiable: the parameters and user inputs whose gradient is wanted.
        rows: inputs that say which rows of others are computed.
        casts: inputs that are parameters in another element type, by name.
        origins: for each output the parameters and user inputs through which torch says that it requires a gradient,
            though the gradient may be zero and what they give optimized away; None where the graph itself says it. Of a
            short graph those of the whole one.
        views: of each output that lies in the memory of an input, or of an output before it, the name of that; of one
            that is expanded its own. Others have memory of their own.
        in_order: the outputs whose elements eager PyTorch gives in the order of their axes, so that a caller may look
            at them in another shape.
        is_out_of_order: whether a user input had its elements in another order in the traced call, so that what is
            ``in_order`` all the same was put so.
    """

    user_inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    buffer_updates: dict[str, str]
    differentiable: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    casts: dict[str, Cast] = dataclasses.field(default_factory=dict)
    origins: dict[str, frozenset[str]] | None = None
    views: dict[str, str] = dataclasses.field(default_factory=dict)
    in_order: tuple[str, ...] = ()
    is_out_of_order: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """All graph inputs in order: user inputs, parameters, buffers, rows, casts of parameters."""
        return self.user_inputs + self.parameters + self.buffers + self.rows + tuple(self.casts)


@dataclasses.dataclass
class ForwardGraph:
    """A captured forward pass: an ONNX model and who its inputs and outputs are.

    Args:
        model: the model.
        signature: its inputs and outputs.
        layers: rows of layers of which it has only some, so that it stands for a longer graph.
        short: the graph that stands for this one; None where there is none.
    """

    model: ir.Model
    signature: Signature
    layers: tuple[Layers, ...] = ()
    short: ForwardGraph | None = None


@dataclasses.dataclass
class TrainingGraph:
    """Forward and backward in one model.

    Args:
        model: its inputs are the forward's, then one for each entry of ``output_gradients``; its outputs are
            the forward's, then one for each entry of ``gradients``.
        signature: the forward's signature.
        output_gradients: differentiable output name to the graph input that receives its gradient.
        gradients: name of a parameter or user input to the graph output that holds its gradient.
        layers: rows of layers of which it has only some, so that it stands for a longer graph.
    """

    model: ir.Model
    signature: Signature
    output_gradients: dict[str, str]
    gradients: dict[str, str]
    layers: tuple[Layers, ...] = ()

    def copy(self) -> TrainingGraph:
        """The same with a model of its own."""
        model = ir.Model(self.model.graph.clone(), ir_version=self.model.ir_version)
        return dataclasses.replace(self, model=model)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the backward pass after which some gradients are there.

    Args:
        gradients: names of the parameters and user inputs whose gradients they are.
        nodes: how many nodes it has.
    """

    gradients: tuple[str, ...]
    nodes: int


@dataclasses.dataclass
class Plan:
    """What a backend compiles: a forward model, a backward model (None for inference), and what joins them.

    Args:
        forward: inputs as ``signature.inputs``; outputs are the user's, the buffer updates, then ``saved`` ones
            that the forward computes.
        backward: inputs are ``saved`` followed by the values of ``output_gradients``; outputs are the values
            of ``gradients``. None where nothing is differentiated.
        saved: names of forward values (its inputs included) that the backward reads.
        segments: the parts of the backward pass in order.
        gathering: of the inputs that are gathered while the passes read them; None where all are whole.
    """

    forward: ir.Model
    backward: ir.Model | None
    signature: Signature
    saved: tuple[str, ...] = ()
    output_gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    gathering: Gathering | None = None


def notes_of(described: ir.Node | ir.Value) -> Mapping[str, Any]:
    """What is noted in ``meta`` of a node or value, to look at: onnx_ir makes a store of four objects for who asks."""
    return described.meta if getattr(described, "_metadata", True) else _NOTHING


def copy_notes(source: ir.Node | ir.Value, made: ir.Node | ir.Value) -> None:
    """Note in ``meta`` of a copy what is noted of what it is a copy of."""
    if found := notes_of(source):
        made.meta.update(found)


def keep_size(old: ir.Value, new: ir.Value) -> None:
    """Let a value be the sizes that another one is, in whose place it comes."""
    if old.shape == [] and (names := old.metadata_props.get(SIZE)):
        known = new.metadata_props.get(SIZE, "").split()
        new.metadata_props[SIZE] = " ".join(dict.fromkeys((*known, *names.split())))


def is_backward(node: ir.Node) -> bool:
    """Whether the gradient builder emitted the node."""
    return bool(notes_of(node).get(BACKWARD))


def values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value of the graph once: inputs, initializers, then node outputs in order."""
    yield from graph.inputs
    yield from (v for v in graph.initializers.values() if not v.is_graph_input())
    for node in graph:
        yield from node.outputs


def free_name(wanted: str, taken: Container[str]) -> str:
    """The name, or with a number where another value has it: ``x_1``."""
    name, count = wanted, 1
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    return name


def describe(node: ir.Node) -> str:
    """``Op(name)``, as error messages and printed graphs call a node."""
    domain = f"{node.domain}::" if node.domain else ""
    return f"{domain}{node.op_type}({node.name or '?'})"


def source_of(node: ir.Node) -> str:
    """The user's source line of a node, ``file:line``; empty where it is not known."""
    return node.metadata_props.get(SOURCE, "")


def origin_of(node: ir.Node) -> dict[str, str]:
    """What is said of where a node comes from, for one that takes its place: the user's line, and the modules."""
    return {key: node.metadata_props[key] for key in (SOURCE, NAMESPACE) if key in node.metadata_props}


def unavailable(node: ir.Node, what: str, cure: str) -> GraphError:
    """The error for a case of an operator that is not covered: ``what`` it is with."""
    return GraphError(f"{what} is not available", node=describe(node), source=source_of(node), cure=cure)
