"""Each loss and its gradient against the torch function of the same name, in float64 where onnxruntime has kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import onnxblock
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock import loss as losses

RANDOM = np.random.default_rng(0)


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, *names: Any) -> Any:
        return self.loss(*names)


def weights_model(*arrays: np.ndarray) -> onnx.ModelProto:
    """A model whose outputs y0, y1, … are its weights w0, w1, …"""
    nodes = [onnx.helper.make_node("Identity", [f"w{i}"], [f"y{i}"]) for i in range(len(arrays))]
    kinds = [onnx.helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    outputs = [
        onnx.helper.make_tensor_value_info(f"y{i}", k, a.shape)
        for i, (k, a) in enumerate(zip(kinds, arrays, strict=True))
    ]
    tensors = [onnx.numpy_helper.from_array(a, f"w{i}") for i, a in enumerate(arrays)]
    graph = onnx.helper.make_graph(nodes, "weights", [], outputs, tensors)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def run(
    loss: onnxblock.Block, arrays: list[np.ndarray], targets: dict[str, np.ndarray], *names: Any
) -> list[np.ndarray]:
    """The loss and the gradient of each array."""
    with onnxblock.base(weights_model(*arrays)):
        block = Training(loss)
        block.requires_grad("w*")
        block(*(names or ["y0"]))
        model, _ = block.to_model_proto()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds: dict[str, Any] = {f"w{i}": a for i, a in enumerate(arrays)} | targets
    feeds |= {f"w{i}_grad.accumulation.buffer": np.zeros_like(a) for i, a in enumerate(arrays)}
    feeds["lazy_reset_grad"] = np.array(True)
    known = {i.name for i in session.get_inputs()}
    return session.run(
        [session.get_outputs()[0].name, *(f"w{i}_grad.accumulation.out" for i in range(len(arrays)))],
        {n: v for n, v in feeds.items() if n in known},
    )


def agree(made: list[np.ndarray], expected: torch.Tensor, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(expected, x)
    np.testing.assert_allclose(made[0], expected.detach().numpy(), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(made[1], gradient.numpy(), rtol=1e-5, atol=1e-7)


def _pair(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    return RANDOM.standard_normal(shape, np.float32), RANDOM.standard_normal(shape, np.float32)


WEIGHT = RANDOM.uniform(0.5, 2, 3).astype(np.float32)
POSITIVE = RANDOM.uniform(0.5, 2, 3).astype(np.float32)
ELEMENTWISE = {
    "mse": (lambda r: losses.MSELoss(r), lambda x, y, r: F.mse_loss(x, y, reduction=r), "real"),
    "l1": (lambda r: losses.L1Loss(r), lambda x, y, r: F.l1_loss(x, y, reduction=r), "real"),
    "smooth_l1": (lambda r: losses.SmoothL1Loss(r), lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r), "real"),
    "smooth_l1_beta": (
        lambda r: losses.SmoothL1Loss(r, beta=0.3),
        lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r, beta=0.3),
        "real",
    ),
    "bce_with_logits": (
        lambda r: losses.BCEWithLogitsLoss(reduction=r),
        lambda x, y, r: F.binary_cross_entropy_with_logits(x, y, reduction=r),
        "share",
    ),
    "bce_with_logits_weighted": (
        lambda r: losses.BCEWithLogitsLoss(WEIGHT, r, POSITIVE),
        lambda x, y, r: F.binary_cross_entropy_with_logits(
            x, y, torch.from_numpy(WEIGHT), reduction=r, pos_weight=torch.from_numpy(POSITIVE)
        ),
        "share",
    ),
    "bce": (
        lambda r: losses.BCELoss(WEIGHT, r),
        lambda x, y, r: F.binary_cross_entropy(x, y, torch.from_numpy(WEIGHT), reduction=r),
        "shares",
    ),
    "kl_div": (lambda r: losses.KLDivLoss(r), lambda x, y, r: F.kl_div(x, y, reduction=r), "share"),
    "kl_div_log": (
        lambda r: losses.KLDivLoss(r, log_target=True),
        lambda x, y, r: F.kl_div(x, y, reduction=r, log_target=True),
        "real",
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name: str, reduction: str) -> None:
    ours, its, domain = ELEMENTWISE[name]
    if reduction == "batchmean" and not name.startswith("kl"):
        pytest.skip("torch has it for kl_div alone")
    x, y = _pair(5, 3)
    if domain != "real":
        y = np.abs(y) % 1
        y[0, 0] = 0.0
    if domain == "shares":
        x = np.abs(x) % 0.9 + 0.05
    leaf = torch.from_numpy(x).requires_grad_()
    agree(run(ours(reduction), [x], {"target": y}), its(leaf, torch.from_numpy(y), reduction), leaf)


def test_logits_that_overflow_an_exponential_have_a_finite_loss() -> None:
    x, y = np.array([[1000.0, -1000.0, 30.0]], np.float32), np.array([[0.0, 1.0, 1.0]], np.float32)
    leaf = torch.from_numpy(x).requires_grad_()
    expected = F.binary_cross_entropy_with_logits(leaf, torch.from_numpy(y))
    agree(run(losses.BCEWithLogitsLoss(), [x], {"target": y}), expected, leaf)


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignore", [None, -100, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(
    shape: tuple[int, ...], reduction: str, smoothing: float, ignore: int | None, weighted: bool
) -> None:
    x = RANDOM.standard_normal(shape, np.float32)
    labels = RANDOM.integers(0, 4, (shape[0], *shape[2:]))
    if ignore is not None:
        labels.reshape(-1)[::3] = ignore
    weight = RANDOM.uniform(0.5, 2, 4).astype(np.float32) if weighted else None
    leaf = torch.from_numpy(x).requires_grad_()
    given: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    expected = F.cross_entropy(
        leaf,
        torch.from_numpy(labels),
        None if weight is None else torch.from_numpy(weight),
        reduction=reduction,
        label_smoothing=smoothing,
        **given,
    )
    ours = losses.CrossEntropyLoss(weight, reduction, ignore, label_smoothing=smoothing)
    agree(run(ours, [x], {"labels": labels}), expected, leaf)
    if not smoothing:
        log_prob = torch.log_softmax(leaf, 1).detach().numpy()
        made = run(losses.NLLLoss(weight, reduction, ignore), [log_prob], {"labels": labels})
        np.testing.assert_allclose(made[0], expected.item(), rtol=2e-6)


def test_classes_may_be_the_last_axis() -> None:
    x, labels = RANDOM.standard_normal((2, 5, 7), np.float32), RANDOM.integers(0, 7, (2, 5))
    leaf = torch.from_numpy(x).requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, 1), torch.from_numpy(labels).flatten())
    agree(run(losses.CrossEntropyLoss(axis=-1), [x], {"labels": labels}), expected, leaf)


@pytest.mark.parametrize("label", [4, 100, -1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_outside_of_the_classes_is_an_error(label: int, smoothing: float) -> None:
    x = RANDOM.standard_normal((3, 4), np.float32)
    loss = losses.CrossEntropyLoss(ignore_index=-100, label_smoothing=smoothing)
    with pytest.raises(Exception, match=r"[Oo]ut of range|out of data bounds"):
        run(loss, [x], {"labels": np.array([0, label, 1])})


def test_log_probabilities_come_back_where_they_are_asked_for() -> None:
    x = RANDOM.standard_normal((3, 4), np.float32)
    with onnxblock.base(weights_model(x)) as built:
        loss, log_prob = losses.CrossEntropyLoss(get_logprob=True)("y0")
        assert built.value(loss).dtype == built.value(log_prob).dtype
        assert [str(d) for d in built.value(log_prob).shape] == ["3", "4"]


def test_losses_are_weighted_and_summed() -> None:
    x, y = _pair(4, 3)
    labels, target = RANDOM.integers(0, 3, 4), RANDOM.standard_normal((4, 3), np.float32)
    loss = losses.WeightedLoss([losses.CrossEntropyLoss(), losses.MSELoss()], [0.3, 2.0])
    made = run(loss, [x, y], {"labels": labels, "target": target}, ("y0", "labels"), ("y1", "target"))
    leaves = [torch.from_numpy(a).requires_grad_() for a in (x, y)]
    expected = 0.3 * F.cross_entropy(leaves[0], torch.from_numpy(labels))
    expected = expected + 2.0 * F.mse_loss(leaves[1], torch.from_numpy(target))
    np.testing.assert_allclose(made[0], expected.item(), rtol=1e-6)
    for ours, its in zip(made[1:], torch.autograd.grad(expected, leaves), strict=True):
        np.testing.assert_allclose(ours, its.numpy(), rtol=1e-5, atol=1e-7)


def test_a_reduction_that_is_not_known_is_refused() -> None:
    with pytest.raises(ArtifactError, match="choose mean, sum, none"):
        losses.MSELoss("median")


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    x, y = _pair(4, 3)
    with pytest.raises(ArtifactError, match="not that of a scalar"):
        run(losses.MSELoss("none"), [x], {"target": y})


def test_blocks_outside_of_a_model_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"with onnxblock\.base"):
        losses.MSELoss()("x")
    with pytest.raises(ArtifactError, match="is not built"):
        Training(losses.MSELoss()).to_model_proto()
