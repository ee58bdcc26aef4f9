"""Random numbers that a forward pass draws from Python's or numpy's generators: a graph would draw none of its own."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.looks import place_of, user_frame
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import is_ours_or_torchs, is_users
from onnxtrain.errors import HostRandomError

_Generator: TypeAlias = tuple[str, Callable[[], Any], Callable[[Any], None]]  # its name, how its state is read and set
_SEEDS: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)
_NOBODYS = (random.__file__, "<string>")  # files whose lines are none of the user's


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


def seeds_refused() -> contextlib.AbstractContextManager[None]:
    """Within it HostRandomError is raised where code that is not torch's sets the seed of torch's own generators."""
    return replaced(*((owner, name, _refusing(owner, name)) for owner, name in _SEEDS))


def _refusing(owner: Any, name: str) -> Callable[..., Any]:
    """What takes the place of a function that sets a seed."""
    own = getattr(owner, name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_ours_or_torchs(sys._getframe(1).f_code.co_filename):
            return own(*args, **kwargs)
        frame = user_frame()
        raise HostRandomError(f"{owner.__name__}.{name}", "" if frame is None else place_of(frame), is_seed=True)

    return refuse


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


def place_of_draw(module: torch.nn.Module, run: Callable[[], Any]) -> str:
    """The user's line that draws from a generator of Python or numpy while something runs; empty where there is none.

    Args:
        module: which may keep generators.
        run: what draws.
    """
    places: list[str] = []
    generators = HostGenerators(module)

    def enter(frame: types.FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        line = place_of(frame)

        def see(frame: types.FrameType, _: str, __: Any) -> Callable[..., Any] | None:
            nonlocal line
            if not places and generators.drawn:
                places.append(line)
            line = place_of(frame)
            return None if places else see

        file = frame.f_code.co_filename
        return see if is_users(file) and file not in _NOBODYS and not places else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return next(iter(places), "")
