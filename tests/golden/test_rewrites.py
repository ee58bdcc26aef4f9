"""The small graphs that passes rewrite, as text before and after.

``make golden`` writes the file again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rewrites import REWRITES

from onnxtrain.ir.printer import to_text
from onnxtrain.optimize import optimize

PATH = Path(__file__).parent / "rewrites.txt"


def test_rewrites(request: pytest.FixtureRequest) -> None:
    parts = []
    for name, rewrite in REWRITES.items():
        graph = rewrite.graph()
        before = to_text(graph.model, title=f"{name}, before")
        optimize(graph, **rewrite.options)
        parts.append(f"{before}\n{to_text(graph.model, title=f'{name}, after')}")
    text = "\n".join(parts)
    if request.config.getoption("--regenerate-golden"):
        PATH.write_text(text)
    assert PATH.read_text() == text, f"{PATH.name} changed; if that is meant: make golden"
