"""The page of errors: each class has a program that raises it, and the page has what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_examples import EXAMPLES, PAGE, error_of, page
from test_cli import run

from onnxtrain.errors import CaptureError, OnnxTrainError, as_raised_by, kinds

NAMES = [kind.__name__ for kind in kinds() if kind is not OnnxTrainError]


def test_every_class_has_an_example() -> None:
    assert list(EXAMPLES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_raises_its_class_and_says_what_to_do(name: str) -> None:
    error = error_of(name)
    assert type(error).__name__ == name and str(error).splitlines()[-1] == f"  more: onnxtrain errors {name}"


def test_the_page_is_what_the_programs_raise() -> None:
    assert PAGE.read_text() == page(), "docs/errors.md is stale: make errors writes it again"


def test_an_error_that_is_also_the_users_names_ours() -> None:
    assert "more: onnxtrain errors CaptureError" in str(as_raised_by(KeyError("x"), CaptureError("it fails")))


def test_the_command_line_tells_the_same(tmp_path: Path) -> None:
    status, text, _ = run(tmp_path, "errors")
    assert status == 0 and [line.split()[0] for line in text.splitlines()] == NAMES
    status, text, _ = run(tmp_path, "errors", "BudgetError", "HookError")
    assert status == 0 and "MemoryError" in text and "No step fits into the memory budget." in text
    status, _, error = run(tmp_path, "errors", "Budget")
    assert status == 2 and "close names: BudgetError" in error and "more:" not in error
