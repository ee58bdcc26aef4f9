"""Memory plans by hand of a graph's compiled steps: which are taken, and the tables that list all there are."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import sympy

from onnxtrain.compiler import Compiled
from onnxtrain.ir.python_calls import CALL, PythonCall
from onnxtrain.memory_options import PlanRequest, request_of
from onnxtrain.options import DEVINFO, Options
from onnxtrain.plan.by_hand import (
    COMPROMISE,
    RECOMPUTE,
    Candidate,
    candidates,
    check_known,
    layer_inputs,
    probe_in_force,
    selected,
)
from onnxtrain.plan.recompute import Choice

_LOG = logging.getLogger(__name__)
_TITLES = ("Configs", "Status", "Freq", "Max Saving (bytes)", "Saving Symbolic")
_INSIGHT = ("Node Cluster", "Options", "Requested", "Actual", "Reuse Frequency", "Saved")
_NOTHING = sympy.Integer(0)
_NAMES = {RECOMPUTE: "recompute", COMPROMISE: "compromise"}


@dataclasses.dataclass
class _Row:
    """The candidates of one cluster and kind: how many, what they save, and how many of them are taken."""

    cluster: str
    kind: int
    count: int = 0
    bytes: int = 0
    share: float = 0.0
    saving: sympy.Expr = _NOTHING
    taken: int = 0


class Plans:
    """The plans by hand of one graph: what is asked for has to be there in one of the steps compiled of it.

    Args:
        options: the plans, their level, and how far they are looked for.
        device: where the steps run.
    """

    def __init__(self, options: Options, device: str) -> None:
        self._level, self._device = options.memory_level, device
        self._probe = probe_in_force(options.memory_probe, options.memory_level)
        self._requests = [] if self._level else [request_of(text) for text in options.plans_by_hand]
        self._known: set[tuple[str, int]] = set()

    def chosen(self, compiled: Compiled, sizes: Mapping[str, int]) -> list[Choice]:
        """What a step computes again; all that there is is logged.

        Args:
            compiled: the step as it computes nothing again.
            sizes: of named dimensions.

        Raises:
            OptionError: a plan is for what is not there.
        """
        asked = bool(self._level or self._requests)
        if compiled.training is None or not (asked or _LOG.isEnabledFor(logging.INFO)):
            return []
        found = self._found(compiled, sizes)
        self._known |= {(c.cluster, c.kind) for c in found}
        check_known(self._requests, self._known)
        taken = selected(found, self._requests, self._level)
        rows = _rows(found, taken)
        _LOG.info("%s", self._table(rows, sizes))
        _LOG.log(DEVINFO, "%s", self._insight(rows))
        if asked:
            self._warn(compiled.whole_training.model.graph)
        return [c.choice for c in taken]

    def _warn(self, graph: ir.Graph) -> None:
        """Say what makes plans of a graph less than they could be."""
        if self._level and not layer_inputs(graph):
            _LOG.warning(
                "memory_level=%d: no layer of a transformer was found, so all is computed again from the inputs of the "
                "module, which hardly saves memory; choose plans, or a memory_budget instead",
                self._level,
            )
        calls = [node.meta.get(CALL) for node in graph]
        if any(isinstance(call, PythonCall) and call.name.endswith("CheckpointFunction") for call in calls):
            _LOG.warning(
                "memory plans do not reach into the module's gradient checkpoints, which run in eager PyTorch; drop "
                "the checkpoints, or set keep_checkpoints=False (ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT=0)"
            )

    def table(self, compiled: Compiled, sizes: Mapping[str, int]) -> str:
        """All plans that there are for a step, those that save most first, as text.

        Args:
            compiled: the step as it computes nothing again.
            sizes: of named dimensions.
        """
        found = self._found(compiled, sizes)
        return self._table(_rows(found, selected(found, self._requests, self._level)), sizes)

    def _found(self, compiled: Compiled, sizes: Mapping[str, int]) -> list[Candidate]:
        return candidates(compiled.whole_training, compiled.plan, sizes, self._device, self._probe)

    def _table(self, rows: Sequence[_Row], sizes: Mapping[str, int]) -> str:
        stated = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        head = f"memory plans, level {self._level}, probe {self._probe}, bytes for {stated or 'all sizes'}"
        cells = [
            (f"{r.cluster}:{r.kind}:-1", "ON" if r.taken else "OFF", str(r.count), f"{r.bytes:,}", str(r.saving))
            for r in rows
        ]
        return "\n".join([head, *_aligned(_TITLES, cells)])

    def _insight(self, rows: Sequence[_Row]) -> str:
        asked = {r.cluster: r for r in self._requests}
        cells = []
        for row in rows:
            requested = self._requested(row, asked.get(row.cluster))
            options = f"{row.kind} {_NAMES[row.kind]}"
            cells.append((row.cluster, options, requested, str(row.taken), str(row.count), f"{row.share:.0%}"))
        return "\n".join(["MemoryInsight", *_aligned(_INSIGHT, cells)])

    def _requested(self, row: _Row, request: PlanRequest | None) -> str:
        if self._level:
            return "all" if row.kind <= self._level else "0"
        if request is None or request.kind < row.kind:
            return "0"
        return "all" if request.count < 0 else str(request.count)


def _rows(found: Sequence[Candidate], taken: Sequence[Candidate]) -> list[_Row]:
    rows: dict[tuple[str, int], _Row] = {}
    chosen = {id(c) for c in taken}
    for candidate in found:
        key = candidate.cluster, candidate.kind
        row = rows.setdefault(key, _Row(*key))
        row.count += 1
        row.bytes += candidate.choice.gain
        row.share += (candidate.share - row.share) / row.count
        row.saving += candidate.saving
        row.taken += id(candidate) in chosen
    return sorted(rows.values(), key=lambda row: (-row.bytes, row.cluster, row.kind))


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows below their titles, in columns."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
