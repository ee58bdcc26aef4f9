"""Graphs of older opsets are raised to the form of opset 20."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from releases import needs_opset

from onnxtrain.errors import GraphError
from onnxtrain.gradient_graphs import gradient_graph
from onnxtrain.ir import functions
from onnxtrain.ir.function_bodies import body_of
from onnxtrain.ir.opsets import LOWEST, NEWEST, SPOKEN, raise_opset
from onnxtrain.ir.verify import operator_problems, verify

ROWS = {
    "reduction": ("y = ReduceMax <axes = [0, -1], keepdims = 0> (x)", 13, ({"keepdims": 0}, [0, -1])),
    "all axes": ("y = ReduceMean <keepdims = 0> (x)", 17, ({"keepdims": 0}, None)),
    "split": ("y, z = Split <axis = 1> (x)", 13, ({"axis": 1, "num_outputs": 2}, None)),
    "grid": ("y = GridSample <mode = 'bicubic'> (x, x)", 16, ({"mode": "cubic"}, None)),
    "transform": ("y = DFT <axis = 2> (x)", 17, ({}, 2)),
    "transform by default": ("y = DFT (x)", 17, ({}, 1)),
    "regions": (
        "y = RoiAlign (x, x, i)", 13, ({"coordinate_transformation_mode": "output_half_pixel"}, None),
    ),
    "unchanged": ("y = ReduceSum <keepdims = 0> (x, i)", 13, ({"keepdims": 0}, None)),
}  # fmt: skip


def _model(line: str, opset: int) -> ir.Model:
    text = (
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[2, 4, 4, 4] x, int64[2] i) => (float y) {{ {line} }}'
    )
    return ir.from_proto(onnx.parser.parse_model(text.replace("'", '"')))


@pytest.mark.parametrize(("line", "opset", "expected"), ROWS.values(), ids=ROWS)
def test_raised(line: str, opset: int, expected: tuple[dict[str, object], object]) -> None:
    model = _model(line, opset)
    raise_opset(model.graph)
    assert model.graph.opset_imports[""] == 20
    verify(model)
    node = model.graph[0]
    attributes, added = expected
    assert {n: a.value for n, a in node.attributes.items()} == attributes
    if added is not None:
        constant = ir.convenience.get_const_tensor(node.inputs[-1])  # type: ignore[arg-type]
        assert constant is not None and constant.numpy().tolist() == added


def test_batch_normalization_of_old_says_that_it_trains() -> None:
    """Up to opset 13 five outputs meant training mode; later there are three at most, and an attribute."""
    line = "w = ReduceMean <axes = [0, 2, 3], keepdims = 0> (x) y, m, v, s, t = BatchNormalization (x, w, w, w, w)"
    model = _model(line, 13)
    raise_opset(model.graph)
    node = model.graph[-1]
    assert not list(operator_problems(node, model.graph.opset_imports))
    assert node.attributes["training_mode"].value == 1 and [v.name for v in node.outputs] == ["y", "m", "v"]


def test_newer_graphs_stay() -> None:
    model = _model("y = ReduceMax (x, i)", 22)
    raise_opset(model.graph)
    assert model.graph.opset_imports[""] == 22


NEWER = {
    "default": ("y = Cast <to = 1, round_mode = 'up'> (x)", 24, ""),
    "learned": ("y = Cast <to = 1, round_mode = 'down'> (x)", 24, "round_mode=down"),
    "blocks": ("y = QuantizeLinear <output_dtype = 3, block_size = 2> (x, x)", 21, "block_size=2"),
    "known": ("y = QuantizeLinear <output_dtype = 3> (x, x)", 21, ""),
    "first of its kind": ("y = RMSNormalization <axis = 1> (x, x)", 26, ""),
    "window": ("y = Attention <left_window_size = 2> (x, x, x)", 25, ""),
    "blocks as channels": ("y = SpaceToDepth <blocksize = 2, mode = 'CRD'> (x)", 28, ""),
    "onnxruntime's": ("y = SimplifiedLayerNormalization <axis = 1> (x, x)", 23, ""),
    "unknown opset": ("y = Relu (x)", NEWEST + 1, f"opset {NEWEST + 1}"),
}


@pytest.mark.parametrize(("line", "opset", "refused"), NEWER.values(), ids=NEWER)
def test_what_operators_learned_later(line: str, opset: int, refused: str) -> None:
    model = _model(line, opset)
    if refused:
        with pytest.raises(GraphError, match=refused):
            raise_opset(model.graph)
        return
    raise_opset(model.graph)
    assert model.graph.opset_imports[""] == opset
    assert "round_mode" not in model.graph[0].attributes
    kept = ("output_dtype", "axis", "left_window_size", "to", "blocksize", "mode")
    assert set(model.graph[0].attributes) == {n for n in kept if re.search(rf"\b{n} =", line)}


def test_too_old_is_an_error_with_a_cure() -> None:
    with pytest.raises(GraphError, match="opset 11") as raised:
        raise_opset(_model("y = Relu (x)", 11).graph)
    assert "convert" in raised.value.cure


def test_bodies_mean_the_same_in_newer_opsets() -> None:
    """Our functions are written in opset 20 and put into models of newer ones as they are."""
    functions.load()
    bodies = [body_of(name) for name in functions.DEFINITIONS]
    used = {node.op_type for body in bodies for node in body.all_nodes() if not node.domain}
    for name in sorted(used):
        ours, newest = (onnx.defs.get_schema(name, version) for version in (SPOKEN, NEWEST))
        assert (ours.min_input, ours.max_input) == (newest.min_input, newest.max_input), name
        known = {n: str(a.default_value) for n, a in ours.attributes.items()}
        found = {n: str(a.default_value) for n, a in newest.attributes.items()}
        assert {n: found.pop(n) for n in known} == known, name
        assert not set(found) - {"round_mode", "stash_type"}, name  # of Cast to 8 bits, of Range in half precision


@pytest.mark.parametrize("opset", [*range(LOWEST, NEWEST + 1)])
def test_gradients_are_those_of_opset_20(opset: int) -> None:
    """Convolution's gradients are functions of ours, which have to be of the model's own opset."""
    needs_opset(opset)
    text = f"""
    <ir_version: {13 if opset > 24 else 10}, opset_import: ["" : {opset}]>
    network (float[n, 2, 4, 4] x) => (float[n, 3, 2, 2] y)
    <float[3, 2, 2, 2] w = {{{", ".join(f"{i / 24 - 0.4:.3f}" for i in range(24))}}}>
    {{
        h = Conv <strides = [2, 2]> (x, w)
        y = Tanh (h)
    }}
    """
    x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 2, 4, 4)
    found = []
    for version in (opset, SPOKEN):
        model = onnx.parser.parse_model(text.replace(f'"" : {opset}', f'"" : {version}'))
        made = gradient_graph(model, ["w", "x"])
        assert {f.opset_import[0].version for f in made.functions} == {max(version, SPOKEN)}
        found.append(ort.InferenceSession(made.SerializeToString()).run(["w_grad", "x_grad"], {"x": x}))
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)
