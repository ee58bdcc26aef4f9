"""Every backend on every row: no farther from float64 than eager torch in float32 is, with room for a few roundings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from op_cases import CASES, Case, Given
from op_runs import Results, execute, prepare, reference, resized, run

from onnxtrain.errors import BackendError
from onnxtrain.execute import backend
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
}


def _check(ours: np.ndarray, exact: np.ndarray, eager: np.ndarray) -> None:
    assert ours.shape == exact.shape
    assert ours.dtype == eager.dtype
    if exact.dtype.kind != "f":
        assert np.array_equal(ours, exact)
        return
    scale = np.abs(exact).max(initial=1e-30)
    allowed = 4 * np.abs(eager - exact).max(initial=0.0) + 16 * np.finfo(np.float32).eps * scale
    error = np.abs(ours.astype(np.float64) - exact).max(initial=0.0)
    assert error <= allowed, f"{error / scale:.1e} from float64, {allowed / scale:.1e} is allowed"


def _check_all(ours: Results, exact: Results, eager: Results) -> None:
    for y, right, near in zip(ours[0], exact[0], eager[0], strict=True):
        _check(y, right, near)
    for name in exact[1]:
        if name in ours[1]:
            _check(ours[1][name], exact[1][name], eager[1][name])
        else:
            assert not exact[1][name].any(), f"no gradient for {name}"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_backend(case: Case, name: str) -> None:
    reason = case.skips.get(name) or (NO_REFERENCE.get(case.op) if name == "reference" else None)
    if reason:
        pytest.skip(reason)
    row = prepare(case, np.float32, gradients=case.differentiable)
    _check_all(run(row, name), reference(row, torch.float64), reference(row, torch.float32))


@pytest.mark.parametrize("case", [c for c in CASES if any(isinstance(g, Given) for g in c.inputs)], ids=lambda c: c.id)
def test_one_program_serves_other_sizes(case: Case) -> None:
    row = prepare(case, np.float64, gradients=case.differentiable)
    executable = backend("torch").compile(row.plan)
    for arrays in resized(row):
        other = dataclasses.replace(row, arrays=arrays)
        ours, exact = execute(other, executable), reference(other, torch.float64)
        for y, right in zip(ours[0], exact[0], strict=True):
            assert y.shape == right.shape
            np.testing.assert_allclose(y, right, rtol=1e-9, atol=1e-11)
        for key, dx in ours[1].items():
            assert dx.shape == exact[1][key].shape
            np.testing.assert_allclose(dx, exact[1][key], rtol=1e-8, atol=1e-10)


def test_most_rows_have_other_sizes() -> None:
    """Constants of a row may fix its sizes; a table of such rows would test nothing above."""
    with_inputs = [c for c in CASES if any(isinstance(g, Given) for g in c.inputs)]
    fixed = [c.id for c in with_inputs if not resized(prepare(c))]
    assert len(fixed) < len(with_inputs) / 10, fixed


def test_every_lowering_is_used_by_a_row() -> None:
    used = {(DOMAIN, "ATen"), (DOMAIN, "ATenGrad"), (DOMAIN, "DropoutGrad")}  # tests/capture, tests/ortmodule
    for case in CASES:
        plan = prepare(case, np.float32, gradients=case.differentiable).plan
        used |= {(n.domain, n.op_type) for m in (plan.forward, plan.backward) if m is not None for n in m.graph}
    assert sorted(set(LOWERINGS) - used) == []


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
    for key, dx in ours.items():
        np.testing.assert_allclose(dx, right[key], rtol=1e-3, atol=1e-2)


def test_missing_lowering_names_the_node() -> None:
    row = prepare(CASES[0], np.float32)
    row.plan.forward.graph[0].op_type = "Unique"
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
