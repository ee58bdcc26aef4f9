"""What a plan for many ranks tells, as text and as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from onnxtrain.cluster import Cluster
from onnxtrain.engine.pages import Paged, document, paragraph, table
from onnxtrain.engine.ranks import RankPlan
from onnxtrain.engine.strategies import Step
from onnxtrain.ir.printer import in_bytes

_COLUMNS = (
    *("#ranks", "strategy", "#peak", "#parameters", "#optimizer", "#buffers", "#in a step", "#sent"),
    *("#computing", "#waiting", "fits"),
)


@dataclasses.dataclass(frozen=True)
class ClusterReport(Paged):
    """What a step needs and takes on many ranks; nothing was run.

    ``str()`` of it is a text, ``save`` writes a page.

    Args:
        name: class of the module.
        step: of one rank.
        cluster: the ranks that it was planned for.
        plans: for each number of ranks and each strategy.
    """

    name: str
    step: Step
    cluster: Cluster
    plans: Sequence[RankPlan]

    def __str__(self) -> str:
        rows = [tuple(column.lstrip("#") for column in _COLUMNS), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = [str.rjust if column.startswith("#") else str.ljust for column in _COLUMNS]
        lines = ("  ".join(s(c, w) for s, c, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([*self._told(), "", *lines])

    def as_dict(self) -> dict[str, Any]:
        """All that is told, in types that JSON has; bytes and seconds."""
        return {
            "name": self.name,
            "elements": self.step.elements,
            "weights": self.step.all,
            "cluster": {k: [*v] if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.cluster).items()},
            "plans": [{**dataclasses.asdict(p), "peak": p.peak, "seconds": p.seconds} for p in self.plans],
        }

    def page(self) -> str:
        """The page in HTML."""
        return document(
            f"{self.name} on many ranks", "".join([*map(paragraph, self._told()), table("", _COLUMNS, self._rows())])
        )

    def _told(self) -> list[str]:
        step, cluster = self.step, self.cluster
        forward, backward = step.seconds
        memory = "" if cluster.memory is None else f", which has {in_bytes(int(cluster.memory))}"
        return [
            f"{self.name}: {step.elements / 1e6:.4g} million trained parameters, {in_bytes(step.all)} of weights",
            f"each rank{memory}: forward in {_seconds(forward)} and backward in {_seconds(backward)} at least",
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(p.ranks),
                p.strategy,
                *map(in_bytes, (p.peak, p.parameters, p.optimizer, p.buffers, p.passing, p.sent)),
                _seconds(p.computing),
                "?" if p.waiting is None else _seconds(p.waiting),
                {None: "?", True: "yes", False: "no"}[p.fits],
            )
            for p in self.plans
        ]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
