"""Pages as a stranger follows them: the blocks of each are run in order, as one program in an empty folder.

The blocks of docs/add-an-operator.md are run here, and its operators put through the loops of the table of cases.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pages
import pytest
import torch
from op_runs import prepare, reference, run

from onnxtrain import api, artifacts, onnxblock
from onnxtrain.execute.torch import lowerings  # noqa: F401  (fills LOWERINGS)
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.gradient import rules  # noqa: F401  (fills RULES)
from onnxtrain.gradient.registry import RULES, STOP_EDGES
from onnxtrain.ir import functions
from onnxtrain.ir.graphs import DOMAIN

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "add-an-operator.md").read_text()
BLOCKS = [block.text for block in pages.blocks(DOCS / "add-an-operator.md")]
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


def test_few_blocks_are_not_run() -> None:
    left = [(page.name, block.line) for page in pages.PAGES for block in pages.blocks(page) if block.why_not]
    assert [name for name, _ in left] == ["anywhere.md", "anywhere.md", "distributed.md", "onnx-models.md"], left


AFTERWARDS = {
    "on-device.md": """
assert optimizer.updates == 50 and schedule._record["step"] == 50 and weights["optimizer/step"] == 50
assert np.abs(gradient).max() > 0
half = module.get_contiguous_parameters(trainable_only=True).numpy()
np.testing.assert_array_equal(half, vector * np.float32(0.5))
outputs = {p: onnx.load(p).graph.output[0].name for p in ("trained.onnx", "features.onnx")}
assert outputs == {"trained.onnx": "scores", "features.onnx": "hidden"}
assert {i.name for i in onnx.load("distilled/training_model.onnx").graph.input} >= {"labels", "teacher"}
""",
    "README.md": """
import onnxruntime
session = onnxruntime.InferenceSession("trained.onnx")
(scores,) = session.run(["scores"], {"image": (images / 16).astype(np.float32)})
assert (scores.argmax(1) == labels).mean() > 0.9
""",
    "hooks.md": """
import pathlib
assert pathlib.Path("activations/merged/summary.txt").exists()
""",
}
QUICK = ("on-device.md", "onnx-models.md")  # without torch
_ELSEWHERE = ("add-an-operator.md", "errors.md")  # run above, where its operator is taken out before; by test_errors


def runnable() -> list[Any]:
    """Pages with a block that is run, but for those that are elsewhere."""
    found = [p for p in pages.PAGES if any(not b.why_not for b in pages.blocks(p)) and p.name not in _ELSEWHERE]
    return [pytest.param(p, id=p.name, marks=[] if p.name in QUICK else pytest.mark.slow) for p in found]


@pytest.mark.parametrize("page", runnable())
def test_a_page_runs_in_an_empty_folder(tmp_path: Path, page: Path) -> None:
    done = pages.run(page, tmp_path, AFTERWARDS.get(page.name, ""))
    assert done.returncode == 0, f"{page.name}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}"


def test_a_page_that_fails_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```console\npython -c 'pass'\n```\n\n```python\ny = z\n```\n")
    done = pages.run(page, tmp_path)
    assert done.returncode == 1 and "line 12" in done.stderr and "NameError" in done.stderr


def test_names_of_the_page_on_devices_exist() -> None:
    page = (DOCS / "on-device.md").read_text()
    for name in re.findall(r"onnxblock\.(?:loss|optim)\.(\w+)\(", page):
        assert hasattr(onnxblock.loss, name) or hasattr(onnxblock.optim, name), name
    for name in ("TrainingBlock", "ForwardBlock", "base", "empty_base", "blocks", "loss", "optim"):
        assert f"`{name}`" in page or f"`onnxblock.{name}`" in page
        assert hasattr(onnxblock, name)
    listed = re.search(r"training\.api import (.*?)`", page)
    assert listed is not None
    assert all(hasattr(api, name) for name in listed.group(1).split(", "))
    assert callable(artifacts.seal)
