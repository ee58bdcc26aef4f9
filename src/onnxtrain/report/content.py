"""What is told of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onnxtrain.engine.comparison import Report
from onnxtrain.engine.memory_report import MemoryReport
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.engine.work import share_of
from onnxtrain.ir.printer import in_bytes
from onnxtrain.report.graphs import GraphReport


@dataclasses.dataclass
class Content:
    """What was done with a module: captured, rewritten, skipped; what a step takes.

    Attributes:
        name: class of the module.
        versions: of what it ran with, and the device.
        told: lines on all its calls: how many there were, and which ran in eager PyTorch, and why.
        graphs: in the order of their capture.
        memory: of a step on a batch, predicted; None where there was none to tell it for.
        time: of the same step, measured; None too.
        left_out: why memory and time are not told; empty where they are.
        verification: a step beside eager PyTorch's, where ``Options(verify=True)`` asked for it.
        losses: curves to be drawn, such as those of eager PyTorch and of this module; yours to fill.
    """

    name: str
    versions: Mapping[str, str]
    told: Sequence[str]
    graphs: Sequence[GraphReport]
    memory: MemoryReport | None = None
    time: ProfileReport | None = None
    left_out: str = ""
    verification: Report | None = None
    losses: dict[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is to be seen first: names, with what they are."""
        found = [("graphs", str(len(self.graphs)))]
        if self.graphs:
            found.append(("start, all stages", f"{sum(graph.seconds for graph in self.graphs):.2f} s"))
        trained = [graph for graph in self.graphs if graph.mode == "training"]
        work, which = (None, "") if not trained else (trained[-1].work, "FLOPs of the last step")
        if self.time is not None:
            work, which = self.time.work, "FLOPs of a step"
        if work is not None:
            found.append((which, share_of(*work)))
        if self.time is not None:
            found += [("a step", f"{1000 * self.time.total:.3g} ms"), ("real peak", in_bytes(self.time.peak))]
        if self.memory is not None:
            found.append(("predicted peak", in_bytes(self.memory.peak)))
        if self.verification is not None:
            count = sum(c.passed for c in self.verification.comparisons)
            found.append(("as in eager", f"{count} of {len(self.verification.comparisons)} tensors"))
        return found
