"""What a step on a batch needs, told or measured without training on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture import arguments_of, is_batch
from onnxtrain.engine import memory_report, profile
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.memory_report import MemoryReport
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.errors import ModuleError
from onnxtrain.ortmodule.sessions import Sessions


def memory_of(sessions: Sessions | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryReport:
    """The memory of a step, see ``ORTModule.memory_report``; there are no sessions where eager PyTorch runs all."""
    return memory_report.memory_report(*_Call(sessions, args, kwargs).graph())


def profile_of(
    sessions: Sessions | None,
    optimizer: torch.optim.Optimizer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ProfileReport:
    """The time of a step, see ``ORTModule.profile``; there are no sessions where eager PyTorch runs all."""
    call = _Call(sessions, args, kwargs)
    return profile.profile(*call.graph(), call.graph, optimizer)


class _Call:
    """A call; a batch may be a mapping of its arguments."""

    def __init__(self, sessions: Sessions | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if sessions is not None and is_batch(sessions.module.forward, args, kwargs):
            args, kwargs = arguments_of(args[0])
        self._sessions, self._args, self._kwargs = sessions, args, kwargs

    def graph(self) -> tuple[BoundGraph, Sequence[torch.Tensor]]:
        """The graph that serves it, and what this is given.

        Raises:
            ModuleError: there is none.
        """
        session, tensors = None, ()
        if self._sessions is not None:
            session, tensors = self._sessions.session_of(self._args, self._kwargs)
        if session is None:
            raise ModuleError("this call runs in eager PyTorch, of which nothing is told", cure="see explain()")
        return session.bound, tensors
