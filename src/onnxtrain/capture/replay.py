"""A trace in which looks at tensors get the answers of a rehearsal, and what was looked at becomes an output."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses import fake_tensor

from onnxtrain.capture.assertions import expected
from onnxtrain.capture.free_numbers import Conditions, FreeNumbers, counted_by
from onnxtrain.capture.looks import Key, Look, Looks, Way, place_of, user_frame
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.rehearsal import Answers
from onnxtrain.capture.symbolic_sizes import symbolic_numbers
from onnxtrain.errors import CaptureError, ContentError, note

Tensor = torch.Tensor
_OF_TRACES = (
    *(fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedFakeTensorException),
    fake_tensor.UnsupportedOperatorException,
)
# of which torch.export answers some without a content, and refuses others
_COMPARING = ("equal", "allclose", "__contains__", "numpy", "__array__")


@dataclasses.dataclass(frozen=True)
class Path:
    """What a graph stands on beside the structure and sizes of a call: what the call saw in tensors.

    Args:
        looks: what it saw, in order.
        seen: for each look the position of what was looked at among the graph's outputs; None where it is a constant.
        conditions: what was asked of numbers that may be any.
        asked: for each of these numbers, its position among the graph's outputs.
    """

    looks: tuple[Look, ...] = ()
    seen: tuple[int | None, ...] = ()
    conditions: Conditions = dataclasses.field(default_factory=Conditions)
    asked: tuple[int, ...] = ()

    @property
    def outputs(self) -> list[int]:
        """The positions of all that is compared."""
        return [*(p for p in self.seen if p is not None), *self.asked]

    @property
    def exact(self) -> frozenset[Key]:
        """The looks of which a call has to see the very same."""
        equal = (r for r in self.conditions.relations if isinstance(r, sympy.Eq))
        symbols = frozenset().union(*(relation.free_symbols for relation in equal))
        numbers = (n.look for n in self.conditions.numbers if n.symbol in symbols)
        return frozenset(look.key for look in (*self.looks, *numbers))

    def __bool__(self) -> bool:
        return bool(self.looks or self.conditions.relations)


class MoreLooksError(CaptureError):
    """A trace looks into a tensor once more than the rehearsal did.

    Args:
        place: the user's line.
    """

    def __init__(self, place: str) -> None:
        super().__init__(
            "a line looks into a tensor while the module is traced, and did not in eager PyTorch",
            source=place,
            cure="let the forward pass not ask whether it is traced or compiled",
        )


def lacks_content(error: Exception) -> bool:
    """Whether torch raises an error because a tensor has no content while a module is traced."""
    told = f"{type(error).__name__}: {error}"
    return any(part in told for part in ("ata-dependent", "Could not guard", "DataDependent", "FakeTensor"))


class Replay(Looks):
    """Within it the n-th look of each line has the answer that the n-th look of this line had in the rehearsal.

    Lines that look while a module runs in eager PyTorch, but not while it is traced (some libraries ask), are left out.

    Args:
        answers: what was seen in the rehearsal; before it, checks of the user's own ask for one.
        tensors: the inputs, as torch.export passes them to the forward pass.
    """

    def __init__(self, answers: Answers, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._answers = answers
        self._waiting: dict[Key, deque[Look]] = defaultdict(deque)
        for look in (*answers.looks, *answers.sizes):
            self._waiting[look.key].append(look)
        self._read: Counter[Key] = Counter()
        self._numbers = FreeNumbers(tensors)
        self._looks: list[Look] = []
        self._seen: list[Tensor | None] = []

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """What the forward pass runs in: this mode, and ``int`` and ``float`` of free numbers as symbols."""
        quiet = loggers_at(logging.ERROR, "torch.fx.experimental.symbolic_shapes")  # says what it is told to assume
        with quiet, symbolic_numbers(self._answers.free), self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except Exception as error:
            if isinstance(error, _OF_TRACES) or lacks_content(error):
                note(error)
            raise

    def _look(self, kind: str, frame: Any, way: Way, seen: Tensor, run: Callable[[], Any]) -> Any:
        place, constant = place_of(frame), getattr(seen, "constant", None) is not None
        if not self._answers.rehearsed:
            if not constant and (kind in _COMPARING or expected(frame) is not None):
                raise ContentError(place)
            return seen.detach().item() if kind == "item" and not constant else run()
        nth = self._read[kind, place]
        look = self._next((kind, place))
        if look is None:
            raise MoreLooksError(place)
        if look.key in self._answers.free and not constant:
            number = seen.detach().item()
            self._numbers.add(number, look, nth, seen)
            return number
        self._looks.append(look)
        self._seen.append(None if constant else seen.clone())
        return run() if constant else way.given(look.answer, seen)

    def counted(self, own: Look, seen: Tensor) -> Any:
        """A number of the module's, or one that the call is given, which it looks at before all else.

        Args:
            own: what it is now.
            seen: the tensor without axes that is an input in its place.
        """
        if not self._answers.rehearsed:
            raise ContentError(own.place)
        nth, look = self._read[own.key], self._next(own.key)
        assert look is not None, "the rehearsal has it"
        if look.key in self._answers.free:
            number = seen.detach().item()
            self._numbers.add(number, look, nth, seen)
            return number
        self._looks.append(look)
        self._seen.append(seen.clone())
        return look.answer

    def _next(self, key: Key) -> Look | None:
        self._read[key] += 1
        return self._waiting[key].popleft() if self._waiting[key] else None

    def _after(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Note a size that depends on content, of which something may be asked."""
        counted = counted_by(func, args, kwargs, made)
        if counted is None or (frame := user_frame()) is None:
            return
        name, result, count = counted
        unknown = [n for n in result.shape if isinstance(n, torch.SymInt) and not n.node.has_hint()]
        if not self._answers.rehearsed:
            self._numbers.count(unknown, place_of(frame))
            return
        key = (name, place_of(frame))
        nth, look = self._read[key], self._next(key)
        if look is not None and len(unknown) == 1:
            self._numbers.add_size(unknown[0], look, nth, count())

    def path(self, first: int) -> tuple[list[Tensor], Path]:
        """What was looked at, to be returned, and what the trace stands on.

        Args:
            first: how many outputs there are before.

        Raises:
            ContentError: only a rehearsal tells whether a size that depends on content is 1 where another met it.
        """
        if (place := self._numbers.meeting()) is not None:
            raise ContentError(place)
        conditions, numbers = self._numbers.asked()
        shown = [t for t in self._seen if t is not None]
        places = iter(range(first, first + len(shown) + len(numbers)))
        seen = tuple(None if t is None else next(places) for t in self._seen)
        return [t.detach() for t in (*shown, *numbers)], Path(tuple(self._looks), seen, conditions, tuple(places))
