"""Every backend on every row: no farther from float64 than eager torch in float32 is, with room for a few roundings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from op_cases import CASES, Case
from op_runs import Row, prepare, reference, run

from onnxtrain.errors import BackendError
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.ir.graphs import DOMAIN

BACKENDS = ("torch", "onnxruntime", "reference")
# Kernels that ONNX's numpy evaluator lacks, or has wrong (onnx 1.23).
NO_REFERENCE = {
    "ConvTranspose": "wrong output_padding",
    "Conv": "ConvTranspose without its output size",
    "MaxPool": "indices are not flat over the tensor",
    "AveragePool": "ConvTranspose without its output size",
    "Pad": "no negative pads",
    "Scan": "no directions but forwards",
    **dict.fromkeys(("Loop", "RNN", "GRU", "LSTM"), "no Scan backwards, which the gradient is"),
}


def _close(ours: np.ndarray, exact: np.ndarray, eager: np.ndarray) -> bool:
    if exact.dtype.kind != "f":
        return bool(np.array_equal(ours, exact))
    scale = np.abs(exact).max(initial=1e-30)
    allowed = 4 * np.abs(eager - exact).max(initial=0.0) + 16 * np.finfo(np.float32).eps * scale
    return bool(np.abs(ours.astype(np.float64) - exact).max(initial=0.0) <= allowed)


def _exact(row: Row) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return reference(row, torch.float64)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_backend(case: Case, name: str) -> None:
    if name == "reference" and case.op in NO_REFERENCE:
        pytest.skip(NO_REFERENCE[case.op])
    row = prepare(case, np.float32, gradients=case.differentiable)
    outputs, gradients = run(row, name)
    exact, eager = _exact(row), reference(row, torch.float32)
    for ours, right, near in zip(outputs, exact[0], eager[0], strict=False):
        assert _close(ours, right, near), (ours, right)
    for ours, right, near in zip(gradients, exact[1], eager[1], strict=True):
        assert _close(ours, right, near), (ours, right)


def test_every_lowering_is_used_by_a_row() -> None:
    used = {(DOMAIN, "ATen"), (DOMAIN, "ATenGrad"), (DOMAIN, "DropoutGrad"), ("", "Dropout")}
    for case in CASES:
        plan = prepare(case, np.float32, gradients=case.differentiable).plan
        used |= {(n.domain, n.op_type) for m in (plan.forward, plan.backward) if m is not None for n in m.graph}
    unused = {name for domain, name in LOWERINGS if (domain, name) not in used}
    simple = {  # one torch function each, without a rule yet: they come with their rows
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
        "Cosh", "Mish", "ReduceLogSum", "ReduceProd", "Sinh", "SumToShape", "Tan", "ConstantOfShape",
    }  # fmt: skip
    assert sorted(unused - simple) == []


@pytest.mark.parametrize("case", [c for c in CASES if c.op in ("Embedding", "Gather")], ids=lambda c: c.id)
def test_many_equal_indices_are_all_added(case: Case) -> None:
    """onnxruntime's ScatterND loses additions from several threads; nothing of ours may rest on it."""
    index = next(i for i, g in enumerate(case.inputs) if getattr(g, "integer", False)) if case.label != "one" else None
    if index is None:
        pytest.skip("a single index")
    inputs = list(case.inputs)
    inputs[index] = dataclasses.replace(inputs[index], shape=(20_000,), low=0, high=2)
    row = prepare(dataclasses.replace(case, inputs=tuple(inputs)), np.float32, gradients=True)
    (_, ours), (_, right) = run(row, "onnxruntime"), reference(row, torch.float64)
    for a, b in zip(ours, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


def test_missing_lowering_names_the_node() -> None:
    row = prepare(CASES[0], np.float32)
    row.plan.forward.graph[0].op_type = "Unique"
    from onnxtrain.execute import backend

    with pytest.raises(BackendError, match="Unique") as raised:
        backend("torch").compile(row.plan)
    assert "lowering" in raised.value.cure


def test_unknown_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from onnxtrain import execute

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="onnxruntime") as raised:
        execute.backend("onnxruntime")
    assert "pip install" in raised.value.cure
