"""A rehearsal: one call of a module in eager PyTorch, which records all that its Python code saw in tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.carried import numbers_carried
from onnxtrain.capture.free_numbers import Conditions, counted_by
from onnxtrain.capture.hidden_changes import Overwritten, place_in_memory
from onnxtrain.capture.host_random import HostGenerators, place_of_draw
from onnxtrain.capture.left_behind import Watch
from onnxtrain.capture.looks import Key, Look, Looks, Way, content_of, numbers_given, place_of, same, user_frame
from onnxtrain.capture.named_values import NamedValues, names_read
from onnxtrain.capture.owned_tensors import tensors_held
from onnxtrain.capture.schema import flatten
from onnxtrain.capture.source_lines import caught_among
from onnxtrain.capture.substitutes import unseen
from onnxtrain.errors import noted


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a call saw in tensors, in order.

    Args:
        looks: the looks.
        sizes: the sizes that depend on content, as looks at them.
        free: the looks whose answer may be any number, and does not become part of a graph.
        rehearsed: whether there was a rehearsal.
    """

    looks: tuple[Look, ...] = ()
    sizes: tuple[Look, ...] = ()
    free: frozenset[Key] = frozenset()
    rehearsed: bool = False

    @property
    def by_key(self) -> dict[Key, list[Any]]:
        """For each line, what it saw one time after the other."""
        return _by_key(self.looks)

    def agree(self, looks: Sequence[Look], conditions: Conditions, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether looks, some of them maybe left out, have these answers, and conditions hold for them."""
        mine, theirs = self.by_key, _by_key(looks)
        if any(not same(tuple(mine.get(key, ())), tuple(answers)) for key, answers in theirs.items()):
            return False
        numbers = _by_key((*self.looks, *self.sizes))
        found = [numbers.get(n.look.key, []) for n in conditions.numbers]
        if any(n.nth >= len(answers) for n, answers in zip(conditions.numbers, found, strict=True)):
            return False
        values = [answers[n.nth] for n, answers in zip(conditions.numbers, found, strict=True)]
        return conditions.hold(values, shapes)


def _by_key(looks: Sequence[Look]) -> dict[Key, list[Any]]:
    found: dict[Key, list[Any]] = {}
    for look in looks:
        found.setdefault(look.key, []).append(look.answer)
    return found


class _Recorder(Looks):
    """Records the looks of what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Look] = []
        self.sizes: list[Look] = []

    def _look(self, kind: str, frame: Any, way: Way, seen: torch.Tensor, run: Callable[[], Any]) -> Any:
        made, place = run(), place_of(frame)
        if kind == "tolist":  # traced, a tensor reads its elements one by one
            self.looks += [Look("item", place, x) for x in seen.detach().flatten().tolist()]
        else:
            self.looks.append(Look(kind, place, content_of(seen)))
        return made

    def _after(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        counted = counted_by(func, args, kwargs, made)
        if counted is not None and (frame := user_frame()) is not None:
            name, _, count = counted
            self.sizes.append(Look(name, place_of(frame), int(count())))


def rehearse(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ignored: Collection[str] = (),
    numbers: Collection[int] = (),
    fills: bool = False,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Answers:
    """Run a call in eager PyTorch, leave the module as it was, and say what the call saw in tensors.

    Random numbers are drawn from the generators as they are; those of Python and numpy are as before then.

    Args:
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        ignored: names of attributes that do not concern the forward pass.
        numbers: positions of numbers, among the leaves of the arguments, that a graph has as inputs.
        fills: whether what has a name outside of the module is left as the call leaves it.
        around: entered for the forward pass alone.

    Raises:
        Exception: what the module raises.
    """
    recorder = _Recorder()
    recorder.looks += [number.look(module) for number in numbers_carried(module)]
    recorder.looks += numbers_given(args, kwargs, numbers).values()
    tensors, inputs = flatten((tuple(args), dict(kwargs)))
    once = {id(t): _without_history(t) for t in tensors}
    args, kwargs = inputs.restore([once[id(t)] for t in tensors])  # the caller's containers stay what they are
    drawn = HostGenerators(module, names_read(module, ignored)).untouched()
    with untouched(module, [*once.values()], ignored, fills), drawn, unseen(), recorder, around(), noted() as errors:
        module.forward(*args, **kwargs)
    if (caught := caught_among(errors)) is not None:
        raise caught
    return Answers(tuple(recorder.looks), tuple(recorder.sizes), rehearsed=True)


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for a call that may change it in place, which its own history must not know of."""
    if tensor.requires_grad and not tensor.is_leaf:
        return tensor.clone()
    return tensor.detach() if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor


def line_that_draws(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str] = ()
) -> str:
    """The user's line at which a call in eager PyTorch draws from a generator of Python or numpy.

    Raises:
        Exception: what the module raises.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        return place_of_draw(module, lambda: rehearse(module, args, kwargs, ignored))


def fill_caches(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str] = ()
) -> None:
    """Let a call in eager PyTorch leave outside of the module what it leaves there; all else is as before.

    Raises:
        Exception: what the module raises.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        rehearse(module, args, kwargs, ignored, fills=True)


@contextlib.contextmanager
def untouched(
    module: torch.nn.Module, given: Sequence[torch.Tensor], ignored: Collection[str], fills: bool = False
) -> Iterator[list[Callable[[], None]]]:
    """Take back what a call does to a module: what it sets and counts, and writes into buffers, parameters and inputs.

    Gives a list that is filled afterwards: what does it again, but for tensors. Of what has a name outside of the
    module caches keep tensors; where the call ``fills`` them, all is left.
    """
    watch, named = Watch(module, ignored), NamedValues(names_read(module, ignored))
    owned = [(t, t.detach(), t.detach().clone()) for t in (*module.buffers(), *given)]
    again: list[Callable[[], None]] = []
    others = (t for t in (*tensors_held(module), *named.tensors()) if not t.requires_grad)
    overwritten = Overwritten((*module.parameters(), *others))
    try:
        with overwritten:
            yield again
    finally:
        again.append(watch.take_back())
        if not fills:
            named.take_back(but_tensors=True)
        overwritten.take_back()
        with torch.no_grad():
            for tensor, memory, content in owned:
                if not torch.equal(memory, content):  # versions do not tell: normalization counts none
                    memory.copy_(content)
                if _form(tensor) != _form(memory):
                    tensor.data = memory


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in which memory."""
    if (place := place_in_memory(tensor)) is None:
        return (tensor.shape,)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), place
