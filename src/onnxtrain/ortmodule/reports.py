"""What a step on a batch needs, told or measured without training on it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain import __version__
from onnxtrain.capture import arguments_of, device_of, is_batch
from onnxtrain.cluster import Cluster
from onnxtrain.engine import memory_report, profile, ranks
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.memory_report import MemoryReport
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.engine.ranks_report import ClusterReport
from onnxtrain.engine.sparsity import latest_work
from onnxtrain.errors import ModuleError, OnnxTrainError
from onnxtrain.ortmodule import describe
from onnxtrain.ortmodule.session import Entry
from onnxtrain.ortmodule.sessions import Sessions
from onnxtrain.report import GraphReport, RunReport, graph_report

_NO_BATCH = "nobody holds the tensors of the latest call any more, so no step can be told of"


def memory_of(sessions: Sessions | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryReport:
    """The memory of a step, see ``ORTModule.memory_report``; there are no sessions where eager PyTorch runs all."""
    return memory_report.memory_report(*_Call(sessions, args, kwargs).graph())


def plan_of(
    module: torch.nn.Module,
    sessions: Sessions | None,
    cluster: Cluster,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ClusterReport:
    """What a step needs on many ranks, see ``ORTModule.plan``; there are no sessions where eager PyTorch runs all."""
    step = ranks.step_of(*_Call(sessions, args, kwargs).graph(), cluster)
    return ClusterReport(type(module).__name__, step, cluster, ranks.plans_of(step, cluster))


def profile_of(
    sessions: Sessions | None,
    optimizer: torch.optim.Optimizer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ProfileReport:
    """The time of a step, see ``ORTModule.profile``; there are no sessions where eager PyTorch runs all."""
    call = _Call(sessions, args, kwargs)
    return profile.profile(*call.graph(), call.graph, optimizer)


def metrics_of(sessions: Sessions) -> dict[str, float]:
    """Numbers to be logged, see ``ORTModule.metrics``."""
    bounds = [entry.session.bound for entry in sessions.entries]
    eager = sessions.eager + sessions.unsettled + sessions.initializing
    found: dict[str, float] = {"graphs": len(bounds), "calls": sessions.calls, "eager_calls": eager}
    found["start_seconds"] = sum(sum(bound.report.seconds.values()) for bound in bounds)
    trained = [work for bound in bounds if (work := latest_work(bound)) is not None]
    if trained:
        ours, others = trained[-1]
        found["flops_share"] = ours / max(1, others)
    return {name: float(number) for name, number in found.items()}


def report_of(
    module: torch.nn.Module,
    sessions: Sessions | None,
    optimizer: torch.optim.Optimizer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RunReport:
    """What was done with a module, see ``ORTModule.report``; there are no sessions where eager PyTorch runs all."""
    left_out, memory, time = "", None, None
    call = _Call(sessions, args, kwargs) if args or kwargs else _latest(sessions)
    try:
        if call is None:
            raise ModuleError(_NO_BATCH, cure="give a batch: model.report(path, batch)")
        graph = call.graph()
        memory = memory_report.memory_report(*graph)
        time = profile.profile(*graph, call.graph, optimizer)
    except OnnxTrainError as error:
        left_out = str(error)
    entries = [] if sessions is None else sessions.entries
    device = device_of(module)
    versions = {"onnxtrain": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    verified = [v for entry in entries if (v := entry.session.bound.verification) is not None]
    return RunReport(
        name=type(module).__name__,
        versions={**versions, "on": f"{device}, {torch.get_num_threads()} threads"},
        told=[] if sessions is None else describe.calls(sessions),
        graphs=[_graph_report(entry, number) for number, entry in enumerate(entries, 1)],
        memory=memory,
        time=time,
        left_out=left_out,
        verification=verified[-1] if verified else None,
    )


def _graph_report(entry: Entry, number: int) -> GraphReport:
    lines = describe.graph_lines(entry)
    return graph_report(entry.session.bound, number, describe.mode(entry), entry.reasons, entry.served, lines)


def _latest(sessions: Sessions | None) -> _Call | None:
    """The latest call of the last training graph whose tensors somebody still holds."""
    entries = [] if sessions is None else sessions.entries
    for entry in sorted(entries, key=lambda entry: entry.session.was_training, reverse=True):
        if (given := entry.session.latest) is not None:
            return _Call(sessions, *given)
    return None


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
