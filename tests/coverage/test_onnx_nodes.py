"""The node tests of the onnx package: at least nine in ten operators are differentiated right on onnxruntime."""

from __future__ import annotations

import onnx_nodes as nodes
import pytest

pytestmark = pytest.mark.slow

# Tests that fail, by the beginning of their names, and why.
KNOWN = {
    "test_batchnorm_": "running statistics are not differentiated by the statistics before, as in torch",
    "test_convtranspose_output_shape": "onnxruntime pads at the other end than ONNX's reference",
    "test_scan_sum": "the form of opset 8",
    "test_slice_start_out_of_bounds": "an empty result",
}


def test_node_tests_are_differentiated() -> None:
    results = [nodes.check(case) for case in nodes.cases()]
    failed = [r for r in results if r.outcome == "fail"]
    surprises = [f"{r.name}: {r.reason}" for r in failed if not r.name.startswith(tuple(KNOWN))]
    assert not surprises, "\n".join(surprises)
    operators = {r.op for r in results if r.outcome != "skip"}
    assert len({r.op for r in failed}) <= 0.1 * len(operators) and len(operators) > 100, nodes.table(results)


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.gradient.registry import RULES

    (case,) = (c for c in nodes.cases(["Sin"]) if c.name == "test_sin")
    assert nodes.check(case).outcome == "pass"
    monkeypatch.setitem(RULES, ("", "Sin"), lambda ctx, dy, x: dy * ctx.op.Sin(x))
    assert nodes.check(case).outcome == "fail"
