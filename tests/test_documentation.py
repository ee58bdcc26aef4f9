"""The worked example of docs/add-an-operator.md: its blocks are run, and its operators put through the loops.

The blocks of docs/onnx-models.md are run in order, in a folder with the model that the page begins with.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from op_runs import prepare, reference, run

from onnxtrain.execute.torch import lowerings  # noqa: F401  (fills LOWERINGS)
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.gradient import rules  # noqa: F401  (fills RULES)
from onnxtrain.gradient.registry import RULES, STOP_EDGES
from onnxtrain.ir import functions
from onnxtrain.ir.graphs import DOMAIN

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "add-an-operator.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
OWN_PROGRAM = next(i for i, block in enumerate(BLOCKS) if "register_gradient" in block)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The tables without the page's operators; afterwards as they were."""
    functions.load()
    every = (RULES, LOWERINGS, functions.DEFINITIONS, STOP_EDGES)
    before = [dict(table) for table in every]
    del RULES["", "Softsign"], LOWERINGS["", "Softsign"]
    yield monkeypatch
    for table, content in zip(every, before, strict=True):
        table.clear()
        table.update(content)


def run_blocks(folder: Path, blocks: list[str], patch: pytest.MonkeyPatch) -> ModuleType:
    """The blocks as one module; a file, since onnxscript reads the source of functions."""
    path = folder / "example.py"
    path.write_text("\n".join(blocks))
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "example", module)
    spec.loader.exec_module(module)
    return module


def through_the_loops(case) -> list[str]:
    """The row as every test of the table runs it; returns the operators of the backward pass."""
    row = prepare(case, np.float64, gradients=case.differentiable)
    expected, expected_gradients = reference(row, torch.float64)
    outputs, gradients = run(row, "torch")
    np.testing.assert_allclose(outputs[0], expected[0], rtol=1e-12)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert bool(gradients) == case.differentiable
    single = prepare(case, np.float32, gradients=case.differentiable)
    for name in ("torch", "onnxruntime", "reference"):
        found, found_gradients = run(single, name)
        for ours, theirs in zip([*found, *found_gradients], [*expected, *expected_gradients], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    return [n.op_type for n in row.plan.backward.graph] if row.plan.backward is not None else []


def test_a_rule_a_lowering_and_a_row_make_an_operator(tables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = run_blocks(tmp_path, BLOCKS[:OWN_PROGRAM], tables)
    assert [case.op for case in example.CASES] == ["Softsign", "SoftsignGrad"]
    assert RULES["", "Softsign"] is example.softsign
    for case in example.CASES:
        through_the_loops(case)


def test_a_list_of_nodes_takes_the_place_of_the_rule(tables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = run_blocks(tmp_path, BLOCKS, tables)
    assert RULES["", "Softsign"] is not example.softsign
    operators = through_the_loops(example.CASES[0])
    assert operators[-1] == "Div" and "Mul" in operators
    assert (DOMAIN, "ATen", "aten::diagonal", "") in RULES
    assert STOP_EDGES[DOMAIN, "ATen", "aten::histc", ""] == frozenset([0])


def test_the_example_is_the_rule_that_is_used() -> None:
    assert inspect.getsource(RULES["", "Softsign"]) in PAGE


def test_nothing_of_the_example_stays() -> None:
    assert "SoftsignGrad" not in functions.DEFINITIONS


def test_the_page_on_onnx_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(tmp_path, BLOCK.findall((DOCS / "onnx-models.md").read_text()), monkeypatch)
