"""What has the place of a layer while a module is traced, and what may not be read of layers meanwhile."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onnxtrain.capture.left_outside import GivenUpError

Refuse = Callable[[str], Exception]  # notes why the layers are not alike; gives the error
TABLES = ("_parameters", "_buffers", "_modules")
_TORCH = Path(torch.__file__).parent
_MODULE_FILE = str(Path("nn", "modules", "module.py"))
_MAY_ASK = (
    str(Path(__file__).parents[1]),
    *(str(_TORCH / part) for part in ("fx", "export", "_export", "_functorch", "_dynamo", "_subclasses")),
    *(str(_TORCH / "nn" / "utils" / part) for part in ("stateless.py", "_named_member_accessor.py")),
)


class UnlikeError(GivenUpError):
    """A layer is not what the layers that stand for it are."""


def stand_in(layer: torch.nn.Module, run: Callable[[Any, Any], Any], refuse: Refuse) -> torch.nn.Module:
    """A module of the layer's class that has none of its parts.

    Args:
        layer: the layer.
        run: what a call does, given positional and keyword arguments.
        refuse: notes what else somebody asks of it.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    def missing(self: Any, name: str) -> Any:
        refuse(f"{name} is asked of one of them")
        raise AttributeError(name)

    def assigned(self: Any, name: str, value: Any) -> None:
        refuse(f"{name} of one of them is set")
        object.__setattr__(self, name, value)

    members = {"__call__": call, "__getattr__": missing, "__setattr__": assigned, "__module__": __name__}
    made = object.__new__(type(type(layer).__name__, (type(layer),), members))
    vars(made).update(vars(layer))
    vars(made).update({name: _Empty(refuse) for name in TABLES}, forward=functools.partial(call, made))
    return made


class _Empty(dict[str, Any]):
    """The parameters, buffers or parts of a stand-in, of which torch is told that there are none.

    Who else asks for them, to sum what the weights weigh say, would get too few.
    """

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()
        self._refuse = refuse

    def _asked(self) -> None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(_MODULE_FILE):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_MAY_ASK):
            self._refuse("somebody asks for all parameters or parts")

    def __iter__(self) -> Iterator[str]:
        self._asked()
        return iter(())

    def __getitem__(self, name: str) -> Any:
        self._asked()
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._asked()
        return False

    def items(self) -> Any:
        """Nothing."""
        self._asked()
        return {}.items()

    def keys(self) -> Any:
        """Nothing."""
        self._asked()
        return {}.keys()

    def values(self) -> Any:
        """Nothing."""
        self._asked()
        return {}.values()
