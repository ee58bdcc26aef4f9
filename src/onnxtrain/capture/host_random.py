"""Random numbers that a forward pass draws from Python's or numpy's generators: a graph would draw none of its own."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.looks import place_of
from onnxtrain.capture.source_lines import is_users

_Generator: TypeAlias = tuple[str, Callable[[], Any], Callable[[Any], None]]  # its name, how its state is read and set
_STATES = frozenset(("getstate", "setstate", "get_state", "set_state"))  # methods that draw nothing


class HostGenerators:
    """The generators of Python and numpy, and those that a module and its submodules keep, as they are now.

    Args:
        module: the module; None for those alone that everybody has.
    """

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._all = [*_everybodys(), *(() if module is None else _kept_by(module))]
        self._before = [state() for _, state, _ in self._all]

    @property
    def states(self) -> list[bytes]:
        """Their states, which can be compared."""
        return [pickle.dumps(state) for state in self._before]

    @property
    def drawn(self) -> str:
        """What the first generator is called from which numbers were drawn since; empty where there is none."""
        pairs = zip(self._all, self.states, strict=True)
        return next((name for (name, state, _), before in pairs if pickle.dumps(state()) != before), "")

    def restore(self) -> None:
        """Set all as they were."""
        for (_, _, restore), before in zip(self._all, self._before, strict=True):
            restore(before)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """All are as they were after it."""
        try:
            yield
        finally:
            self.restore()


def _everybodys() -> Iterator[_Generator]:
    yield "Python's random", random.getstate, random.setstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random.get_state, numpy.random.set_state


def _kept_by(module: torch.nn.Module) -> Iterator[_Generator]:
    numpy: Any = sys.modules.get("numpy")
    legacy, current = (numpy.random.RandomState, numpy.random.Generator) if numpy is not None else ((), ())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            label = f"{path}.{name}" if path else name
            if isinstance(value, random.Random):
                yield label, value.getstate, value.setstate
            elif isinstance(value, legacy):
                yield label, value.get_state, value.set_state
            elif isinstance(value, current):
                bits = value.bit_generator
                yield label, lambda b=bits: b.state, lambda state, b=bits: setattr(b, "state", state)


def place_of_draw(run: Callable[[], Any]) -> str:
    """The user's line that draws from a generator of Python while something runs; empty where it is not seen.

    Args:
        run: what draws.
    """
    places: list[str] = []
    kinds = _kinds()

    def see(frame: Any, event: str, called: Any) -> None:
        is_drawn = event == "c_call" and called.__name__ not in _STATES
        if is_drawn and not places and isinstance(getattr(called, "__self__", None), kinds):
            while frame is not None and (frame.f_code.co_filename == random.__file__ or not is_users(frame.f_code.co_filename)):
                frame = frame.f_back
            places.extend([] if frame is None else [place_of(frame)])

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return next(iter(places), "")


def _kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    return (random.Random, *((numpy.random.RandomState, numpy.random.Generator) if numpy is not None else ()))
