"""Random numbers that a forward pass draws from Python's or numpy's generators: a graph would draw none of its own."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.looks import place_of, user_frame
from onnxtrain.capture.reached_code import Named, named_by
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import is_ours_or_torchs, is_users
from onnxtrain.errors import HostRandomError

_Generator: TypeAlias = tuple[str, Callable[[], Any], Callable[[Any], None]]  # its name, how its state is read and set
_SEEDS: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)
_OWN_GENERATOR = "draw from torch's own generator, which torch.manual_seed sets, or pass the numbers as an input"
_NOBODYS = (random.__file__, "<string>")  # files whose lines are none of the user's


class HostGenerators:
    """The generators of Python and numpy, and those that a module and its submodules keep, as they are now.

    Args:
        module: the module; None for those alone that everybody has.
        names: what its code mentions, where generators may be.
    """

    def __init__(self, module: torch.nn.Module | None = None, names: Iterable[Named] = ()) -> None:
        kept = itertools.chain(
            () if module is None else _kept_by(module), ((n.label, n.read()) for n in names if not n.is_librarys)
        )
        self._all = [*_everybodys(), *filter(None, itertools.starmap(_generator, kept))]
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


def _kept_by(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            yield f"{path}.{name}" if path else name, value


def _generator(label: str, value: Any) -> _Generator | None:
    """A value that is a generator, under a name; None where it is none."""
    numpy: Any = sys.modules.get("numpy")
    legacy, current = (numpy.random.RandomState, numpy.random.Generator) if numpy is not None else ((), ())
    if isinstance(value, random.Random):
        return label, value.getstate, value.setstate
    if isinstance(value, legacy):
        return label, value.get_state, value.set_state
    if isinstance(value, current):
        bits = value.bit_generator
        return label, lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, torch.Generator):
        return label, lambda: _state(value), lambda state: _set_state(value, state)
    return None


def _state(generator: torch.Generator) -> list[int]:
    """The state of a generator of torch, also while something is traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return generator.get_state().tolist()


def _set_state(generator: torch.Generator, state: list[int]) -> None:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        generator.set_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


def of_everybody(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function of torch that may draw; torch's own generator stands for none.

    Raises:
        HostRandomError: another one is among them.
    """
    for name, value in given.items():
        if isinstance(value, torch.Generator):
            if value is not torch.default_generator:
                frame = user_frame()
                source = "" if frame is None else place_of(frame)
                raise HostRandomError("a torch.Generator", source, cure=_OWN_GENERATOR)
            return {**given, name: None}
    return given


def place_of_draw(module: torch.nn.Module, run: Callable[[], Any]) -> str:
    """The user's line that draws from a generator of Python or numpy while something runs; empty where there is none.

    Args:
        module: which may keep generators.
        run: what draws.
    """
    places: list[str] = []
    generators = HostGenerators(module, named_by(module))

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
