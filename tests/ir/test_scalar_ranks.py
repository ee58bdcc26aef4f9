"""Single numbers get the rank of what they meet where onnxruntime is slow else; nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.ir import shapes
from onnxtrain.ir.reading import read_forward
from onnxtrain.ir.scalar_ranks import match_ranks

ROWS = {
    "kernel": ("float[6, 4, 1, 1]", "", [4, 4]),
    "statistic": ("float[n, 3, 1]", "1", [3, 3]),
    "matrix": ("float[6, 4]", "", [0, 0]),
    "vector": ("float[6]", "1", [0, 1]),
    "same rank": ("float[6, 1]", "1, 1", [2, 2]),
}


@pytest.mark.parametrize(("x", "number", "ranks"), ROWS.values(), ids=ROWS)
def test_ranks(x: str, number: str, ranks: list[int]) -> None:
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    g ({x} x, float[{number}] rate) => (float y)
    <float two = {{2}}>
    {{
        a = Mul (x, rate)
        y = Sub (two, a)
    }}
    """
    if not number:
        text = text.replace("float[] rate", "float rate")
    proto = onnx.parser.parse_model(text)
    for value in (*proto.graph.input, *proto.graph.output):  # what the parser writes of a value without dimensions
        value.type.tensor_type.shape.SetInParent()
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    graph = read_forward(proto).model.graph
    before = ir.to_proto(ir.Model(graph.clone(), ir_version=10))
    match_ranks(graph)
    found = [shapes.rank(next(v for v in n.inputs if v.name[:1] in "rt")) for n in graph if n.op_type in ("Mul", "Sub")]  # type: ignore[union-attr,index]
    expected = [shapes.rank(v) if r == 0 else r for v, r in zip((graph.inputs[1], graph.inputs[0]), ranks, strict=True)]
    assert found[0] == expected[0]
    feeds = {"x": np.random.default_rng(0).normal(size=[2 if d == "n" else int(d) for d in x[6:-1].split(", ")])}
    feeds["rate"] = np.full([int(d) for d in number.split(", ") if d], 0.5)
    feeds = {n: a.astype(np.float32) for n, a in feeds.items()}
    outputs = [
        ort.InferenceSession(m.SerializeToString()).run(None, feeds)[0]
        for m in (before, ir.to_proto(ir.Model(graph, ir_version=10)))
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
