"""A call of a ``torch.autograd.Function`` recorded as one opaque operator, and what it returns found out.

The class's own ``forward`` runs once on tensors without content, which shows how many tensors it returns, of which
shapes, which of them are differentiable, and which of its arguments it writes into. A class that needs contents says
its shapes itself, see ``capture/supplementary.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.supplementary import declared_results, declared_reuse, declares_shapes
from onnxtrain.errors import CaptureError, OnnxTrainError
from onnxtrain.ir.python_calls import Place, PythonCall

_VARYING = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_SERIAL = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A call while its module is captured.

    Args:
        call: what becomes of it in the graph.
        made: tensors without content, one for each that the operator returns.
    """

    call: PythonCall
    made: tuple[torch.Tensor, ...]


_RECORDED: weakref.WeakValueDictionary[str, Recorded] = weakref.WeakValueDictionary()  # operators can take only a name


def recorded(handle: str) -> Recorded:
    """The call that a recorded operator names; alive as long as the capture that recorded it is."""
    return _RECORDED[handle]


@torch.library.custom_op(
    "onnxtrain::python_op", mutates_args=(), schema="(Tensor[] tensors, SymInt[] sizes, str call) -> Tensor[]"
)
def python_op(tensors: list[torch.Tensor], sizes: list[int], call: str) -> list[torch.Tensor]:
    """What capture records of a call; it becomes a node, and only the node runs."""
    raise RuntimeError(f"{call} was recorded to become a node of a graph; it does not run by itself")


@python_op.register_fake
def _(tensors: list[torch.Tensor], sizes: list[int], call: str) -> list[torch.Tensor]:
    unknown: dict[str, Any] = {}
    return [_like(t, unknown) for t in recorded(call).made]


def _like(tensor: torch.Tensor, unknown: dict[str, Any]) -> torch.Tensor:
    """A new tensor of the same type; sizes that depend on content (``x[x > 0]``) are new each time it is traced."""
    sizes = [str(n) if free_unbacked_symbols(n) else n for n in tensor.shape]
    if not any(isinstance(n, str) for n in sizes):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    for size in sizes:
        if isinstance(size, str) and size not in unknown:
            unknown[size] = torch.library.get_ctx().new_dynamic_size()
    shape = [unknown[n] if isinstance(n, str) else n for n in sizes]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _no_gradient(ctx: Any, *dys: Any) -> Any:
    raise RuntimeError("a recorded call is differentiated in its graph")


python_op.register_autograd(_no_gradient)
torch.fx.node.has_side_effect(torch.ops.onnxtrain.python_op.default)  # runs even where nobody reads its results


def record(cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kept: list[Any], root: torch.nn.Module) -> Any:
    """Record one call and return what it returns.

    Args:
        cls: the subclass of ``torch.autograd.Function``.
        apply: its own ``apply``.
        args: the arguments.
        kept: receives what has to live as long as the capture does.
        root: the module that is captured.

    Raises:
        CaptureError: its forward pass needs the content of a tensor, or writes into one that is differentiated
            without saying so; or it takes or gives complex numbers.
    """
    operands = _Operands(cls, args)
    with _without_content(operands.tensors, root) as bare:
        given = [_stand_in(t) for t in bare]
        returned = _returned(operands, apply, given)
        made = _Results(operands, returned, given)
    _refuse_complex(made.recorded, operands.tensors)
    kept.append(made.recorded)
    handle = f"{made.recorded.call.name}#{next(_SERIAL)}"
    _RECORDED[handle] = made.recorded
    outputs = torch.ops.onnxtrain.python_op(operands.tensors, operands.sizes, handle)
    return made.restore([t if d else t.detach() for t, d in zip(outputs, made.differentiable, strict=True)])


def _refuse_complex(made: Recorded, tensors: Sequence[torch.Tensor]) -> None:
    """Raise where a call takes or gives complex numbers, which no input and no output of a node can be."""
    if any(t.is_complex() for t in (*made.made, *tensors)):
        raise CaptureError(
            f"{made.call.name}, a torch.autograd.Function, takes or gives complex numbers, which no node does",
            cure="pass torch.view_as_real(z) to it, and let it return that; torch.view_as_complex is part of the graph",
        )


class _Operands:
    """The arguments of a call, and what differs from run to run: tensors, sizes, and numbers made of sizes.

    Attributes:
        call: the call, of which the results are not known yet.
        tensors: the tensors in order; numbers are among them, as tensors of no dimensions.
        sizes: the sizes in order.
        numbers: by position among the tensors, the number that one stands for.
    """

    def __init__(self, cls: Any, args: tuple[Any, ...]) -> None:
        found, structure = pytree.tree_flatten(args, is_leaf=lambda a: not _is_opened(a))
        self.tensors: list[torch.Tensor] = []
        self.sizes: list[Any] = []
        self.numbers: dict[int, Any] = {}
        leaves = tuple(self._leaf(leaf) for leaf in found)
        device = next((t.device.type for t in self.tensors), "cpu")
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        self.call = PythonCall(cls, f"{cls.__module__}.{cls.__qualname__}", leaves, structure, autocast=autocast)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Size):
            self.sizes += leaf
            return Place("shape", len(self.sizes) - len(leaf), len(leaf), torch.Size)
        if isinstance(leaf, torch.SymInt):
            self.sizes.append(leaf)
            return Place("size", len(self.sizes) - 1)
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            self.numbers[len(self.tensors)] = leaf
            dtype = torch.float64 if isinstance(leaf, torch.SymFloat) else torch.bool
            self.tensors.append(torch.scalar_tensor(leaf, dtype=dtype))  # type: ignore[arg-type]
            return Place("number", len(self.tensors) - 1)
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf)
            return Place("tensor", len(self.tensors) - 1)
        return leaf


