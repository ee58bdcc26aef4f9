"""What a profile tells of a step, as text, numbers and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain.engine.costs import Cost
from onnxtrain.engine.memory_report import label
from onnxtrain.engine.module_times import ModuleTime, by_module
from onnxtrain.engine.pages import Paged
from onnxtrain.engine.profile_page import page
from onnxtrain.engine.work import share_of
from onnxtrain.ir.printer import in_bytes

_TOP = 12  # rows of a table
_LEAST_SHARE = 0.01  # of the time of all operators, that a module is told for
_HEAD = f"  {'forward':>11}{'backward':>12}{'share':>8}{'calls':>7}{'of machine':>12}  "


@dataclasses.dataclass(frozen=True)
class ProfileReport(Paged):
    """Where the time of a step goes: medians of some runs, in seconds. No parameter, buffer or gradient was changed.

    ``str()`` of it is a text, ``save`` writes a page with a picture.

    Args:
        costs: of each line of the programs, in order.
        step: of forward and backward as a call of the module runs them, with autograd around.
        choosing: of finding the graph that serves the call.
        optimizer: of the optimizer's step; None where none was given.
        products: for each element type of products the operations a second of a large one.
        bandwidth: bytes a second that a sum of large tensors moves.
        sizes: of named dimensions.
        peak: most bytes that torch had allocated at once within forward and backward, gradients of parameters among
            them, beside what was there before.
        work: floating point operations of the step, and those of eager PyTorch; None where content decides on sizes, or
            nothing is trained.
    """

    costs: Sequence[Cost]
    step: float
    choosing: float
    optimizer: float | None
    products: Mapping[str, float]
    bandwidth: float
    sizes: Mapping[str, int]
    peak: int
    work: tuple[int, int] | None

    @property
    def total(self) -> float:
        """Of a whole step."""
        return self.choosing + self.step + (self.optimizer or 0.0)

    @property
    def operators(self) -> float:
        """Of all operators."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def overhead(self) -> float:
        """What onnxtrain and autograd take around the operators: choosing the graph, the program between them."""
        return max(self.choosing + self.step - self.operators, 0.0)

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} = {s}" for n, s in self.sizes.items())
        speeds = ", ".join(f"{speed / 1e9:.0f} GFLOP/s in products of {name}" for name, speed in self.products.items())
        shares = [
            ("forward", self._of("forward")),
            ("backward", self._of("backward")),
            ("optimizer", self.optimizer or 0.0),
            ("around the operators", self.overhead),
        ]
        return "\n".join(
            [
                f"a step takes {_ms(self.total)}{f', for {sizes}' if sizes else ''}",
                *(f"  {name:<24}{_ms(seconds):>12}{self._share(seconds):>7}" for name, seconds in shares if seconds),
                f"  {'peak of its memory':<24}{in_bytes(self.peak):>12}",
                *self._operations(),
                f"  this machine can do {', '.join(filter(None, (speeds, f'{self.bandwidth / 1e9:.1f} GB/s')))}",
                "",
                *self._table("operator", lambda cost: cost.operator),
                "",
                *self._table("operator and line of the model", lambda cost: label(cost.line)),
                *self._modules(),
            ]
        )

    def page(self) -> str:
        """The page in HTML."""
        return page(str(self), self.costs)

    def as_dict(self) -> dict[str, Any]:
        """All that is told, in types that JSON has; seconds and bytes."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("costs", "products")},
            "sizes": dict(self.sizes),
            "products": dict(self.products),
            "total": self.total,
            "overhead": self.overhead,
            "lines": [{**dataclasses.asdict(cost), "line": label(cost.line)} for cost in self.costs],
        }

    def _operations(self) -> list[str]:
        if self.work is None:
            return []
        ours, eager = self.work
        return [f"  {'operations':<24}{ours / 1e9:>6.3g} GFLOP, {share_of(ours, eager)}"]

    def _of(self, part: str) -> float:
        return sum(cost.seconds for cost in self.costs if cost.part == part)

    def _share(self, seconds: float) -> str:
        return f"{100 * seconds / self.total:.0f} %"

    def _table(self, title: str, key: Callable[[Cost], str]) -> list[str]:
        """Costs of one key as one row, those that take longest first."""
        groups: dict[str, list[Cost]] = {}
        for cost in self.costs:
            groups.setdefault(key(cost), []).append(cost)
        rows = sorted(groups.items(), key=lambda item: -sum(cost.seconds for cost in item[1]))
        rows = [*rows[:_TOP], *([("the rest", [c for _, part in rows[_TOP:] for c in part])] if rows[_TOP:] else [])]
        return [f"{_HEAD}{title}", *(self._row(name, costs) for name, costs in rows)]

    def modules(self) -> list[ModuleTime]:
        """What each module took, before those that it calls, but for those that took little."""
        return [m for m in by_module(self.costs) if m.seconds >= _LEAST_SHARE * self.operators]

    def _modules(self) -> list[str]:
        rows = [self._row(f"{'  ' * m.depth}{m}", m.costs) for m in self.modules()]
        return ["", f"{_HEAD}module, and those that it calls", *rows] if rows else []

    def _row(self, name: str, costs: Sequence[Cost]) -> str:
        parts = [sum(c.seconds for c in costs if c.part == part) for part in ("forward", "backward")]
        times = [_ms(seconds) if seconds else "" for seconds in parts]
        whole, least = sum(parts), sum(c.least for c in costs)
        reached = f"{100 * least / whole:.0f} %" if least and whole else ""
        calls = sum(c.calls for c in costs)
        return f"  {times[0]:>11}{times[1]:>12}{self._share(whole):>8}{calls:>7}{reached:>12}  {name}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
