"""Operators that torch.onnx cannot translate: kept as ``ATen`` nodes, which torch itself runs and differentiates."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.traits import PROBES

ATEN = "ATen"


def untranslatable(program: torch.export.ExportedProgram, known: set[Any]) -> set[torch._ops.OpOverload]:
    """ATen overloads of a captured program that have neither a translation nor a decomposition."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = ONNXRegistry.from_torchlib()
    decomposed = {*torch.export.default_decompositions(), *torch._decomp.decomposition_table}
    found = set()
    for node in _calls(program.graph_module):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("prim", "prims"):
            composite = target._can_decompose()
            if not (registry.is_registered(target) or target in decomposed or target in known or composite):
                found.add(target)
    return {t for t in found if returns_tensors(t)}


def returns_tensors(target: torch._ops.OpOverload) -> bool:
    """Whether all results of an overload are tensors, so that it can be one node."""
    kinds = [str(r.type) for r in target._schema.returns]
    return bool(kinds) and all(kind == "Tensor" for kind in kinds)


def failed_overload(error: BaseException) -> torch._ops.OpOverload | None:
    """The overload that torch.onnx says it could not translate, read from the chain of errors."""
    seen: BaseException | None = error
    while seen is not None:
        found = re.search(r"target=torch\.ops\.(\w+)\.(\w+)\.(\w+)", str(seen))
        if found:
            return _overload(*found.groups())
        seen = seen.__cause__ or seen.__context__
    return None


def origin_of(
    target: torch._ops.OpOverload | None, program: torch.export.ExportedProgram
) -> torch._ops.OpOverload | None:
    """The ATen operator that a primitive was decomposed from: primitives have no gradient."""
    if target is None or target.namespace != "prims":
        return target
    known = torch._decomp.decomposition_table
    table: dict[Any, Any] = {n.target: known[n.target] for n in _calls(program.graph_module) if n.target in known}
    for node in program.run_decompositions(table).graph.nodes:
        if node.target is target:
            return _overload(*str(node.meta.get("original_aten", target)).split("."))
    return target


def _overload(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def translation_of(target: torch._ops.OpOverload) -> Callable[..., Any]:
    """A translation that records the call as one ATen node."""

    def record(*args: Any, **kwargs: Any) -> Any:
        inputs: list[ir.Value | None] = []
        arguments = json.dumps([_encode(a, inputs) for a in args])
        keywords = json.dumps({k: _encode(v, inputs) for k, v in kwargs.items()})
        attributes = {"operator": str(target.name()), "overload": target._overloadname}
        attributes |= {"arguments": arguments, "keywords": keywords}
        made = record_node(ATEN, inputs, attributes, outputs=len(target._schema.returns))
        if target.name() in PROBES:
            hold(made[0] if isinstance(made, tuple) else made)
        return made

    return record


def hold(value: ir.Value) -> None:
    """Give a value a reader outside the graph: torch.onnx removes nodes that nothing reads, those with effects too."""
    ir.Node(DOMAIN, "Holder", [value], num_outputs=0)


def release(graph: ir.Graph) -> None:
    """Take away the readers that are not in the graph, which kept nodes alive through torch.onnx."""
    for value in (v for node in graph if node.domain == DOMAIN for v in node.outputs):
        for reader, index in tuple(value.uses()):
            if reader.graph is None:
                reader.replace_input_with(index, None)


def record_node(
    op_type: str,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: int = 1,
    domain: str = DOMAIN,
) -> Any:
    """Add an operator, by default one of ours, to the graph that torch.onnx builds; several outputs are a tuple."""
    from onnxscript import evaluator
    from torch.onnx._internal.exporter._tensors import SymbolicTensor

    recorder = evaluator.default()
    made = [SymbolicTensor(recorder.opset) for _ in range(outputs)]  # type: ignore[attr-defined]
    given = ir.convenience.convert_attributes(dict(attributes or {}))
    recorder.nodes.append(ir.Node(domain, op_type, inputs, attributes=given, outputs=made))  # type: ignore[attr-defined]
    return made[0] if outputs == 1 else tuple(made)


def _encode(argument: Any, inputs: list[ir.Value | None]) -> Any:
    """An argument as JSON: a tensor is ``{"input": its position}``."""
    if isinstance(argument, ir.Value):
        inputs.append(argument)
        return {"input": len(inputs) - 1}
    if isinstance(argument, list | tuple):
        return [_encode(a, inputs) for a in argument]
    if isinstance(argument, bool | int | float | str | None):
        return argument
    return {"text": str(argument)}


def _calls(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            yield from (n for n in inner.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