def _is_opened(argument: Any) -> bool:
    """Whether an argument is taken apart; lists and dicts without tensors are passed on as the objects they are."""
    holds = isinstance(argument, list | tuple | dict) and not isinstance(argument, torch.Size)
    return holds and any(isinstance(x, _VARYING) for x in pytree.tree_leaves(argument))


@contextlib.contextmanager
def _without_content(tensors: Sequence[torch.Tensor], root: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within it nothing is traced, and tensors (the module's weights too) have no content; gives the tensors."""
    mode = detect_fake_mode([_bare(t) for t in tensors])
    assert mode is not None, "torch.export traces with tensors that have no content"
    passing = contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    modes = _disable_current_modes(), torch._C.DisableTorchFunction(), mode, passing, torch.enable_grad()
    with contextlib.ExitStack() as stack:
        for context in (*modes, _bare_weights(root)):
            stack.enter_context(context)
        yield [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in map(_bare, tensors)]


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without content beneath what records operations on it."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def _bare_weights(root: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a forward pass that calls modules find weights of the same kind as its arguments."""
    tables = [t for m in root.modules() for t in (m._parameters, m._buffers)]
    return replaced(*((t, n, _bare(v)) for t in tables for n, v in t.items() if isinstance(v, FunctionalTensor)))


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to run a forward pass with: no leaf, so that it may be written into."""
    gradient = tensor.is_floating_point() or tensor.is_complex()
    leaf = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=gradient
    )
    return leaf.clone()


def _returned(operands: _Operands, apply: Callable[..., Any], given: Sequence[torch.Tensor]) -> Any:
    """What the call returns for tensors without content, or what its ``infer_shape`` says it does."""
    call = operands.call
    if declares_shapes(call.function):
        return declared_results(call, given)
    try:
        return apply(*call.arguments([operands.numbers.get(i, t) for i, t in enumerate(given)], operands.sizes))
    except OnnxTrainError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise CaptureError(
            f"the forward pass of {call.name} cannot run on tensors without content: {type(error).__name__}: {reason}",
            cure="state the shapes of its outputs: register_custom_function_schema_supplementary with infer_shape",
        ) from error


class _Results:
    """What a call returned for tensors without content, and how to return the same while the module is traced.

    Attributes:
        recorded: the call with its results known.
        differentiable: which of the operator's outputs carry a gradient.

    Raises:
        CaptureError: it changed a tensor that is differentiated, without saying so.
    """

    def __init__(self, operands: _Operands, returned: Any, given: Sequence[torch.Tensor]) -> None:
        self._tensors = operands.tensors
        self._leaves, self._structure = pytree.tree_flatten(returned)
        made = [t for t in self._leaves if isinstance(t, torch.Tensor)]
        places = {id(t): i for i, t in enumerate(given)}
        changed = tuple(i for i, t in enumerate(given) if t._version)
        self._written = {k: places[id(t)] for k, t in enumerate(made) if id(t) in places}
        shown = tuple(i for i in changed if i not in self._written.values())
        self._refuse_hidden(operands, shown)
        self._written |= {len(made) + k: position for k, position in enumerate(shown)}
        self.differentiable = [t.requires_grad for t in made] + [False] * len(shown)
        count = itertools.count()
        results = tuple(
            Place("tensor", next(count)) if isinstance(x, torch.Tensor) else Place("size", 0) if _is_size(x) else x
            for x in self._leaves
        )
        call = dataclasses.replace(operands.call, results=results, changed=changed, shown=shown)
        maps = declared_reuse(call, len(given), len(made))
        call = dataclasses.replace(call, forward_reuse=maps[0], backward_reuse=maps[1])
        self.recorded = Recorded(call, tuple(t.detach() for t in [*made, *(given[i] for i in shown)]))

    def _refuse_hidden(self, operands: _Operands, shown: Sequence[int]) -> None:
        if torch.is_grad_enabled() and any(operands.tensors[i].requires_grad for i in shown):
            raise CaptureError(
                f"the forward pass of {operands.call.name} changes an argument in place that is differentiated",
                cure="call ctx.mark_dirty(argument) in it, and return the argument",
            )

    def restore(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The structure that was returned, with these tensors in it; arguments that were written into are written."""
        final = list(outputs)
        if not getattr(self.recorded.call.function, "is_written", True):
            return outputs[0]
        for index, position in self._written.items():
            self._tensors[position].copy_(outputs[index])
            final[index] = self._tensors[position]
        remaining = iter(final)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return self._structure.unflatten(leaves)


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
