"""What the calls of a graph write in place, and which memory a tensor of a graph has."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

BODIES = frozenset(("tag_activation_checkpoint", "wrap"))  # what calls a graph as it is
FUNCTION = "autograd_function_apply"  # what calls the forward graph of a torch.autograd.Function
_ASSIGNMENTS = frozenset((operator.setitem, *(vars(operator)[n] for n in dir(operator) if n.startswith("__i"))))
_ASSIGNMENTS -= {operator.index, operator.inv, operator.invert}
_NO_CONTENT = frozenset(("requires_grad_", "detach_", "rename_", "share_memory_"))  # they write none
_STATISTICS = ("running_mean", "running_var")
_UNSAID = {  # what functions write of which no schema says so, and the argument that has them do it
    "batch_norm": (_STATISTICS, "training"),
    "native_batch_norm": (_STATISTICS, "training"),
    "instance_norm": (_STATISTICS, "use_input_stats"),
    "embedding": (("weight",), "max_norm"),
    "embedding_bag": (("weight",), "max_norm"),
}


def written(graph: torch.fx.Graph) -> frozenset[Any]:
    """The memories that a graph writes.

    The versions of its inputs do not say it: what was written before has one too, and ``.data`` counts none.
    """
    found = {memory(example(argument)) for node in graph.nodes for argument in _written_by(node)}
    return frozenset(found - {None})


def example(node: Node) -> Any:
    """What Dynamo had for a value of a graph."""
    return node.meta.get("example_value")


def memory(value: Any) -> Any:
    """What identifies the memory of a tensor, or of all tensors of a tuple; None where there is none."""
    if isinstance(value, tuple | list) and value:
        found = {memory(x) for x in value}
        return found.pop() if len(found) == 1 else None
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)  # by torch.vmap or torch.func.grad
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_plain else None


def function(node: Node) -> str:
    """The name of what a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _written_by(node: Node) -> Iterator[Node]:
    """The arguments that a call writes."""
    name = function(node)
    if node.op not in ("call_function", "call_method") or name in _NO_CONTENT:
        return
    if name in BODIES or name == FUNCTION:
        yield from _written_in_body(node, 1 if name in BODIES else 2)
    elif inspect.isfunction(node.target) and node.target.__module__.partition(".")[0] != "torch":
        yield from (n for n in node.all_input_nodes if _is_changed(example(n)))  # the user's: nothing says it
    else:
        map_arg([*_by_name(node)], (found := list[Node]()).append)
        yield from found


def _written_in_body(node: Node, graphs: int) -> Iterator[Node]:
    """The arguments that a call of a graph writes.

    Args:
        node: the call.
        graphs: how many graphs come before what the first of them is called with.
    """
    owner, body = node.graph.owning_module, node.args[0]
    graph = getattr(owner, str(body.target), None) if isinstance(body, Node) and body.op == "get_attr" else None
    if not isinstance(graph, torch.fx.GraphModule):
        return
    memories = written(graph.graph)
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for argument, given in zip(node.args[graphs:], inputs, strict=False):
        if isinstance(argument, Node) and memory(example(given)) in memories:
            yield argument


def _is_changed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference() and value._version > 0


def _by_name(node: Node) -> Iterator[Any]:
    """The arguments that a call of PyTorch's writes, by its name, its signature and its schema."""
    name, first = function(node), next(iter(node.args), None)
    given = _defaults(node.target) | dict(zip(_defaults(node.target), node.args, strict=False)) | node.kwargs
    yield node.kwargs.get("out")
    if node.target in _ASSIGNMENTS or (name.startswith("__i") and name.endswith("__")) or name == "__setitem__":
        yield first
    elif given.get("inplace") is True or (name.endswith("_") and not name.endswith("__")):
        yield given.get("input", first)
    listed: dict[int | None, Any] = dict(enumerate(node.args))
    for position, argument in _of_schema(node.target):
        yield listed.get(position, node.kwargs.get(argument))
    names, condition = _UNSAID.get(name, ((), ""))
    if given.get(condition):
        yield from map(given.get, names)


@functools.cache
def _defaults(target: Any) -> dict[str, Any]:
    """The names of a function's arguments in order, with their defaults; None where they have none."""
    if inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        return {p.name: None if p.default is p.empty else p.default for p in parameters}
    schemas = [] if isinstance(target, str) else _schemas(target)
    return {a.name: a.default_value for a in schemas[0].arguments} if schemas else {}


@functools.cache
def _of_schema(target: Any) -> frozenset[tuple[int | None, str]]:
    """The positions and names of the arguments that an operator writes; no position where only a name will do."""
    arguments = [(i, a) for schema in _schemas(target) for i, a in enumerate(schema.arguments)]
    written = [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset((None if a.kwarg_only else i, a.name) for i, a in written)


def _schemas(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return torch._C._jit_get_schemas_for_operator(f"aten::{name}")
