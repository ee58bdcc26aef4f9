"""Numbers read out of tensors that stay free in a graph, and what was asked of them while it was traced.

A size that depends on content (``mask.nonzero()``), or a number that was looked at and is only used as a size or a
factor, is a symbol. What Python code or torch asks of it (``if n > 0``) is answered for the rehearsed call, and is a
condition under which the graph is what the module computes. So is what torch takes it to be where it meets another
size: a single row would be broadcast there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from onnxtrain.capture.looks import Look
from onnxtrain.capture.size_questions import ASKED, CAUGHT, settled
from onnxtrain.capture.symbolic_sizes import Axis

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class FreeNumber:
    """A number that a graph does not stand on.

    Args:
        look: where it was read, and what it was in the rehearsal.
        nth: how many numbers were read before at the same line.
        symbol: what stands for it.
    """

    look: Look
    nth: int
    symbol: sympy.Symbol


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What was asked of free numbers, true for the rehearsed call.

    Args:
        relations: what was asked.
        numbers: the numbers that it was asked of.
        sizes: for symbols that are sizes of inputs, an input axis that has this size.
    """

    relations: tuple[sympy.Basic, ...] = ()
    numbers: tuple[FreeNumber, ...] = ()
    sizes: tuple[tuple[sympy.Symbol, Axis], ...] = ()

    def hold(self, answers: Sequence[Any], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether all is so for other numbers.

        Args:
            answers: the content of each number.
            shapes: sizes of the inputs.
        """
        values = {n.symbol: sympy.sympify(a) for n, a in zip(self.numbers, answers, strict=True)}
        values |= {symbol: sympy.Integer(shapes[position][axis]) for symbol, (position, axis) in self.sizes}
        return all(settled(relation, values) == sympy.true for relation in self.relations)

    def told(self) -> list[str]:
        """What was asked, for a person to read."""
        names = [
            sympy.Symbol(f"n{i}" if len(self.numbers) > 1 else "n", integer=True) for i in range(len(self.numbers))
        ]
        named = {number.symbol: name for number, name in zip(self.numbers, names, strict=True)}
        read = [f"{number.look.place} reads {name}" for number, name in zip(self.numbers, names, strict=True)]
        asked = [str(relation.xreplace(named)) for relation in self.relations]
        return [", ".join([*read, f"and {' and '.join(asked)}"])] if asked else []


class FreeNumbers:
    """The free numbers of one trace.

    Args:
        tensors: the inputs, as torch.export passes them to the forward pass.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._axes: dict[sympy.Symbol, Axis] = {}
        for position, tensor in enumerate(tensors):
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._axes.setdefault(size.node.expr, (position, axis))
        self._read: dict[sympy.Symbol, tuple[FreeNumber, Tensor]] = {}
        self._counted: dict[Any, str] = {}
        self._environment: Any = None

    def count(self, sizes: Sequence[torch.SymInt], place: str) -> None:
        """Note a size that depends on content before there is a rehearsal, and the line that makes it."""
        if len(sizes) == 1:
            self._environment = sizes[0].node.shape_env
            self._counted[sizes[0].node.expr] = place

    def meeting(self) -> str | None:
        """The line that makes a size which met one of the inputs', where no rehearsal told what it is.

        Or the line whose error, which another size would raise, the user's code catches.
        """
        for assertion in (a for found in self._deferred().values() for a in found):
            if assertion.msg.startswith(CAUGHT):
                return assertion.msg.removeprefix(CAUGHT)
        pairs = (sorted(r.free_symbols, key=self._counted.__contains__) for r in self._met(self._counted))
        return next((self._counted[both[-1]] for both in pairs if both[0] in self._axes), None)

    def add(self, number: Any, look: Look, nth: int, content: Tensor) -> None:
        """Say what a number was in the rehearsal, for torch to answer questions with.

        Args:
            number: the number as it is traced; one whose value is known is left alone.
            look: where it was read, and what it was.
            nth: how many were read before at the same line.
            content: a tensor that holds it.
        """
        if not isinstance(number, torch.SymInt | torch.SymFloat) or not isinstance(number.node.expr, sympy.Symbol):
            return
        symbol, self._environment = number.node.expr, number.node.shape_env
        if symbol not in self._read and symbol not in self._axes:
            self._environment.set_real_tensor_prop_unbacked_vals(symbol, look.answer)
            self._read[symbol] = FreeNumber(look, nth, symbol), content.clone()

    def add_size(self, size: torch.SymInt, look: Look, nth: int, content: Tensor) -> None:
        """Say what a size that depends on content was; that it was 1 is kept, as it decides what is broadcast."""
        self.add(size, look, nth, content)
        if look.answer == 1 and size.node.expr in self._read:
            self._environment.size_like.discard(size.node.expr)  # a size that torch believes to be 2 at least
            self._environment._set_replacement(size.node.expr, sympy.Integer(1), "one row")

    def asked(self) -> tuple[Conditions, list[Tensor]]:
        """What was asked, and for each number of which something was asked a tensor that holds it."""
        relations = dict.fromkeys(self._relations())
        symbols = {s for relation in relations for s in relation.free_symbols}
        kept = [(number, content) for symbol, (number, content) in self._read.items() if symbol in symbols]
        known = {number.symbol for number, _ in kept} | set(self._axes)
        sizes = tuple((s, axis) for s, axis in self._axes.items() if s in symbols)
        conditions = tuple(r for r in relations if r.free_symbols <= known)
        return Conditions(conditions, tuple(number for number, _ in kept), sizes), [content for _, content in kept]

    def _relations(self) -> Iterator[sympy.Basic]:
        asked = self._deferred()
        self._claim(asked)
        for assertions in asked.values():
            yield from (a.expr for a in assertions if a.msg.startswith(ASKED))
        yield from self._met(self._read)

    def _deferred(self) -> dict[sympy.Symbol | None, list[Any]]:
        """What torch required of numbers, and answered, by number."""
        return {} if self._environment is None else self._environment.deferred_runtime_asserts

    def _met(self, numbers: Container[Any]) -> Iterator[sympy.Basic]:
        """What torch took some of the numbers to be, each alone on a side."""
        found = [] if self._environment is None else taken_to_be(self._environment)
        yield from (relation for relation in found if any(side in numbers for side in relation.args))

    def _claim(self, asked: dict[sympy.Symbol | None, list[Any]]) -> None:
        """Put what was asked of a floating number under its symbol, in place.

        torch 2.11 has it among conditions on inputs alone, whose solver knows no such symbol and stops the trace.
        """
        for assertion in asked.pop(None, []):
            number = next((s for s in self._read if s in assertion.expr.free_symbols), None)
            asked.setdefault(number, []).append(assertion)


def taken_to_be(environment: Any) -> Iterator[sympy.Basic]:
    """What torch took numbers that depend on content to be: a size where both met, a constant."""
    for number, other in environment.replacements.items():
        if environment.is_unbacked_symint(number):
            yield sympy.Eq(number, other, evaluate=False)
    deferred = (a.expr for found in environment.deferred_runtime_asserts.values() for a in found)
    yield from (relation for relation in deferred if isinstance(relation, sympy.Eq))


def counted_by(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> tuple[str, Tensor, Callable[[], Tensor]] | None:
    """Where the size of a result depends on content: the call's name, the result, what computes its size from content.

    The size itself would not do: what a graph knows of it would be what is known of the rehearsed call.
    """
    name = getattr(func, "__name__", "")
    if name not in _COUNTED:  # first of all: to ask a tensor for anything is a call, too
        return None
    result = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(result, Tensor) or not result.dim() or not args or not isinstance(args[0], Tensor):
        return None
    content = _COUNTED[name](args, kwargs)
    return None if content is None else (name, result, content)


def _of_true(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor]:
    return lambda: (args[0] != 0).sum()


def _of_where(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    return _of_true(args, kwargs) if len(args) == 1 else None


def _of_selected(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    if len(args) < 2:
        return None
    return lambda: (args[1].expand(args[0].shape) if args[1].dim() < args[0].dim() else args[1]).sum()


def _of_indexed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    masks = [p for p in (args[1] if isinstance(args[1], tuple) else (args[1],)) if _is_mask(p)]
    return (lambda: (masks[0] != 0).sum()) if len(masks) == 1 else None


def _of_repeated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
    return repeats.sum if isinstance(repeats, Tensor) and repeats.dim() else None


def _of_bins(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Tensor]:
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    return lambda: (args[0].max() + 1 if args[0].numel() else args[0].new_zeros(())).clamp(min=least)


def _of_distinct(args: Sequence[Any], kwargs: Mapping[str, Any], is_sorted: bool) -> Callable[[], Tensor] | None:
    if kwargs.get("dim") is not None or len(args) > 4:
        return None
    return lambda: _distinct(args[0], is_sorted)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _distinct(x: Tensor, is_sorted: bool) -> Tensor:
    """How many different elements there are, or runs of equal ones."""
    flat = x.detach().flatten()
    flat = flat.sort().values if is_sorted else flat
    return (flat[1:] != flat[:-1]).sum() + 1


_COUNTED: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Callable[[], Tensor] | None]] = {
    **dict.fromkeys(("nonzero", "argwhere"), _of_true),
    "where": _of_where,
    "masked_select": _of_selected,
    "__getitem__": _of_indexed,
    "repeat_interleave": _of_repeated,
    "bincount": _of_bins,
    "unique": functools.partial(_of_distinct, is_sorted=True),
    "unique_consecutive": functools.partial(_of_distinct, is_sorted=False),
}
