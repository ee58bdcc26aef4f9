"""Operators that are written out give what ONNX's own node tests expect, half precision included."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from onnxtrain.ir.shapes import infer_graph
from onnxtrain.ir.standard_form import attach

WRITTEN = ("LinearAttention", "CausalConvWithState", "SwiGLU")


@functools.cache
def _cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collect_testcases(None)


@pytest.mark.parametrize("op", WRITTEN)
def test_written_out_as_onnx_says(op: str) -> None:
    found = [c for c in _cases() if c.model.graph.node[-1].op_type == op and "_expanded" not in c.name]
    if not found:
        pytest.skip(f"onnx {onnx.__version__} has no {op}")
    for case in found:
        model = ir.from_proto(case.model)
        infer_graph(model.graph)
        made = ir.to_proto(attach(model))
        assert op not in {n.op_type for n in made.graph.node}
        names = [v.name for v in made.graph.input]
        ours = ReferenceEvaluator(made).run(None, dict(zip(names, case.data_sets[0][0], strict=True)))
        for a, b in zip(ours, case.data_sets[0][1], strict=True):
            assert np.asarray(a).dtype == b.dtype, case.name
            np.testing.assert_allclose(a, b, rtol=2e-3 if b.dtype == np.float16 else 1e-5, atol=1e-5, err_msg=case.name)
