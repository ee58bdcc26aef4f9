"""Running a row of the table: as a graph on a backend, and as its torch reference."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from op_cases import Case, Given

from onnxtrain.execute import Executable, backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature
from onnxtrain.ir.verify import verify
from onnxtrain.plan import make_plan

Results = tuple[list[np.ndarray], dict[str, np.ndarray]]  # outputs, gradients by input


@dataclasses.dataclass
class Row:
    """A case with its inputs made.

    Args:
        case: the row of the table.
        arrays: one array for each input that is not a constant.
        plan: its plan, forward only or with gradients of all floating inputs.
        graph: its graph before planning.
    """

    case: Case
    arrays: list[np.ndarray]
    plan: Plan
    graph: ForwardGraph


def draw(case: Case, dtype: type = np.float64, sizes: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """Random arrays for the inputs of a row, the same at each call; ``sizes`` replaces sizes that are symbols."""
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    arrays = []
    for position, given in enumerate(case.inputs):
        if isinstance(given, Given):
            shape = given.shape if position in case.static else tuple((sizes or {}).get(d, d) for d in given.shape)
            arrays.append(_typed(dataclasses.replace(given, shape=shape).make(rng), dtype))
    return arrays


def _typed(array: np.ndarray, dtype: type) -> np.ndarray:
    return array.astype(dtype) if array.dtype == np.float64 else array


def prepare(case: Case, dtype: type = np.float64, gradients: bool = False) -> Row:
    """The graph of a row; every size above 1 is a symbol named after it (``n3``), but for static inputs."""
    arrays = draw(case, dtype)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name=case.id)
    builder = Builder(graph)
    operands = _operands(case, builder, arrays, dtype)
    node = builder.node(case.op, operands, _attributes(case), domain=case.domain, outputs=case.outputs)
    for index, value in enumerate(node.outputs):
        value.name = f"y{index}"
        graph.outputs.append(value)
    signature = Signature(
        tuple(str(v.name) for v in graph.inputs), (), (), tuple(str(v.name) for v in node.outputs), {}
    )
    if gradients:
        fixed = {f"x{position}" for position in case.frozen}
        pairs = zip(signature.inputs, arrays, strict=True)
        wanted = tuple(name for name, a in pairs if a.dtype == dtype and name not in fixed)
        signature = dataclasses.replace(signature, differentiable=wanted)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), signature)
    verify(forward.model)
    return Row(case, arrays, _plan(forward, gradients), forward)


def _plan(forward: ForwardGraph, gradients: bool) -> Plan:
    if not gradients:
        return make_plan(forward)
    training = build_gradient(forward)
    verify(training.model, after="the gradient")
    return make_plan(training)


def _operands(case: Case, builder: Builder, arrays: list[np.ndarray], dtype: type) -> list[ir.Value | None]:
    remaining, operands = iter(arrays), []
    for position, given in enumerate(case.inputs):
        if isinstance(given, Given):
            operands.append(_input(builder.graph, position, next(remaining), position in case.static))
        else:
            operands.append(None if given is None else builder.constant(_typed(np.asarray(given), dtype)))
    return operands


def _attributes(case: Case) -> dict[str, Any]:
    """The attributes of a row, arrays made tensors."""
    return {k: ir.tensor(v) if isinstance(v, np.ndarray) else v for k, v in case.attributes.items()}


def _input(graph: ir.Graph, position: int, array: np.ndarray, static: bool) -> ir.Value:
    dims = [d if static or d == 1 else ir.SymbolicDim(f"n{d}") for d in array.shape]
    value = ir.val(f"x{position}", dtype=ir.DataType.from_numpy(array.dtype), shape=dims)
    graph.inputs.append(value)
    return value


def resized(row: Row) -> list[list[np.ndarray]]:
    """Arrays of other sizes that the reference takes too: all symbols one larger, then each by itself."""
    given = [g for i, g in enumerate(row.case.inputs) if isinstance(g, Given) and i not in row.case.static]
    symbols = sorted({d for g in given for d in g.shape if d > 1})
    alone = [{n: n + 1} for n in symbols]
    choices = [{n: n + 1 for n in symbols}, *alone] if len(symbols) > 1 else alone
    made = [draw(row.case, np.float64, sizes) for sizes in choices]
    return [arrays for arrays in made if _accepts(row, arrays)]


def _accepts(row: Row, arrays: list[np.ndarray]) -> bool:
    try:
        row.case.reference(*map(torch.from_numpy, arrays))
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def seeds(row: Row, outputs: list[np.ndarray]) -> list[np.ndarray]:
    """A random gradient for each output that receives one: a loss is never composed."""
    rng = np.random.default_rng(7)
    by_name = dict(zip(row.plan.signature.outputs, outputs, strict=True))
    return [np.asarray(rng.uniform(-1, 1, by_name[n].shape), by_name[n].dtype) for n in row.plan.output_gradients]


def run(row: Row, name: str) -> Results:
    """Outputs and gradients of a row on a backend."""
    return execute(row, backend(name).compile(row.plan))


def execute(row: Row, executable: Executable) -> Results:
    """Outputs and gradients of a row by what a backend has compiled."""
    outputs, saved = executable.forward([torch.from_numpy(np.array(a)) for a in row.arrays])
    outputs = [_numpy(y) for y in outputs]
    if row.plan.backward is None:
        return outputs, {}
    made = executable.backward(saved, [torch.from_numpy(dy) for dy in seeds(row, outputs)])
    return outputs, {name: _numpy(g) for name, g in zip(row.plan.gradients, made, strict=True)}


def _numpy(value: Any) -> np.ndarray:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def reference(row: Row, dtype: torch.dtype) -> Results:
    """Outputs and gradients of all differentiable inputs by eager torch in a precision; seeds are those of the graph."""
    tensors = [torch.from_numpy(np.array(a)) for a in row.arrays]
    leaves = {n: t.to(dtype) if t.is_floating_point() else t for n, t in zip(_names(row), tensors, strict=True)}
    wanted = {n: leaf.requires_grad_() for n, leaf in leaves.items() if n in row.plan.signature.differentiable}
    made = row.case.reference(*leaves.values())
    outputs = list(made) if isinstance(made, tuple | list) else [made]
    arrays = [y.detach().numpy() for y in outputs]
    if row.plan.backward is None:
        return arrays, {}
    found = _autograd(row, dict(zip(row.plan.signature.outputs, outputs, strict=True)), wanted, arrays)
    pairs = zip(wanted.items(), found, strict=True)
    return arrays, {n: np.zeros(x.shape, arrays[0].dtype) if g is None else g.numpy() for (n, x), g in pairs}


def _names(row: Row) -> tuple[str, ...]:
    return row.plan.signature.inputs


def _autograd(row: Row, outputs: dict[str, Any], wanted: dict[str, Any], arrays: list[np.ndarray]) -> Any:
    dys = [torch.from_numpy(dy) for dy in seeds(row, arrays)]
    chosen = [outputs[name] for name in row.plan.output_gradients]
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip(chosen, dys, strict=True) if y.requires_grad]
    return torch.autograd.grad([y for y, _ in pairs], list(wanted.values()), [dy for _, dy in pairs], allow_unused=True)
