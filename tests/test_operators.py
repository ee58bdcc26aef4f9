"""The table of operators agrees with what it is read from, and the page with the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain import cli, operators
from onnxtrain.gradient.registry import RULES
from onnxtrain.operators import INNER, RULE, STOP

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], operators.Operator]:
    return {(o.domain, o.name): o for o in operators.operators()}


def test_the_page_is_not_stale(table) -> None:
    made = operators.to_markdown([*table.values()])
    assert PAGE.read_text() == made, "docs/operators.md is stale: make operators writes it again"


def test_every_rule_is_in_the_table(table) -> None:
    assert {key[:2] for key in RULES} == {key for key, o in table.items() if o.gradient == RULE}


def test_facts_of_known_operators(table) -> None:
    softmax = table["", "Softmax"]
    assert (softmax.opsets, softmax.gradient, softmax.torch, softmax.body) == ((1, 11, 13), RULE, True, True)
    assert softmax.onnxruntime and softmax.notes and not softmax.is_missing
    assert table["", "Shape"].gradient == STOP and not table["", "Shape"].is_missing
    assert table["", "StringConcat"].is_missing
    assert table["onnxtrain", "TanhGrad"].gradient == INNER and table["onnxtrain", "TanhGrad"].body
    assert not table["onnxtrain", "ATen"].body and table["onnxtrain", "ATen"].onnxruntime is False
    assert ("", "Scatter") not in table, "it was removed from ONNX"


def helped(ctx, mode: str) -> None:
    ctx.first_output_only()
    if mode != "constant":
        raise ctx.unsupported(f"the gradient of Pad in mode {mode!r}")


def rule(ctx, dy, x, *, mode: str = "constant", order: int = 0):
    if order:
        raise ctx.unsupported("the gradient of Pad from the right")
    helped(ctx, mode)
    return dy


def test_refused_cases_are_read_from_a_rule_and_what_it_calls() -> None:
    right, first, mode = "Pad from the right", "gradients of outputs but the first", "Pad in mode …"
    assert operators.refusals(rule) == (right, first, mode)
    assert operators.refusals(lambda ctx, dy, x: dy) == ()


def test_the_command_prints_chosen_operators(capsys) -> None:
    assert cli.main(["ops", "Softmax", "StringConcat", "--json"]) == 0
    assert [o["name"] for o in json.loads(capsys.readouterr().out)] == ["Softmax", "StringConcat"]
    assert cli.main(["ops", "Softmax", "StringConcat", "--missing"]) == 0
    printed = capsys.readouterr().out
    assert "StringConcat" in printed and "Softmax" not in printed
    assert cli.main(["ops", "Sofmax"]) == 2
    assert "Sofmax" in capsys.readouterr().err


def test_the_command_line_is_cheap_and_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['onnxruntime'] = None\n"
        "from onnxtrain import cli\n"
        "assert not {'onnx', 'onnx_ir', 'numpy'} & set(sys.modules), 'imported too early'\n"
        "del sys.modules['torch'], sys.modules['onnxruntime']\n"
        "import importlib.util\n"
        "known = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n in ('torch', 'onnxruntime') else known(n, *a)\n"
        "sys.exit(cli.main(['ops', 'Softmax', 'Selu']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "?" in done.stdout and "Softmax" in done.stdout
