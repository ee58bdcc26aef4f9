"""Sizes as symbols while a module is traced: none becomes a number by ``len``, none outgrows what sympy can handle.

What is of Python's own is replaced here, ``len``, ``int`` and ``float``, and in ``sizes_as_numbers``, and only while
the user's forward pass runs; ``int`` and ``float`` only for modules of which a line calls them on a free number.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.size_questions import noted_answers
from onnxtrain.capture.sizes_as_numbers import NUMBERS, sizes_as_numbers
from onnxtrain.capture.source_lines import is_asked_by_user, is_users

_TENSOR: Any = torch.Tensor
_OF_GRADIENTS = (_TENSOR.requires_grad.__get__, _TENSOR.grad_fn.__get__, _TENSOR.is_leaf.__get__)
_OF_FORM = (*_OF_GRADIENTS, _TENSOR.is_contiguous, _TENSOR.stride)
_SQUEEZES = ("squeeze", "squeeze_", "squeeze_copy")
Axis = tuple[int, int]  # position of an input tensor, and one of its axes
LARGEST = 24  # operations in one size: models that can be dynamic stay below 15; above, each view takes seconds


class ConstantSizesError(Exception):
    """Sizes have to be constants: torch takes them as numbers, or they make an expression too large to reason about.

    Attributes:
        axes: the input axes whose sizes they are.
    """

    def __init__(self, axes: frozenset[Axis]) -> None:
        super().__init__(f"the sizes of input axes {sorted(axes)} have to be constants")
        self.axes = axes


def axes_of(tensors: Sequence[torch.Tensor], size: int | None = None) -> frozenset[Axis]:
    """All axes of tensors, or those of one size."""
    return frozenset((i, a) for i, t in enumerate(tensors) for a, s in enumerate(t.shape) if size in (None, s))


@dataclasses.dataclass
class Assumed:
    """What a trace stands on and torch keeps no guard of, because it takes each symbol to be 2 or more.

    Args:
        not_one: sizes that were taken to be other than 1 where 1 would change the result's shape, or an answer.
        answered: what was asked of sizes and holds from 2 on.
        of_memory: what was answered of how tensors lie in memory, which concerns what the module writes.
        form: whether the module asked how tensors lie in memory, or about gradients.
        gradients: whether it asked who needs a gradient, or whether gradients are enabled.
    """

    not_one: set[sympy.Expr] = dataclasses.field(default_factory=set)
    answered: set[sympy.Basic] = dataclasses.field(default_factory=set)
    of_memory: set[sympy.Basic] = dataclasses.field(default_factory=set)
    form: bool = False
    gradients: bool = False

    def ask_gradients(self) -> bool:
        """Whether gradients are enabled, where what is traced depends on it."""
        self.form = self.gradients = True
        return torch._C.is_grad_enabled()


@contextlib.contextmanager
def symbolic_sizes(tensors: Sequence[torch.Tensor]) -> Iterator[Assumed]:
    """Run a block of tracing with sizes kept as symbols; gives what was assumed of them.

    Args:
        tensors: the inputs, as torch.export passes them to the forward pass.

    Raises:
        ConstantSizesError: an intermediate result has a size of more than ``LARGEST`` operations.
    """
    assumed = Assumed()
    watch, answers = _Watch(tensors, assumed), noted_answers(tensors, assumed.answered, assumed.of_memory)
    with sizes_as_numbers(), _symbolic_len(), _noted_grad_mode(assumed), watch, answers:
        yield assumed


def _noted_grad_mode(assumed: Assumed) -> contextlib.AbstractContextManager[None]:
    """Note whether the user's code asks if gradients are enabled."""

    def is_grad_enabled() -> bool:
        by_user = is_users(sys._getframe(1).f_code.co_filename)
        return assumed.ask_gradients() if by_user else torch._C.is_grad_enabled()

    return replaced((torch, "is_grad_enabled", is_grad_enabled))


def _symbolic_len() -> contextlib.AbstractContextManager[None]:
    """Make ``len(tensor)`` the symbol that ``tensor.shape[0]`` is: of ``__len__`` Python takes numbers only."""
    plain = builtins.len

    def symbolic(data: Any) -> Any:
        return data.shape[0] if isinstance(data, torch.Tensor) and data.dim() > 0 else plain(data)

    return replaced((builtins, "len", symbolic))


