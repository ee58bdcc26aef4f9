"""A small model in a file, made of onnx alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write(path: str) -> None:
    """Two layers: ``[batch, 4]`` floats to the scores of three classes."""
    random = np.random.default_rng(0)
    weights = {"w1": (4, 16), "b1": (16,), "w2": (16, 3), "b2": (3,)}
    held = [numpy_helper.from_array(random.normal(0, 0.5, s).astype(np.float32), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["scores"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", s]) for n, s in (("x", 4), ("scores", 3)))
    opset = helper.make_opsetid("", 20)
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", [x], [y], held), opset_imports=[opset], ir_version=10), path
    )
