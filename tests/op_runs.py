"""Running a row of the table: as a graph on a backend, and as its torch reference."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from op_cases import Case, Given

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature
from onnxtrain.ir.verify import verify
from onnxtrain.plan import make_plan

_DTYPES = {
    "f": ir.DataType.FLOAT,
    "d": ir.DataType.DOUBLE,
    "l": ir.DataType.INT64,
    "?": ir.DataType.BOOL,
    "B": ir.DataType.UINT8,
    "i": ir.DataType.INT32,
}


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


def prepare(case: Case, dtype: type = np.float64, gradients: bool = False, only: int | None = None) -> Row:
    """The graph of a row; every size above 1 is a symbol named after it (``n3``), but for static inputs.

    With ``only`` the node's output of that place is the graph's only one.
    """
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    operands: list[Any] = []
    arrays: list[np.ndarray] = []
    graph = ir.Graph([], [], nodes=[], opset_imports={"": case.opset, "onnxtrain": 1}, name=case.id)
    builder = Builder(graph)
    for position, given in enumerate(case.inputs):
        if isinstance(given, Given):
            array = given.make(rng)
            array = array.astype(dtype) if array.dtype == np.float64 else array
            arrays.append(array)
            operands.append(_input(graph, position, array, position in case.static))
        elif isinstance(given, np.ndarray):
            operands.append(builder.constant(given.astype(dtype) if given.dtype == np.float64 else given))
        else:
            operands.append(None)
    attributes = {k: v.clone() if isinstance(v, ir.Graph) else v for k, v in case.attributes.items()}
    node = builder.node(case.op, operands, attributes, domain=case.domain, outputs=case.outputs)
    for index, value in enumerate(node.outputs):
        value.name = f"y{index}"
        if only in (None, index):
            graph.outputs.append(value)
    inputs = tuple(str(v.name) for v in graph.inputs)
    fixed = {f"x{position}" for position in case.frozen}
    wanted = tuple(n for n, a in zip(inputs, arrays, strict=True) if gradients and a.dtype == dtype and n not in fixed)
    signature = Signature(inputs, (), (), tuple(str(v.name) for v in graph.outputs), {}, wanted)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), signature)
    verify(forward.model)
    if not gradients:
        return Row(case, arrays, make_plan(forward), forward)
    training = build_gradient(forward)
    verify(training.model, after="the gradient")
    return Row(case, arrays, make_plan(training), forward)


def _input(graph: ir.Graph, position: int, array: np.ndarray, static: bool) -> ir.Value:
    dims = [d if static or d < 2 else ir.SymbolicDim(f"n{d}") for d in array.shape]
    value = ir.val(f"x{position}", dtype=_DTYPES[array.dtype.char], shape=dims)
    graph.inputs.append(value)
    return value


def seeds(row: Row, outputs: list[np.ndarray]) -> list[np.ndarray]:
    """A random gradient for each output that receives one: a loss is never composed."""
    rng = np.random.default_rng(7)
    by_name = dict(zip(row.plan.signature.outputs, outputs, strict=True))
    return [np.asarray(rng.uniform(-1, 1, by_name[n].shape), by_name[n].dtype) for n in row.plan.output_gradients]


def run(row: Row, name: str, device: str = "cpu") -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and gradients of a row on a backend."""
    executable = backend(name).compile(row.plan, device)
    outputs, saved = executable.forward([torch.from_numpy(np.array(a)).to(device) for a in row.arrays])
    outputs = [_numpy(y) for y in outputs]
    if row.plan.backward is None:
        return outputs, []
    dys = [torch.from_numpy(dy).to(device) for dy in seeds(row, outputs)]
    return outputs, [_numpy(g) for g in executable.backward(saved, dys)]


def _numpy(value: Any) -> np.ndarray:
    value = value.cpu() if isinstance(value, torch.Tensor) else value
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def reference(row: Row, dtype: torch.dtype) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and gradients by eager torch in a precision; seeds are those of the graph."""
    tensors = [torch.from_numpy(np.array(a)) for a in row.arrays]
    leaves = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    for name, leaf in zip(row.plan.signature.inputs, leaves, strict=True):
        leaf.requires_grad_(name in row.plan.gradients)
    made = row.case.reference(*leaves)
    made = made if isinstance(made, tuple | list) else [made]
    outputs = [y for index, y in enumerate(made) if f"y{index}" in row.plan.signature.outputs]
    arrays = [y.detach().numpy() for y in outputs]
    if row.plan.backward is None:
        return arrays, []
    names = dict(zip(row.plan.signature.outputs, outputs, strict=True))
    chosen = [names[n] for n in row.plan.output_gradients]
    dys = [torch.from_numpy(dy).to(dtype) for dy in seeds(row, arrays)]
    pairs = [(y, dy) for y, dy in zip(chosen, dys, strict=True) if y.requires_grad]
    wanted = [t for n, t in zip(row.plan.signature.inputs, leaves, strict=True) if n in row.plan.gradients]
    if not wanted:
        return arrays, []
    found = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
    gradients = [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]
    return arrays, [g.numpy() for g in gradients]
