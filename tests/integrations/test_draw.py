"""The page where a network learns the digits that one draws, used as a visitor would."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsers import BROWSERS, installed, served, visit
from example_scripts import load_example

pytestmark = pytest.mark.slow
example = load_example("draw/publish")
VISITOR = Path(__file__).parent / "draw_digits.html"


def test_it_reads_what_is_drawn_and_learns_what_it_is_told(tmp_path: Path) -> None:
    browser = installed(*BROWSERS)
    if not (example.SHARED / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip("the npm package onnxruntime-web is not installed; `make javascript` gets it")
    example.publish(tmp_path / "draw")
    (tmp_path / VISITOR.name).write_text(VISITOR.read_text())
    with served(tmp_path) as (address, posted):
        result = visit(browser, f"{address}/{VISITOR.name}", posted, tmp_path)
    assert "error" not in result, result
    right, of = map(int, result["unseen"].split(" of "))
    assert right / of > 0.85
    right, of = map(int, result["after"].split(" of "))
    assert right / of > 0.8  # what it was told did not make it forget the others


def test_without_packages_the_runtime_is_read_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "RUNTIMES", tmp_path / "none")
    example.publish(tmp_path / "draw")
    assert f'"{example.ELSEWHERE}ort.wasm.min.mjs"' in (tmp_path / "draw" / "index.html").read_text()
