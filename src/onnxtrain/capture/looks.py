"""Looks: where a forward pass reads the content of a tensor in Python, and what it saw there.

``if (labels >= 0).any()``, ``int(lengths.max())``, ``.item()``, ``.tolist()``, a tensor as the end of a slice: each is
one call of a function of torch, found in the table below.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onnxtrain.capture.assertions import is_librarys_check
from onnxtrain.capture.schema import can_be_counted
from onnxtrain.capture.sizes_as_numbers import KINDS
from onnxtrain.capture.source_lines import is_users
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
Key: TypeAlias = tuple[str, str]  # how something was looked at, and the user's line
_LARGEST = 256  # elements that a look can have
_WHOLE = "__index__"  # how a number is called that torch itself reads from a tensor among its arguments


COUNTED = "counted"  # a number of the module's was looked at, before all else
ARGUMENT = "argument"  # a number that the call is given was, which is another at other calls


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the content of a tensor.

    Args:
        kind: the method that looked: ``__bool__``, ``item``, ``tolist``; ``COUNTED``, ``ARGUMENT``.
        place: the user's line, ``file:line``.
        answer: what it saw: a number, or nested tuples of numbers.
    """

    kind: str
    place: str
    answer: Any

    @property
    def key(self) -> Key:
        """What tells it from looks of other lines."""
        return self.kind, self.place

    def __str__(self) -> str:
        seen = repr(self.answer)
        return f"{self.place} saw {seen if len(seen) <= 40 else f'{seen[:37]}...'}"


def numbers_given(args: Sequence[Any], kwargs: Mapping[str, Any], positions: Collection[int]) -> dict[int, Look]:
    """The looks at numbers that a call is given, by their positions among the leaves of its arguments."""
    if not positions:
        return {}
    leaves = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    found = ((i, *leaf) for i, leaf in enumerate(leaves) if i in positions and can_be_counted(leaf[1]))
    return {
        i: Look(ARGUMENT, f"the argument {pytree.keystr(path[1:]).lstrip('.')}", number) for i, path, number in found
    }


def frozen(content: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(frozen, content)) if isinstance(content, list) else content


def content_of(tensor: Tensor) -> Any:
    """What a tensor holds, as an answer."""
    return frozen(tensor.detach().tolist())


def same(first: Any, second: Any) -> bool:
    """Whether two answers are the same; NaN is itself."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second) or (first != first and second != second)


def _thawed(answer: Any, looked: Tensor) -> Any:
    return [_thawed(a, looked) for a in answer] if isinstance(answer, tuple) else answer


def _array(answer: Any, looked: Tensor) -> Any:
    import numpy as np

    return np.array(answer, dtype=str(looked.dtype).removeprefix("torch."))


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to look.

    Args:
        seen: the tensor whose content decides, of the arguments; where sizes say it all, the answer.
        given: what the caller gets, of the answer and of that tensor.
    """

    seen: Callable[..., Tensor | bool]
    given: Callable[[Any, Tensor], Any]


def _number(x: Tensor, *args: Any) -> Tensor:
    """The element of a tensor that has one, in however many dimensions."""
    return x.reshape(()) if x.dim() else x


def _is_true(x: Tensor) -> Tensor:
    return _number(x) != 0


