"""What random files have shown, each as the few lines that it comes down to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import OnnxTrainError


def trained(folder: Path, text: str, *batch: np.ndarray, opset: int = 20, **options: Any) -> tuple[Module, Any]:
    """A module of the artifacts of a model, and what its first step gives."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    onnx.checker.check_model(model)
    given = {"loss": LossType.MSELoss, "artifact_directory": folder, "additional_output_names": ["y"]}
    paths = generate_artifacts(model, **given | options)
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state, paths["eval_model"])
    return module, module(*batch)


def test_an_input_without_dimensions_stays_one(tmp_path: Path) -> None:
    text = "main (float[3] x, int64 i) => (float y) <float[3] w = {1, 2, 3}> { z = Mul(x, w) y = Gather(z, i) }"
    _, (_, y) = trained(tmp_path, text, np.ones(3, np.float32), np.array(1), np.array(0, np.float32))
    assert y.shape == () and y == 2


def test_statistics_of_a_batch_may_be_read(tmp_path: Path) -> None:
    """In evaluation they are the running ones."""
    text = """main (float[4,2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] b = {0, 0}, float[2] m = {5, 7},
        float[2] v = {1, 1}> { z, mean, var = BatchNormalization<training_mode=1>(x, w, b, m, v)
        s = ReduceMean<keepdims=0>(z) p = Add(mean, s) y = Mul(p, w) }"""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    module, (_, y) = trained(tmp_path, text, x, np.zeros(2, np.float32), requires_grad=["w"])
    np.testing.assert_allclose(y, (0.9 * np.array([5, 7]) + 0.1 * x.mean(0)) * [1, 2], rtol=1e-5)
    _, y = module.eval()(x, np.zeros(2, np.float32))
    mean, var = (module.state.parameters[n].data for n in "mv")
    z = (x - mean) / np.sqrt(var + 1e-5) * [1, 2]
    np.testing.assert_allclose(y, (mean + z.mean()) * [1, 2], rtol=1e-4)


@pytest.mark.parametrize("name", ["[a]", "w*", "w?"])
def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path, name: str) -> None:
    text = f'main (float[3] x) => (float[3] y) <float[3] "{name}" = {{1, 2, 3}}> {{ y = Mul(x, "{name}") }}'
    module, _ = trained(tmp_path, text, np.ones(3, np.float32), np.ones(3, np.float32), requires_grad=[name])
    assert module.state.parameters[name].requires_grad


def test_the_name_of_axes_may_be_taken(tmp_path: Path) -> None:
    text = """main (float[2,3] x) => (float[3] y) <float[3] w = {1, 2, 3}>
        { z = ReduceL1<axes=[0], keepdims=0>(x) z_axes = Mul(z, w) y = Sin(z_axes) }"""
    _, (_, y) = trained(tmp_path, text, np.ones((2, 3), np.float32), np.ones(3, np.float32), opset=13)
    np.testing.assert_allclose(y, np.sin([2, 4, 6]), rtol=1e-5)


def test_dropout_that_drops_nothing_may_be_in_a_branch(tmp_path: Path) -> None:
    text = """main (float[3] x, bool b) => (float[3] y) <float[3] w = {1, 2, 3}> { y = If(b) <
        then_branch = one () => (float[3] p) { q = Mul(x, w) p = Dropout(q) },
        else_branch = two () => (float[3] r) { r = Identity(x) }> }"""
    module, (_, y) = trained(tmp_path, text, np.ones(3, np.float32), np.array(True), np.zeros(3, np.float32))
    np.testing.assert_array_equal(y, [1, 2, 3])
    np.testing.assert_allclose(module.state.parameters["w"].grad, 2 * y / 3, rtol=1e-6)


def test_of_a_sequence_the_rank_is_enough(tmp_path: Path) -> None:
    text = """main (float[2,1] x) => (float[?,?] y) <float[2,1] w = {1, 2}>
        { z = Mul(x, w) s = SequenceConstruct(z, w) y = ConcatFromSequence<axis=0>(s) }"""
    module, (_, y) = trained(tmp_path, text, np.ones((2, 1), np.float32), np.zeros((4, 1), np.float32))
    np.testing.assert_array_equal(y, [[1], [2], [1], [2]])
    np.testing.assert_allclose(module.state.parameters["w"].grad, [[1], [2]], rtol=1e-6)


