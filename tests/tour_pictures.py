"""The pictures of docs/tour.md, of the graphs that its program makes; ``make tour`` draws them with Graphviz."""

from __future__ import annotations

import linecache
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pages

PAGE = Path(__file__).parents[1] / "docs" / "tour.md"
FOLDER = PAGE.with_suffix("")


def drawings() -> dict[str, str]:
    """Each picture by its name, in the language of Graphviz: of the first batch, then of the second."""
    lines = pages.program(PAGE).splitlines(keepends=True)
    linecache.cache["tour.py"] = (sum(map(len, lines)), None, lines, "tour.py")
    scope: dict[str, Any] = {"__name__": "tour"}
    first = next(i for i, line in enumerate(lines) if line.startswith("ids, labels = batch"))
    exec(compile("".join(lines[:first]), "tour.py", "exec"), scope)
    found = {"captured": scope["model"].graph("captured", "dot")}
    exec(compile("\n" * first + "".join(lines[first : first + 2]), "tour.py", "exec"), scope)
    return found | {name: scope["model"].graph(stage, "dot") for name, stage in STAGES.items()}


STAGES = {"rows": "captured", "training": "training"}


def operators(drawing: str) -> Counter[str]:
    """How many of each operator a drawing shows: of DOT, or of what Graphviz makes of it."""
    nodes = re.findall(r'^  n\d+ \[label="(\w+)', drawing, re.M) or re.findall(
        r"<title>n\d+</title>\s*<polygon[^>]*>\s*<text[^>]*>(\w+)<", drawing
    )
    return Counter(nodes)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        subprocess.run(["dot", "-Tsvg", "-o", FOLDER / f"{name}.svg"], input=drawing, text=True, check=True)
