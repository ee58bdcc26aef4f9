"""Graphs of older opsets are raised to the form of opset 20."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onnxtrain.errors import GraphError
from onnxtrain.ir.opsets import raise_opset
from onnxtrain.ir.verify import verify

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
    "unknown opset": ("y = Relu (x)", 27, "opset 27"),
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
    kept = ("output_dtype", "axis", "left_window_size", "to")
    assert set(model.graph[0].attributes) == {n for n in kept if f"{n} =" in line}


def test_too_old_is_an_error_with_a_cure() -> None:
    with pytest.raises(GraphError, match="opset 11") as raised:
        raise_opset(_model("y = Relu (x)", 11).graph)
    assert "convert" in raised.value.cure