def test_the_kernel_of_a_convolution_may_be_of_unknown_size(tmp_path: Path) -> None:
    """As of a layer that convolves a weight with what was computed."""
    text = """main (float[1,1,k,k] x) => (float[1,1,?,?] y) <float[1,1,4,5] w =
        {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}>
        { y = Conv<auto_pad="SAME_UPPER", strides=[3, 3]>(w, x) }"""
    module, (_, y) = trained(tmp_path, text, np.ones((1, 1, 3, 3), np.float32), np.zeros((1, 1, 2, 2), np.float32))
    x, expected = np.pad(np.arange(1, 21.0).reshape(4, 5), ((1, 1), (0, 1))), np.zeros((6, 6))
    for i, j in np.ndindex(2, 2):
        expected[3 * i : 3 * i + 3, 3 * j : 3 * j + 3] = y[0, 0, i, j] / 2
        assert y[0, 0, i, j] == x[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].sum()
    np.testing.assert_allclose(module.state.parameters["w"].grad[0, 0], expected[1:5, :5], rtol=1e-5)


def test_weights_of_classes_have_a_gradient_inside_of_a_loop(tmp_path: Path) -> None:
    text = """main (float[2,3] x) => (float y) <float[3] w = {1, 2, 3}, int64 n = {2}, bool go = {1}, float s = {0}> {
        y = Loop(n, go, s) <body = b (int64 i, bool c, float a) => (bool d, float e) {
            d = Identity(c) t = Constant<value = int64[2] {0, 2}>() l = SoftmaxCrossEntropyLoss(x, t, w) e = Add(a, l)
        }> }"""
    x = np.array([[1, 2, 3], [3, 1, 2]], np.float32)
    options: dict[str, Any] = {"requires_grad": ["w"], "loss": None, "additional_output_names": []}
    module, _ = trained(tmp_path, text, x, loss_input_names=["y"], **options)
    nll = np.log(np.exp(x).sum(1)) - x[[0, 1], [0, 2]]
    expected = 2 * (nll - (nll * [1, 3]).sum() / 4) / 4
    np.testing.assert_allclose(module.state.parameters["w"].grad, [expected[0], 0, expected[1]], rtol=1e-5)


def test_a_weight_called_like_a_pattern_does_not_stand_for_others(tmp_path: Path) -> None:
    text = """main (float[3] x) => (float[3] y) <float[3] "*" = {1, 2, 3}, float[3] v = {1, 1, 1}>
        { z = Mul(x, "*") y = Mul(z, v) }"""
    for place, (options, trained_one) in enumerate([({"requires_grad": ["*"]}, "*"), ({"frozen_params": ["*"]}, "v")]):
        module, _ = trained(tmp_path / str(place), text, np.ones(3, np.float32), np.ones(3, np.float32), **options)
        assert [n for n, p in module.state.parameters if p.requires_grad] == [trained_one]


