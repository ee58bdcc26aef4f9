"""The report of a run: what became of a module, what its steps cost."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxtrain.engine.pages import Paged
from onnxtrain.errors import OptionError
from onnxtrain.files import write_atomically
from onnxtrain.report.content import Content
from onnxtrain.report.graphs import GraphReport
from onnxtrain.report.page import page

_TOP = 8  # reasons that the text lists


class RunReport(Content, Paged):
    """What was done with a module: captured, rewritten, skipped; what a step takes.

    ``str()`` of it is a text, ``save`` writes a page, the text, or JSON. Its attributes are those of ``Content``.
    """

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
            *self.told,
        ]
        lines += [f"  {name:<26}{fact}" for name, fact in self.facts]
        for graph in self.graphs:
            lines += ["", *_text_of(graph)]
        parts = [("a step beside eager PyTorch's", self.verification), ("memory", self.memory), ("time", self.time)]
        for title, part in parts:
            lines += ["", title, str(part)] if part is not None else []
        return "\n".join([*lines, *(["", self.left_out] if self.left_out else [])])

    def page(self) -> str:
        """The page in HTML."""
        return page(self)

    def as_dict(self) -> dict[str, Any]:
        """All that is told, in types that JSON has; seconds and bytes."""
        return {
            "name": self.name,
            "versions": dict(self.versions),
            "told": list(self.told),
            "graphs": [graph.as_dict() for graph in self.graphs],
            "memory": None if self.memory is None else self.memory.as_dict(),
            "time": None if self.time is None else self.time.as_dict(),
            "left_out": self.left_out,
            "verification": None
            if self.verification is None
            else [{**dataclasses.asdict(c), "passed": c.passed} for c in self.verification.comparisons],
            "losses": {name: list(curve) for name, curve in self.losses.items()},
        }

    def save(self, path: str | Path) -> Path:
        """Write it: a page that needs nothing else where the name ends in ``.html``, ``.json`` or ``.txt`` else.

        Args:
            path: the file, which is written whole or not at all.

        Raises:
            OptionError: its name ends in something else.
        """
        path = Path(path)
        write_atomically(path, _form_of(path)(self).encode())
        return path

    @staticmethod
    def check_name(path: str | Path) -> None:
        """Say of a file's name whether a report can be written there, before anything is measured for it.

        Raises:
            OptionError: it cannot.
        """
        _form_of(Path(path))


def _form_of(path: Path) -> Callable[[RunReport], str]:
    made: dict[str, Callable[[RunReport], str]] = {".html": page, ".json": _json, ".txt": str}
    if path.suffix not in made:
        raise OptionError(
            f"a report cannot be written as {path.name}",
            cure="end its name in .html (a page), .json or .txt (as print shows it)",
        )
    return made[path.suffix]


def _json(report: RunReport) -> str:
    return json.dumps(report.as_dict(), indent=1, ensure_ascii=False)


def _text_of(graph: GraphReport) -> list[str]:
    """A graph in lines."""
    forward, backward = graph.nodes
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in graph.phases.items())
    changed = [f"{r.name} {r.nodes_after - r.nodes_before:+}" for r in graph.passes if r.nodes_after != r.nodes_before]
    lines = [
        f"graph {graph.number}, {graph.mode}: served {graph.served} calls; captured because",
        *(f"    {reason}" for reason in graph.reasons),
        *(f"  {line}" for line in graph.told),
        f"  {forward} nodes forward, {backward} backward, {graph.saved} values saved between them",
        f"  made in {graph.seconds:.2f} s: {phases}",
        f"  passes: {', '.join(changed) or 'nothing to do'}",
        *(f"  {line}" for line in graph.rows.told),
        *(f"  rows, set {number}: {each}" for number, each in enumerate(graph.rows.sets, 1)),
        *(f"  {line}" for line in graph.rows.outputs),
    ]
    whole = Counter(node.needed for node in graph.rows.nodes if node.needed.startswith("all rows"))
    return lines + [f"  {count} values have {reason}" for reason, count in whole.most_common(_TOP)]
