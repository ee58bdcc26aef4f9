"""What memory a step of an ``.onnx`` model needs, told without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.compiler import Report
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.memory_report import MemoryReport, memory_report
from onnxtrain.engine.tensors import Owned
from onnxtrain.errors import OptionError, close_to
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.options import Options


def model_memory(graph: ForwardGraph, sizes: Mapping[str, Sequence[int]], options: Options) -> MemoryReport:
    """The memory of a training step of a graph; nothing is computed, and all rows count.

    Its number outputs receive a gradient, or all its floating ones where none is a number.

    Args:
        graph: an optimized forward graph.
        sizes: shapes of inputs by name; may lack those whose dimensions are numbers.
        options: the budget.

    Raises:
        OptionError: a shape is missing, or is none that the input can have.
        BackendError: the backend cannot tell.
        BudgetError: the step cannot be made to fit.
    """
    named = {str(v.name): v for v in graph.model.graph.inputs}
    inputs = [named[name] for name in graph.signature.user_inputs]
    if unknown := [name for name in sizes if name not in graph.signature.user_inputs]:
        what = f"there is no input {unknown[0]}{close_to(unknown[0], graph.signature.user_inputs)}"
        raise OptionError(what, cure=f"name {', '.join(graph.signature.user_inputs)}")
    trained = {*graph.signature.differentiable}
    owned = [named[name] for name in (*graph.signature.parameters, *graph.signature.buffers)]
    weights = [_empty(v, _known(v)).requires_grad_(v.name in trained) for v in owned]
    bound = BoundGraph(graph, _Described(weights), dataclasses.replace(options, compute_optimizer=False), Report())
    return memory_report(bound, [_empty(v, _shape(v, sizes)) for v in inputs])


class _Described(Owned):
    """Weights of which only types and shapes are known.

    Args:
        weights: tensors without content, in the order of the graph's inputs.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = weights

    @property
    def device(self) -> str:
        """Where a step would run."""
        return "cpu"

    def now(self) -> list[torch.Tensor]:
        """The weights."""
        return self._weights

    def update(self, contents: Sequence[torch.Tensor]) -> None:
        """Nothing is computed, so there is nothing to write."""


def _empty(value: ir.Value, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without content; one of whole numbers has ones, for it may be asked what it holds."""
    dtype = torch_dtype(int(value.dtype or 0))
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.empty(*shape, dtype=dtype, device="meta") if is_number else torch.ones(*shape, dtype=dtype)


def _known(value: ir.Value) -> list[int]:
    dims = shapes.dims_of(value)
    if dims is None or not all(isinstance(d, int) for d in dims):
        raise OptionError(f"the shape of the weight {value.name} is not known", cure="export the model with shapes")
    return [d for d in dims if isinstance(d, int)]


def _shape(value: ir.Value, sizes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """The shape of an input: as it is stated, or as the model has it."""
    dims = shapes.dims_of(value)
    text = ",".join(str(d) for d in dims or ())
    stated = sizes.get(str(value.name), [d for d in dims or () if isinstance(d, int)])
    pairs = zip(dims or stated, stated, strict=False)
    if len(stated) == len(dims or stated) and all(isinstance(d, ir.SymbolicDim) or d == s for d, s in pairs):
        return stated
    if value.name in sizes:
        raise OptionError(f"{value.name} is {text}, not {','.join(map(str, stated))}", cure="state its sizes")
    raise OptionError(f"the sizes of {value.name}={text} are not known", cure="state a number for each")
