"""Sizes of calls by name, and which of them are always the same."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from onnxtrain.engine.sizes import InputSizes
from onnxtrain.ir.concrete import size_of


def graph(**shapes: tuple[int | str, ...]) -> ir.Graph:
    values = [
        ir.val(name, dtype=ir.DataType.FLOAT, shape=[ir.SymbolicDim(d) if isinstance(d, str) else d for d in dims])
        for name, dims in shapes.items()
    ]
    return ir.Graph(values, [], nodes=[], name="sizes")


def call(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(dims) for name, dims in shapes.items()}


def test_sizes_of_one_axis_are_the_same_until_a_call_shows_otherwise() -> None:
    sizes = InputSizes(
        graph(ids=("b", "t"), labels=("n", "k"), bias=("t", "t"), weight=("w", 3)), ("ids", "labels", "bias")
    )
    assert sizes.same == {"n": "b", "k": "t"}
    first = sizes.of(call(ids=(2, 5), labels=(2, 5), bias=(5, 5)))
    assert list(first.items()) == [("b", 2), ("t", 5), ("n", 2), ("k", 5)]
    sizes.narrow(first)
    assert sizes.same == {"n": "b", "k": "t"}
    sizes.narrow(sizes.of(call(ids=(2, 5), labels=(2, 4), bias=(5, 5))))
    assert sizes.same == {"n": "b"}
    sizes.narrow(first)
    assert sizes.same == {"n": "b"}
    sizes.narrow(sizes.of(call(ids=(2, 5), labels=(3, 5), bias=(5, 5))))
    assert sizes.same == {}


@pytest.mark.parametrize("text", ["b", "b*t", "b*t - 1", "Max(b, t)", "floor(b/2 + 1/2)", "t - floor(t/2)"])
def test_dimensions_of_a_call(text: str) -> None:
    dim = ir.SymbolicDim(text)
    for sizes in ({"b": 3, "t": 8}, {"t": 7, "b": 12, "other": 1}):
        assert size_of(dim, sizes) == int(dim.evaluate({"b": sizes["b"], "t": sizes["t"]}))  # type: ignore[arg-type]
    assert size_of(4, {}) == 4
