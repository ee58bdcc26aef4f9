"""A graph that Dynamo hands over as a module: weights are its own, and its inputs are what varies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.amp import autocast_mode
from torch.fx import traceback
from torch.utils import _pytree as pytree

from onnxtrain.torchdynamo.inputs import Input, Role
from onnxtrain.torchdynamo.transforms import Transforms
from onnxtrain.torchdynamo.writes import BODIES, FUNCTION

_DATA = frozenset(("set_", "shallow_copy_data_"))  # what Dynamo makes of an assignment to data, by torch's version
PRIVATE = ("_graph", "_inputs", "_slots", "_written")  # attributes that say nothing that calls do not


class Slot(NamedTuple):
    """Where a weight is held.

    Args:
        position: of the input that it is.
        owner: the module that has it.
        kind: the name of the table; torch.export puts another one in its place.
        leaf: its name there.
    """

    position: int
    owner: torch.nn.Module
    kind: str
    leaf: str

    @property
    def table(self) -> dict[str, Any]:
        """The table as it is now."""
        return self.owner.__dict__[self.kind]


class Program(torch.nn.Module):
    """A graph as a module: ``forward`` takes what is the user's by name.

    Parameters and buffers are set at each call to those that Dynamo passes: one graph may serve many modules, as the
    layers of a stack. What the program writes into an input, it writes into a copy that it returns.

    Args:
        graph: the graph.
        inputs: its inputs.
        given: what the graph is called with first.
    """

    def __init__(self, graph: torch.fx.GraphModule, inputs: Sequence[Input], given: Sequence[Any]) -> None:
        super().__init__()
        self._graph, self._inputs = (graph,), tuple(dataclasses.replace(x, node=None) for x in inputs)
        self._written = tuple(i for i, x in enumerate(inputs) if x.is_written)
        if any(True for _ in (*graph.parameters(), *graph.buffers())):
            self.graph_module = graph  # it holds weights of its own
        self.train(torch.is_grad_enabled())
        self._slots = tuple(self._slot(i, x, given[i]) for i, x in enumerate(inputs) if _is_owned(x))

    def _slot(self, position: int, given: Input, tensor: torch.Tensor) -> Slot:
        """Register a weight under its name."""
        path, _, leaf = given.name.rpartition(".")
        owner: torch.nn.Module = self
        for name in path.split(".") if path else ():
            if name not in owner._modules:
                owner._modules[name] = torch.nn.Module().train(self.training)
            owner = owner._modules[name]  # type: ignore[assignment]
        slot = Slot(position, owner, "_parameters" if given.role is Role.PARAMETER else "_buffers", leaf)
        slot.table[leaf] = tensor
        return slot

    def take(self, values: Sequence[Any]) -> dict[str, Any]:
        """Set the weights of a call, and give what ``forward`` takes by name.

        Args:
            values: what Dynamo passes, in order.
        """
        for slot in self._slots:
            table = slot.table
            if table[slot.leaf] is not values[slot.position]:
                table[slot.leaf] = values[slot.position]
        made = {}
        for position, given in enumerate(self._inputs):
            if given.role is Role.TENSOR or given.role is Role.NUMBER:
                made[given.name] = values[position].clone() if given.is_written else values[position]
            elif given.role is Role.WRAPPED:
                made[given.name] = values[position].item()
        return made

    def forward(self, **given: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
        """The outputs, and the new content of inputs that are written."""
        values: list[Any] = []
        for known in self._inputs:
            if _is_owned(known) or known.role is Role.SIZE:
                values.append(None)
            else:
                values.append(given[known.name].clone() if known.is_written else given[known.name])
        for slot in self._slots:
            values[slot.position] = getattr(slot.owner, slot.leaf)
        for position, known in enumerate(self._inputs):
            if known.role is Role.SIZE:
                tensor, axis = known.axis
                values[position] = values[tensor].shape[axis]
        numbers = [x for x, known in zip(values, self._inputs, strict=True) if known.role is Role.WRAPPED]
        return _Run(self._graph[0]).outputs(values, numbers), tuple(values[i] for i in self._written)


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr.is_Symbol


def _is_owned(given: Input) -> bool:
    return given.role is Role.PARAMETER or given.role is Role.BUFFER


class _Run(torch.fx.Interpreter):
    """Runs a graph call by call, each under the line of the user's that made it."""

    def outputs(self, values: Sequence[Any], numbers: Sequence[Any] = ()) -> Any:
        """What the graph returns; modes are as before, also where it raises.

        Args:
            values: its inputs.
            numbers: those of them that are numbers to the user, or tensors in the place of numbers that vary.
        """
        self._numbers = tuple(numbers)
        self._autocasts: list[torch.autocast] = []
        self._transforms = Transforms()
        self._sizes = {d.node.expr: d for x in values if isinstance(x, torch.Tensor) for d in x.shape if _is_symbol(d)}
        try:
            with traceback.preserve_node_meta(), torch.set_grad_enabled(torch.is_grad_enabled()):
                return self.run(*values, enable_io_processing=False)
        finally:
            self.env.clear()  # nothing of a trace outlives it
            for mode in reversed(self._autocasts):
                mode.__exit__(None, None, None)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method; ``item`` of a number that Dynamo passes as a tensor is the number, strides are made of sizes."""
        if target == "stride":
            made = super().call_method(target, args, kwargs)
            return tuple(map(self._of_sizes, made)) if isinstance(made, tuple) else self._of_sizes(made)
        if target == "item" and any(args[0] is number for number in self._numbers):
            return args[0]
        return super().call_method(target, args, kwargs)

    def _of_sizes(self, stride: Any) -> Any:
        """A stride as a product of the inputs' sizes, which a graph has; itself where it is none."""
        if not isinstance(stride, torch.SymInt):
            return stride
        factors = sympy.Mul.make_args(stride.node.expr)
        made: Any = 1
        for base, power in (factor.as_base_exp() for factor in factors):
            known = int(base) if base.is_Integer else self._sizes.get(base)
            if known is None or not power.is_Integer or power < 1:
                return stride
            for _ in range(int(power)):
                made = made * known
        return made

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function; one that calls a graph runs it here."""
        if (made := self._transforms.call(target, args, kwargs)) is not NotImplemented:
            return made
        name = getattr(target, "__name__", "")
        if target is torch.sym_sum:
            return sum(args[0])
        if name == "_get_data_attr":
            return args[0].data
        if name in _DATA and args[0].shape == args[1].shape:  # x.data = y: its content, which has no history
            args[0].data.copy_(args[1])
            return args[0]
        if name == "fma.default":  # addcmul with a number; torch rounds once
            return args[0] * args[1] + args[2]
        if target is autocast_mode._enter_autocast:
            self._autocasts.append(torch.autocast(*args))
            return self._autocasts[-1].__enter__()
        if target is autocast_mode._exit_autocast:
            return self._autocasts.pop().__exit__(None, None, None)
        if isinstance(target, torch._ops.HigherOrderOperator):
            if name in BODIES:
                return _Run(args[0]).outputs(args[1:])
            if name == FUNCTION:
                return _applied(args[0], args[1], kwargs).apply(*args[2:])
        return super().call_function(target, args, kwargs)


def _applied(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, settings: dict[str, Any]) -> Any:
    """The class of ``torch.autograd.Function`` that Dynamo took apart into two graphs.

    torch's own keeps what a call saves beside the class, where the next call's takes its place.
    """
    fixed = frozenset(settings.get("non_differentiable_idx", ()))
    dirty = frozenset(settings.get("dirty_idx", ()))

    class DynamoFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            made, saved = torch.fx.Interpreter(forward).run(*given)
            leaves, ctx.spec = pytree.tree_flatten(saved)
            ctx.others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
            ctx.save_for_backward(*(x for x in leaves if isinstance(x, torch.Tensor)))
            listed = made if isinstance(made, tuple | list) else (made,)
            ctx.mark_dirty(*(x for i, x in enumerate(listed) if i in dirty))
            ctx.mark_non_differentiable(*(x for i, x in enumerate(listed) if i in fixed))
            return made

        @staticmethod
        def backward(ctx: Any, *dys: Any) -> Any:
            tensors = iter(ctx.saved_tensors)
            leaves = [next(tensors) if x is None else x for x in ctx.others]
            return torch.fx.Interpreter(backward).run(*dys, *pytree.tree_unflatten(leaves, ctx.spec))

    return DynamoFunction
