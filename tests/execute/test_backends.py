"""Every backend on every row: no farther from float64 than eager torch in float32 is, with room for a few roundings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from op_cases import CASES, Case
from op_runs import Row, prepare, reference, run
from releases import needs_opset

from onnxtrain.errors import BackendError
from onnxtrain.execute import backend
from onnxtrain.execute.torch.memory import SHARE_ANY
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.ir.graphs import DOMAIN

BACKENDS = ("torch", "onnxruntime", "reference")
# Kernels that ONNX's numpy evaluator lacks, or has wrong (onnx 1.23).
NO_REFERENCE = {
    "ConvTranspose": "wrong output_padding",
    "Conv": "ConvTranspose without its output size",
    "MaxPool": "indices are not flat over the tensor",
    "AveragePool": "ConvTranspose without its output size",
    "LpPool": "ConvTranspose without its output size",
    "GlobalLpPool": "not there",
    "MaxUnpool": "indices count through the result without output_shape",
    "Pad": "no negative pads",
    "Unique-unsorted": "an index out of bounds",
    "Slice-before-the-first": "starts as Python does where it goes back",
    "Slice-before-the-first-static": "starts as Python does where it goes back",
    "LRN": "sums as many channels as the batch has rows",
    "LpNormalization": "p = 1 without absolute values",
    "Scan": "no directions but forwards",
    **dict.fromkeys(("Loop", "RNN", "GRU", "LSTM", "LinearAttention"), "no Scan backwards, which the gradient is"),
    **{f"CausalConvWithState{row}": "no negative pads, which the gradient has" for row in ("", "-silu", "-short")},
    "GridSample-cubic-border-0": "cuts the coordinate, not the elements",
    "GridSample-cubic-border-1": "cuts the coordinate, not the elements",
}
# Rows that onnxruntime's CPU kernels refuse, or have wrong (1.31).
NO_ONNXRUNTIME = {
    "LRN-even": "only odd sizes",
    "Conv-same-1d": "no dilations with auto_pad",
    "ConvTranspose-dilated": "output_padding below the steps only",
}


def _close(ours: np.ndarray, exact: np.ndarray, eager: np.ndarray, terms: float = 0.0) -> bool:
    if exact.dtype.kind != "f":
        return bool(np.array_equal(ours, exact))
    finite = np.isfinite(exact)
    if not np.array_equal(ours[~finite], exact[~finite].astype(ours.dtype), equal_nan=True):
        return False
    ours, exact, eager = ours[finite], exact[finite], eager[finite]
    scale = np.abs(exact).max(initial=max(terms, 1e-30))
    allowed = 4 * np.abs(eager - exact).max(initial=0.0) + 16 * np.finfo(np.float32).eps * scale
    return bool(np.abs(ours.astype(np.float64) - exact).max(initial=0.0) <= allowed)


def _exact(row: Row) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return reference(row, torch.float64)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_backend(case: Case, name: str) -> None:
    if name == "reference" and (reason := NO_REFERENCE.get(case.op) or NO_REFERENCE.get(case.id)):
        pytest.skip(reason)
    if name == "onnxruntime" and case.id in NO_ONNXRUNTIME:
        pytest.skip(NO_ONNXRUNTIME[case.id])
    if name != "torch" and case.opset > 25:
        needs_opset(case.opset)
    _check(case, name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_on_a_gpu(case: Case) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 is what is compared
        _check(case, "torch", "cuda")


@pytest.mark.parametrize("op", ["LinearAttention", "CausalConvWithState"])
def test_reference_without_gradients(op: str) -> None:
    """What its gradient keeps from it."""
    for case in CASES:
        if case.op == op:
            _check(dataclasses.replace(case, differentiable=False), "reference")


def _check(case: Case, name: str, device: str = "cpu") -> None:
    row = prepare(case, np.float32, gradients=case.differentiable)
    outputs, gradients = run(row, name, device)
    exact, eager = _exact(row), reference(row, torch.float32)
    for ours, right, near in zip(outputs, exact[0], eager[0], strict=False):
        assert _close(ours, right, near, case.cancels), (ours, right)
    for ours, right, near in zip(gradients, exact[1], eager[1], strict=True):
        assert _close(ours, right, near), (ours, right)


SAME_FORM = (
    "Abs", "Add", "Clip", "Concat", "CumSum", "Div", "Einsum", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Gemm", "HardSigmoid", "LeakyRelu", "Log", "LogSoftmax", "MatMul", "Max", "Mean",
    "Min", "Mod", "Mul", "Neg", "PRelu", "Pow", "ReduceSum", "Relu", "Reshape", "ReverseSequence", "Selu", "Sigmoid",
    "Sin", "Slice", "Softmax", "Softplus", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose",
    "Unsqueeze", "Where",
)  # fmt: skip


@pytest.mark.parametrize("opset", [13, 16, 18, 21, 23])
@pytest.mark.parametrize("op", SAME_FORM)
def test_other_opsets(op: str, opset: int) -> None:
    """One row of each operator that opsets 13 to 23 write alike; gradients are of opset 20 at least."""
    case = [c for c in CASES if c.op == op and c.differentiable][-1]
    _check(dataclasses.replace(case, opset=opset), "onnxruntime")


def test_every_lowering_is_used_by_a_row() -> None:
    used = {(DOMAIN, name) for name in ("ATen", "ATenGrad", "PythonOp", "PythonOpGrad", "DropoutGrad")}
    used.add((DOMAIN, "AddEmbeddingGrad"))  # of the backward pass; differentiated again it is written out
    drawn = ("Dropout", "Bernoulli", "Multinomial", "RandomNormal", "RandomUniform")  # tests of random numbers
    used |= {("", f"{name}{end}") for name in drawn for end in ("", "Like")}
    used |= {(DOMAIN, "RandomState"), (DOMAIN, "DropoutMask")}  # these too
    used |= {(DOMAIN, name) for name in ("Offload", "Fetch", "Fetched")}  # within a memory budget
    for case in CASES:
        plan = prepare(case, np.float32, gradients=case.differentiable).plan
        used |= {(n.domain, n.op_type) for m in (plan.forward, plan.backward) if m is not None for n in m.graph}
    unused = {name for domain, name in LOWERINGS if (domain, name) not in used}
    assert sorted(unused) == []


def _shares_memory(case: Case) -> bool:
    """Whether an output lies in memory of an input that its lowering does not own up to."""
    row = prepare(case, np.float32)
    inputs = [torch.from_numpy(np.array(a)) for a in row.arrays]
    outputs, _ = backend("torch").compile(row.plan).forward(inputs)
    if case.op in SHARE_ANY or (case.domain, case.op) not in LOWERINGS:  # the latter are written out
        return False
    stated = LOWERINGS[case.domain, case.op].view
    hidden = {t.untyped_storage().data_ptr() for t in (inputs[1:] if stated else inputs) if t.numel()}
    return any(y.untyped_storage().data_ptr() in hidden for y in outputs)


def test_lowerings_state_where_they_are_views() -> None:
    """What shares memory with an operand unseen would be overwritten while that is still read."""
    assert [c.id for c in CASES if _shares_memory(c)] == []


@pytest.mark.parametrize("case", [c for c in CASES if c.op in ("Embedding", "Gather")], ids=lambda c: c.id)
def test_many_equal_indices_are_all_added(case: Case) -> None:
    """onnxruntime's ScatterND loses additions from several threads; nothing of ours may rest on it."""
    index = next((i for i, g in enumerate(case.inputs) if getattr(g, "integer", False)), None)
    if index is None:
        pytest.skip("constant indices")
    inputs = list(case.inputs)
    inputs[index] = dataclasses.replace(inputs[index], shape=(20_000,), low=0, high=2)
    row = prepare(dataclasses.replace(case, inputs=tuple(inputs)), np.float32, gradients=True)
    (_, ours), (_, right) = run(row, "onnxruntime"), reference(row, torch.float64)
    for a, b in zip(ours, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


def test_missing_lowering_names_the_node() -> None:
    row = prepare(CASES[0], np.float32)
    row.plan.forward.graph[0].op_type = "TfIdfVectorizer"
    with pytest.raises(BackendError, match="TfIdfVectorizer") as raised:
        backend("torch").compile(row.plan)
    assert "lowering" in raised.value.cure


def test_unknown_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from onnxtrain import execute

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="onnxruntime") as raised:
        execute.backend("onnxruntime")
    assert "pip install" in raised.value.cure
