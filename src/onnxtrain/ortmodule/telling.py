"""What an ORTModule tells of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from onnxtrain.cluster import Cluster
from onnxtrain.engine.comparison import Report
from onnxtrain.engine.memory_report import MemoryReport
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.engine.ranks_report import ClusterReport
from onnxtrain.engine.summary import graph_text, summary
from onnxtrain.errors import ModuleError
from onnxtrain.ortmodule.describe import explain, explain_memory, explain_sparsity
from onnxtrain.ortmodule.fallback import FallbackState
from onnxtrain.ortmodule.fsdp_shards import root_gathered
from onnxtrain.ortmodule.reports import memory_of, metrics_of, plan_of, profile_of, report_of
from onnxtrain.ortmodule.session import Session
from onnxtrain.ortmodule.sessions import Sessions
from onnxtrain.ortmodule.without_content import has_content, without_content
from onnxtrain.report import RunReport


class Telling:
    """What an ORTModule can be asked: what became of its module, and what a step needs.

    Who derives from it has ``_ort_sessions`` (None before the first call), ``_ort_last`` (the graph of the last call)
    and ``_ort_fallback`` in its ``__dict__``, and ``_graphs()``.
    """

    def _graphs(self) -> Sessions:
        raise NotImplementedError

    def explain(self, topic: str = "graphs") -> str:
        """What is done with this module, and why.

        Args:
            topic: ``"graphs"``: why each graph was captured, how many calls it served, which sizes are free.
                ``"sparsity"``: which rows of each value are computed, and what needs those that are not skipped.
                ``"memory"``: what each training graph could compute again to save memory, as ``memory_plans`` name it.

        Raises:
            ModuleError: the topic is not known.
        """
        told = {"graphs": explain, "sparsity": explain_sparsity, "memory": explain_memory}
        if topic not in told:
            raise ModuleError(f"there is nothing to explain about {topic!r}", cure=f"ask for {' or '.join(told)}")
        fallback: FallbackState = self.__dict__["_ort_fallback"]
        text = "" if fallback.reason is None else f"runs in eager PyTorch, because\n{fallback.reason}\n"
        sessions = self.__dict__["_ort_sessions"]
        return text + (told[topic](sessions) if sessions is not None else "no graph yet: the module was not called")

    def graph(self, stage: str = "training", form: str = "text") -> str:
        """The graph of the last call.

        Args:
            stage: ``"captured"`` (the optimized forward), ``"training"``, ``"forward"`` or ``"backward"``.
            form: ``"text"``; ``"dot"``, as Graphviz draws it; ``"mermaid"``, as Markdown pages show it.

        Raises:
            ModuleError: the module was not called yet, has no graph of that stage, or there is no such form.
        """
        return graph_text(self._session().bound.latest, stage, form)

    def source(self, part: str = "forward") -> str:
        """The program that the backend runs for ``"forward"`` or ``"backward"`` of the last call, as text."""
        return self._session().bound.latest.executable.source(part)

    def summary(self) -> str:
        """What was built for the last call: nodes, saved values, gradients, and the time of each stage."""
        return summary(self._session().bound)

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged in the course of training, at little cost.

        ``graphs``: how many there are. ``calls``, and ``eager_calls``: how many of them ran in eager PyTorch.
        ``start_seconds``: what capturing and compiling took so far. ``flops_share``: floating point operations of the
        latest training step, as a share of eager PyTorch's; left out where content decides on sizes.
        """
        sessions: Sessions | None = self.__dict__["_ort_sessions"]
        return {} if sessions is None else metrics_of(sessions)

    def memory_report(self, *args: Any, **kwargs: Any) -> MemoryReport:
        """The memory that a step on this batch needs, before it runs: the peak, what holds it up, what fits.

        The call is captured where it was not yet; nothing is computed but which rows of the batch matter.

        Args:
            args: positional arguments of the call; or a batch, a mapping of arguments by name.
            kwargs: keyword arguments of the call.

        Raises:
            ModuleError: the call runs in eager PyTorch.
            BackendError: the backend cannot tell.
            BudgetError: the step cannot be made to fit into ``Options.memory_budget``.
        """
        with self._planned_of() as sessions:
            return memory_of(sessions, args, kwargs)

    def plan(self, cluster: Cluster, *args: Any, **kwargs: Any) -> ClusterReport:
        """What a step on this batch would need and take on many ranks, of which none is there.

        The batch is that of one rank. The module may be on torch's meta device: made within ``torch.device("meta")``, a
        model that no machine at hand holds is planned in seconds.

        Args:
            cluster: how many ranks there may be, how they share, what each can do.
            args: positional arguments of the call; or a batch, a mapping of arguments by name.
            kwargs: keyword arguments of the call.

        Raises:
            ModuleError: the call runs in eager PyTorch.
            BackendError: the backend cannot tell.
            BudgetError: the step cannot be made to fit into ``Options.memory_budget``.
        """
        with self._planned_of() as sessions:
            return plan_of(self.__dict__["_wrapped"], sessions, cluster, args, kwargs)

    def profile(self, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> ProfileReport:
        """Where the time of a step on this batch goes: measured for some seconds, operator by operator.

        The call is captured where it was not yet. Parameters, buffers, gradients and random numbers stay as they are.

        Args:
            args: positional arguments of the call; or a batch, a mapping of arguments by name.
            optimizer: one whose step is measured, too, on copies of its parameters and state.
            kwargs: keyword arguments of the call.

        Raises:
            ModuleError: the call runs in eager PyTorch.
            BackendError: the backend cannot tell.
        """
        return profile_of(self._told_of(), optimizer, args, kwargs)

    def report(
        self, path: str | Path | None = None, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> RunReport:
        """All that can be told of what was done: as a page, as text, as JSON.

        What was captured and why, what each pass and each stage of the start did, which rows are computed; and of a
        step on a batch its memory, predicted and real, and its time. That step is measured for some seconds;
        parameters, buffers, gradients and random numbers stay as they are.

        Args:
            path: a file to be written, whose name ends in ``.html``, ``.json`` or ``.txt``; None writes none.
            args: positional arguments of a call; or a batch, a mapping of arguments by name. Without any, the step is
                the latest call, as long as its tensors are still held.
            optimizer: one whose step is measured, too, on copies of its parameters and state.
            kwargs: keyword arguments of the call.

        Raises:
            OptionError: the name of the file ends in something else.
        """
        if path is not None:
            RunReport.check_name(path)
        made = report_of(self.__dict__["_wrapped"], self._told_of(), optimizer, args, kwargs)
        reason = self.__dict__["_ort_fallback"].reason
        if reason is not None:
            made.told = [f"runs in eager PyTorch, because {reason}", *made.told]
        if path is not None:
            made.save(path)
        return made

    @contextlib.contextmanager
    def _planned_of(self) -> Iterator[Sessions | None]:
        """The graphs, with the parameters there that a call would find; of a meta device's module as if on a CPU."""
        this: Any = self
        module = self.__dict__["_wrapped"]
        with root_gathered(this, module):
            if has_content(module) or self.__dict__["_ort_fallback"].is_eager:
                yield self._told_of()
            else:
                yield Sessions(without_content(module), self.__dict__["_ort_options"])

    def _told_of(self) -> Sessions | None:
        """The graphs; None where the module runs in eager PyTorch."""
        return None if self.__dict__["_ort_fallback"].is_eager else self._graphs()

    @property
    def verification(self) -> Report | None:
        """What ``Options(verify=True)`` compared on the last graph's first step; None where it was not asked for."""
        return None if self.__dict__["_ort_last"] is None else self.__dict__["_ort_last"].bound.verification

    def _session(self) -> Session:
        if self.__dict__["_ort_last"] is None:
            raise ModuleError("the module was not called yet, so there is no graph", cure="run one batch first")
        return self.__dict__["_ort_last"]