def symbolic_numbers(free: Iterable[tuple[str, str]]) -> contextlib.AbstractContextManager[None]:
    """Make ``int(tensor)`` and ``float(tensor)`` symbols: of ``__int__`` and ``__float__`` Python takes numbers only.

    Args:
        free: how and where tensors are looked at, ``("__int__", "file:line")``; concerned are the modules of the files.
    """
    wanted = {(place.rpartition(":")[0], NUMBERS[kind]) for kind, place in free if kind in NUMBERS}
    modules = list(sys.modules.values()) if wanted else []
    concerned = [(m, number) for m in modules for file, number in wanted if getattr(m, "__file__", None) == file]
    return replaced(*((m, n.__name__, n) for m, n in concerned if n.__name__ not in vars(m)))


class _Watch(TorchFunctionMode):
    """Looks at the sizes of every result: what is counted depends on the module alone, never on the clock.

    Windows that are padded, shifted and clamped to the image (Swin) are the known case: after a few layers each view
    asks sympy to compare expressions of hundreds of operations.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], assumed: Assumed) -> None:
        super().__init__()
        self._assumed = assumed
        self._axes: dict[sympy.Basic, list[Axis]] = {}
        for position, tensor in enumerate(tensors):
            for axis, size in enumerate(tensor.shape):
                for symbol in expression_of(size).free_symbols:
                    self._axes.setdefault(symbol, []).append((position, axis))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, result = getattr(func, "__name__", ""), NotImplemented
        if name in _SQUEEZES:
            self._assumed.not_one |= _kept_by_squeeze(*args, **(kwargs or {}))
            result = _squeezed(func, *args, **(kwargs or {}))
        if name == "as_strided":  # of nothing it reads what is beside it
            self._assumed.answered |= {sympy.Ne(size, 0) for size in _symbols_of(args[0].shape)}
        if func in _OF_FORM and is_asked_by_user(sys._getframe(1)):
            self._assumed.form = True
            self._assumed.gradients |= func in _OF_GRADIENTS
            self._assumed.not_one |= _symbols_of(args[0].shape) if func is _TENSOR.stride else set()
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            for size in result.shape:
                self._check(size)
        return result

    def _check(self, size: int | torch.SymInt) -> None:
        """Each factor for itself, so that a batch size that only multiplies an overgrown size is not blamed.

        Raises:
            ConstantSizesError: the size is too large an expression of the inputs' sizes.
        """
        for factor in sympy.Mul.make_args(expression_of(size)):
            if factor.is_Atom or factor.count_ops() <= LARGEST:
                continue
            axes = frozenset(place for symbol in factor.free_symbols for place in self._axes.get(symbol, ()))
            if axes:
                raise ConstantSizesError(axes)


def _kept_by_squeeze(input: torch.Tensor, dim: int | Sequence[int] | None = None) -> set[sympy.Expr]:
    """The symbolic sizes that a squeeze keeps because torch.export takes symbols to be 2 or more."""
    axes = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return _symbols_of(input.shape[axis] for axis in axes if input.dim())


def _symbols_of(sizes: Iterable[int | torch.SymInt]) -> set[sympy.Expr]:
    """Those of the sizes that are not known."""
    return {size for size in map(expression_of, sizes) if not size.is_number}


def _squeezed(func: Callable[..., Any], input: torch.Tensor, dim: int | Sequence[int] | None = None) -> Any:
    """A squeeze of those axes alone that are of size 1: the others stay, and a graph would take them to be 1."""
    axes = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if not input.dim() or not any(isinstance(input.shape[a], torch.SymInt) for a in axes):
        return NotImplemented
    if dim is None and not any(_is_of_content(input.shape[a]) for a in axes):
        return NotImplemented
    ones = tuple(a for a in axes if _is_one(input.shape[a]))
    if ones or func.__name__.endswith("_"):  # one in place makes other views again where it takes no axis, too
        return func(input, ones)
    return torch.ops.aten.alias(input)


def _is_one(size: int | torch.SymInt) -> bool:
    """Whether a size is 1: symbols of inputs are not; where content decides, the answer is a condition of the graph."""
    return bool(size == 1) if isinstance(size, int) or _is_of_content(size) else False


def _is_of_content(size: int | torch.SymInt) -> bool:
    """Whether content decides on a size, or did until a question was answered."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size) or expression_of(size).is_number)


def expression_of(size: int | torch.SymInt) -> sympy.Expr:
    """A size as sympy sees it."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