def _itself(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _truncated(x: Tensor) -> Tensor:
    return _number(x).to(torch.int64)


def _widened(x: Tensor) -> Tensor:
    return _number(x).to(torch.float64)


def _equal(x: Tensor, other: Tensor) -> Tensor | bool:
    return (x == other).all() if x.shape == other.shape else False


def _close(x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.isclose(x, other, *args, **kwargs).all()


def _contains(x: Tensor, element: Any) -> Tensor:
    return (x == element).any()


def _ways(kind: type, *functions: Any) -> dict[Any, Way]:
    seen = {bool: _is_true, int: _truncated, float: _widened}[kind]
    return {function: Way(seen, lambda answer, _: kind(answer)) for function in functions}


_BOOL = (lambda answer, _: bool(answer),)  # what those give that compare
WAYS: dict[Any, Way] = {
    **_ways(bool, Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero),
    **_ways(int, Tensor.__int__, Tensor.__index__),
    **_ways(float, Tensor.__float__),
    **{f: Way(_equal, *_BOOL) for f in (torch.equal, Tensor.equal)},
    **{f: Way(_close, *_BOOL) for f in (torch.allclose, Tensor.allclose)},
    Tensor.__contains__: Way(_contains, *_BOOL),
    Tensor.item: Way(_number, _thawed),
    Tensor.tolist: Way(_itself, _thawed),
    **{f: Way(_itself, _array) for f in (Tensor.numpy, Tensor.__array__)},
}
# Functions that read a tensor which stands for a number among their arguments; those after them but for the first one
_OF_NUMBERS = frozenset(("zeros", "ones", "empty", "rand", "randn", "randint", "arange", "linspace", "eye"))
_WITH_NUMBERS = frozenset(
    (
        *("view", "reshape", "expand", "repeat", "split", "chunk", "unflatten", "tile", "roll", "multinomial", "full"),
        *("new_zeros", "new_ones", "new_empty", "interpolate", "pad", "one_hot", "topk", "split_with_sizes"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "tensor_split"),
    )
)
_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


class Looks(TorchFunctionMode):
    """Within it every look at the content of a tensor is handed to ``_look``."""

    def _look(self, kind: str, frame: types.FrameType, way: Way, seen: Tensor, run: Callable[[], Any]) -> Any:
        """What the caller gets.

        Args:
            kind: how it looks.
            frame: the user's frame that does so.
            way: what follows from what is seen.
            seen: the tensor whose content decides.
            run: the call itself.
        """
        raise NotImplementedError

    def _after(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """What a call that is no look has returned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (way := WAYS.get(func)) is not None:
            seen = way.seen(*args, **kwargs)
            return seen if isinstance(seen, bool) else self._at(func.__name__, way, seen, lambda: func(*args, **kwargs))
        if func is Tensor.__format__ and not args[0].dim():  # as its number
            number = self.__torch_function__(Tensor.item, types, args[:1])
            return format(KINDS.get(type(number), type(number))(number), *args[1:])
        args, kwargs = self._with_numbers(func, args, kwargs)
        made = func(*args, **kwargs)
        self._after(func, args, kwargs, made)
        return made

    def _at(self, kind: str, way: Way, seen: Tensor, run: Callable[[], Any]) -> Any:
        frame = user_frame()
        if frame is None or is_librarys_check(frame):
            return run()
        if isinstance(seen.numel(), int) and seen.numel() > _LARGEST:
            raise CaptureError(
                f"the forward pass reads {seen.numel()} numbers out of a tensor",
                source=place_of(frame),
                cure="compute on the tensor, or pass what is read of it to the module as an input",
            )
        return self._look(kind, frame, way, seen, run)

    def _with_numbers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with numbers where torch would read them from tensors, which it asks nobody about."""
        name = getattr(func, "__name__", "")
        if func in _INDEXED and not (func is Tensor.__setitem__ and isinstance(args[1], Tensor)):
            return (args[0], _map_places(self._number, _beside_others(args[1])), *args[2:]), kwargs
        if name not in _OF_NUMBERS and name not in _WITH_NUMBERS:
            return args, kwargs
        kept = 1 if name in _WITH_NUMBERS and args and isinstance(args[0], Tensor) else 0
        rest, kwargs = pytree.tree_map_only(Tensor, self._number, (args[kept:], kwargs))
        return (*args[:kept], *rest), kwargs

    def _number(self, value: Any) -> Any:
        """The content of a tensor that stands for an integer; anything else as it is."""
        if not _is_whole_number(value):
            return value
        return self._at(_WHOLE, WAYS[Tensor.__index__], value.to(torch.int64), lambda: value.item())


def _beside_others(index: Any) -> Any:
    """An index whose numbers stand beside tensors, as tensors of one element: the same where no axis lies between."""
    if not isinstance(index, tuple):
        return index
    places = [i for i, part in enumerate(index) if isinstance(part, Tensor | list)]
    are_others = any(not isinstance(index[i], Tensor) or index[i].dim() for i in places)
    if not are_others or len(places) != places[-1] - places[0] + 1:
        return index
    return tuple(part.reshape(1) if _is_whole_number(part) else part for part in index)


def _is_whole_number(value: Any) -> bool:
    """Whether a value is a tensor that stands for one integer alone: not for one of each mapped element."""
    return is_integer(value) and not torch._C._functorch.is_batchedtensor(value)


def is_integer(value: Any) -> bool:
    """Whether a value is a tensor that stands for an integer."""
    if not isinstance(value, Tensor) or value.dim():
        return False
    return not value.dtype.is_floating_point and value.dtype != torch.bool


def _map_places(of: Callable[[Any], Any], index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_map_places(of, part) for part in index)
    return slice(of(index.start), of(index.stop), of(index.step)) if isinstance(index, slice) else of(index)


def user_frame() -> types.FrameType | None:
    """The innermost frame that is the user's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (not is_users(frame.f_code.co_filename) or _is_of_fx(frame)):
        frame = frame.f_back
    return frame


def _is_of_fx(frame: types.FrameType) -> bool:
    """Whether a frame is of the function that torch.fx writes around what it traces, which is in no file."""
    return frame.f_code.co_name == "<lambda>" and frame.f_globals.keys() <= {"fn", "__builtins__"}


def place_of(frame: types.FrameType) -> str:
    """A frame's line as ``file:line``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