def test_ranks_of_what_is_in_sequences_are_known(tmp_path: Path) -> None:
    """Where the file does not say them."""
    text = """main (float[2,3] x) => (float[?,?] y)
        <float[2,3] w = {1, 2, 3, 4, 5, 6}, int64 i = {1}, int64[2] p = {1, 2}> {
            z = Mul(x, w) s = SplitToSequence<axis=-1>(z, p) a = SequenceAt(s, i)
            r = SplitToSequence<keepdims=0>(a) b = SequenceErase(r) c = ConcatFromSequence<axis=0, new_axis=1>(b)
            o = Optional(c) q = OptionalGetElement(o) y = Concat<axis=0>(a, q) }"""
    module, (_, y) = trained(tmp_path, text, np.ones((2, 3), np.float32), np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(y, [[2, 3], [5, 6], [2, 3]])
    np.testing.assert_allclose(module.state.parameters["w"].grad, np.array([[0, 4, 6], [0, 5, 6]]) / 3, rtol=1e-6)


def test_a_sequence_may_be_in_a_body(tmp_path: Path) -> None:
    text = """main (float[2,2] x, bool c) => (float[?,?] y) <float[2,2] w = {1, 2, 3, 4}, int64 i = {1}> { z = Mul(x, w)
        y = If(c) <then_branch = a () => (float[?,?] t) { s = SplitToSequence<axis=0>(z) t = SequenceAt(s, i) },
            else_branch = b () => (float[?,?] e) { e = Neg(z) }> }"""
    x, target = np.ones((2, 2), np.float32), np.zeros((1, 2), np.float32)
    module, (_, y) = trained(tmp_path, text, x, np.array(True), target)
    np.testing.assert_array_equal(y, [[3, 4]])
    np.testing.assert_allclose(module.state.parameters["w"].grad, [[0, 0], [3, 4]], rtol=1e-6)


def test_an_axis_of_unknown_size_may_be_squeezed_away(tmp_path: Path) -> None:
    """A stated rank says that it is 1; in a body onnxruntime takes ranks from the file."""
    text = """main (float[n,3] x) => (float[?,?] y) <float[1,3] w = {1, 2, 3}, int64 k = {2}, bool c = {1}> {
        z = Mul(x, w) y = Loop(k, c) <body = b (int64 i, bool g) => (bool h, float[?] s) {
            h = Identity(g) s = Squeeze(z) }> }"""
    module, (_, y) = trained(tmp_path, text, np.ones((1, 3), np.float32), np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(y, [[1, 2, 3]] * 2)
    np.testing.assert_allclose(module.state.parameters["w"].grad, np.array([[1, 2, 3]]) * 2 / 3, rtol=1e-6)


def test_a_batch_of_one_keeps_its_axis(tmp_path: Path) -> None:
    """A Squeeze without axes drops those that are known to have size 1."""
    text = """main (float[N,1,2] x) => (float[N,2] y) <float[2] w = {1, 2}, float[2,2] k = {1, 0, 0, 1}>
        { s = Squeeze(x) z = Mul(s, w) y = MatMul(z, k) }"""
    for size in (1, 3):
        x = np.ones((size, 1, 2), np.float32)
        module, (_, y) = trained(tmp_path, text, x, np.zeros((size, 2), np.float32), requires_grad=["w"])
        np.testing.assert_array_equal(y, [[1, 2]] * size)
        np.testing.assert_allclose(module.state.parameters["w"].grad, [1, 2], rtol=1e-6)


def test_nothing_is_squeezed_where_no_axis_is_known_to_have_size_1(tmp_path: Path) -> None:
    text = "main (float[N,M] x) => (float[N,M] y) <float[2] w = {1, 2}> { s = Squeeze(x) y = Mul(s, w) }"
    for size in (1, 3):
        x = np.ones((size, 2), np.float32)
        _, (_, y) = trained(tmp_path, text, x, x, requires_grad=["w"])
        np.testing.assert_array_equal(y, [[1, 2]] * size)


def test_the_gradient_of_running_statistics(tmp_path: Path) -> None:
    """Those of a batch reach what they are computed of, with and without that of the first output."""
    text = """main (float[2] s) => (float[2] y) <float[3,2] x = {1, 2, 3, 4, 6, 6}, float[2] w = {1, 2},
        float[2] b = {0, 0}, float[2] m = {5, 7}, float[2] v = {1, 1}>
        { z, mean, var = BatchNormalization<training_mode=1>(x, w, b, m, v) p = Add(mean, var) y = Mul(p, s) }"""
    s, x = np.array([1, 3], np.float32), np.array([[1, 2], [3, 4], [6, 6]], np.float32)
    module, (_, y) = trained(tmp_path, text, s, np.zeros(2, np.float32), requires_grad=["x"])
    centred = x - x.mean(0)
    np.testing.assert_allclose(y, s * (0.9 * np.array([6, 8]) + 0.1 * (x.mean(0) + x.var(0))), rtol=1e-5)
    np.testing.assert_allclose(module.state.parameters["x"].grad, y * s * 0.1 / 3 * (1 + 2 * centred), rtol=1e-4)


def test_inputs_whose_names_are_alike_have_sizes_of_their_own(tmp_path: Path) -> None:
    text = """main (float[?] "x.1", float[?] "x:1", float[?,?] x_1) => (float y) <float w = {2}>
        { a = ReduceSum<keepdims=0>("x.1") b = ReduceSum<keepdims=0>("x:1") c = ReduceSum<keepdims=0>(x_1)
        d = Sum(a, b, c) y = Mul(d, w) }"""
    given = [np.ones(shape, np.float32) for shape in ((2,), (3,), (4, 5))]
    _, (_, y) = trained(tmp_path, text, *given, np.array(0, np.float32), requires_grad=["w"])
    assert y == 50


def test_the_different_elements_have_a_gradient(tmp_path: Path) -> None:
    """Also inside of a body, and beside another way to the loss."""
    text = """main (bool b) => (float[2] y) <float[3] w = {2, 1, 2}> { y = If(b) <
        then_branch = one () => (float[2] p) { u = Unique(w) s = ReduceSum<keepdims=0>(w) p = Mul(u, s) },
        else_branch = two () => (float[2] q) { q = Unique(w) }> }"""
    for branch in (True, False):
        module, (_, y) = trained(tmp_path, text, np.array(branch), np.array([0, 0], np.float32), requires_grad=["w"])
        assert y.tolist() == ([5, 10] if branch else [1, 2])  # and, as the loss is a mean of two squares, its gradient
        expected = np.array([10, 5, 0]) * 5 + 25 if branch else [2, 1, 0]
        np.testing.assert_allclose(module.state.parameters["w"].grad, expected, rtol=1e-6)


def test_where_no_gradient_reaches_a_body_there_is_none(tmp_path: Path) -> None:
    text = """main (bool b, float[3] x) => (float[3] y) <float[3] w = {2, 1, 2}, float[3] v = {2, 1, 2}> { z = If(b) <
        then_branch = one () => (float[3] p) { p = Floor(w) }, else_branch = two () => (float[3] q) { q = Ceil(w) }>
        y = Mul(z, v) }"""
    with pytest.raises(OnnxTrainError, match="does not depend on w"):
        trained(tmp_path, text, np.array(True), np.ones(3, np.float32), requires_grad=["w", "v"])
