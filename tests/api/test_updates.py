"""Parameters and states are written over the old ones: proven safe for every order in which nodes may run."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from onnxtrain import artifact_names, onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.api.in_place import unsafe_updates
from onnxtrain.artifacts import LossType, generate_artifacts, seal
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock import optim

CLIP = optim.ClipGradNorm(0.1)
OPTIMIZERS = {
    "sgd": optim.SGD(),
    "sgd_decay": optim.SGD(CLIP, weight_decay=0.1),
    "momentum": optim.SGD(momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
    "adam": optim.Adam(weight_decay=0.1, clip_grad=CLIP),
    "adamw": optim.AdamW(weight_decay=0.1, clip_grad=CLIP),
    "adamw_uncorrected": optim.AdamW(bias_correction=False, weight_decay=0.1),
    "adamw_torch": optim.AdamW(weight_decay=0.1, formula="torch"),
    "lion": optim.Lion(weight_decay=0.1, clip_grad=CLIP),
    "adafactor": optim.Adafactor(weight_decay=0.1, clip_grad=CLIP),
}
STEPS = 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Artifacts with each of the optimizers."""
    return {
        name: generate_artifacts(
            digits.network(16),
            loss=LossType.CrossEntropyLoss,
            optimizer=block,
            artifact_directory=tmp_path_factory.mktemp(name),
        )
        for name, block in OPTIMIZERS.items()
    }


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(index)
    return random.standard_normal((8, 64), np.float32), random.integers(0, 10, 8)


def options(order: ort.ExecutionOrder, level: ort.GraphOptimizationLevel) -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.log_severity_level, made.execution_order, made.graph_optimization_level = 4, order, level
    return made


def in_place(paths: dict[str, Path], order: ort.ExecutionOrder, level: ort.GraphOptimizationLevel) -> dict:
    """Parameters and states after some steps of the api, whose optimizer session has these options."""
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state)
    optimizer = Optimizer(paths["optimizer_model"], module)
    content = paths["optimizer_model"].read_bytes()
    optimizer._session.session = ort.InferenceSession(content, options(order, level), ["CPUExecutionProvider"])
    optimizer._session._binding = optimizer._session.session.io_binding()
    for index in range(STEPS):
        module(*batch(index))
        optimizer.step()
        module.lazy_reset_grad()
    return {n: p.data for n, p in state.parameters} | {n: t.numpy() for n, t in state.optimizer.items()}


def beside(paths: dict[str, Path]) -> dict:
    """The same, with each new value in memory of its own."""
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state)
    optimizer = Optimizer(paths["optimizer_model"], module)
    session = ort.InferenceSession(paths["optimizer_model"], options(*ORDERS[0]), ["CPUExecutionProvider"])
    kept = [name.removesuffix(".out") for name in (o.name for o in session.get_outputs())]
    values = {n: p.data for n, p in state.parameters} | {n: t.numpy() for n, t in state.optimizer.items()}
    for index in range(STEPS):
        module(*batch(index))
        gradients = {artifact_names.gradient(n): p.grad for n, p in state.parameters}
        rate = {artifact_names.LEARNING_RATE: np.array(optimizer.get_learning_rate(), np.float32)}
        made = session.run([artifact_names.updated(n) for n in kept], {**values, **gradients, **rate})
        values = dict(zip(kept, made, strict=True))
        for name, parameter in state.parameters:
            parameter.data = values[name]
        module.lazy_reset_grad()
    return values


_LEVELS = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
ORDERS = [(o, v) for o in (ort.ExecutionOrder.DEFAULT, ort.ExecutionOrder.PRIORITY_BASED) for v in _LEVELS]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers_are_safe_in_every_order(paths: dict[str, dict[str, Path]], name: str) -> None:
    assert unsafe_updates(onnx.load(paths[name]["optimizer_model"])) == []
    expected = beside(paths[name])
    for order in ORDERS:
        found = in_place(paths[name], *order)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{key} {order}")
    assert int(expected["step"]) == STEPS


UNSAFE = {
    "a reader that the new value does not depend on": """
        w_out = Sub (w, scaled)
        other = Mul (w, w)
        s_out = Add (s, other)
    """,
    "two values that read each other": """
        w_out = Sub (w, s)
        s_out = Add (s, w)
    """,
    "a branch that reads": """
        w_out = Sub (w, scaled)
        yes = Constant <value = bool {1}> ()
        s_out = If (yes) <
            then_branch = one () => (float[2, 2] sum) { sum = Add (s, w) },
            else_branch = other () => (float[2, 2] same) { same = Identity (s) }
        >
    """,
    "a last node that reads more than one element at a time": """
        w_out = MatMul (w, w_grad)
        s_out = Add (s, scaled)
    """,
}
SAFE = {
    "element by element": """
        w_out = Sub (w, scaled)
        s_out = Add (s, scaled)
    """,
    "the new value waits for the other reader": """
        other = Mul (w, w)
        s_out = Add (s, other)
        half = Mul (other, learning_rate)
        w_out = Sub (w, half)
    """,
}


def handmade(body: str) -> onnx.ModelProto:
    """An optimizer model of a weight w and a state s with this body."""
    model = parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 20]>
        optimizer (float learning_rate, float[2, 2] w, float[2, 2] w_grad, float[2, 2] s)
            => (float[2, 2] w_out, float[2, 2] s_out)
        {{
            scaled = Mul (w_grad, learning_rate)
            {body}
        }}
        """
    )
    for names in (model.graph.output, *(n.output for n in model.graph.node)):
        for index, one in enumerate(names):
            if isinstance(one, str):
                names[index] = one.replace("_out", ".out")
            else:
                one.name = one.name.replace("_out", ".out")
    return model


@pytest.mark.parametrize("body", UNSAFE.values(), ids=UNSAFE)
def test_unsafe_updates_are_found(body: str) -> None:
    assert set(unsafe_updates(handmade(body))) & {"w", "s"}


@pytest.mark.parametrize("body", SAFE.values(), ids=SAFE)
def test_safe_updates_are_let_pass(body: str) -> None:
    assert unsafe_updates(handmade(body)) == []


class Greedy(optim.Optimizer):
    """Keeps the square of the old parameter, which nothing else waits for."""

    def update(self, slot: optim.Slot) -> None:
        p, g = slot.parameter, slot.gradient
        kept = slot.state("square")
        slot.update(kept, p * p)
        slot.update(p, p - g * self.rate_of(slot))


def test_an_unsafe_optimizer_is_refused(tmp_path: Path) -> None:
    paths = generate_artifacts(
        digits.network(16), loss=LossType.CrossEntropyLoss, optimizer=Greedy(), artifact_directory=tmp_path
    )
    module = Module(paths["training_model"], CheckpointState.load_checkpoint(paths["checkpoint"]))
    with pytest.raises(ArtifactError, match="may read first_weight after it is overwritten"):
        Optimizer(paths["optimizer_model"], module)


def test_an_optimizer_of_ones_own_is_used(tmp_path: Path) -> None:
    class Signs(onnxblock.optim.Optimizer):
        def update(self, slot: optim.Slot) -> None:
            slot.update(slot.parameter, slot.parameter - self.op.Sign(slot.gradient) * self.rate_of(slot))

    paths = generate_artifacts(
        digits.network(16), loss=LossType.CrossEntropyLoss, optimizer=Signs(), artifact_directory=tmp_path
    )
    seal(paths["optimizer_model"])
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state)
    optimizer = Optimizer(paths["optimizer_model"], module)
    before = state.parameters["second_bias"].data
    module(*batch(0))
    optimizer.step()
    parameter = state.parameters["second_bias"]
    assert parameter.grad is not None
    np.testing.assert_array_equal(parameter.data, before - np.sign(parameter.grad) * np.float32(1e-3))


TWICE = """
<ir_version: 10, opset_import: ["" : 20]>
twice (float[batch, 4] x) => (float[batch, 4] y)
{
    first = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
    active = Tanh (first)
    y = BatchNormalization <training_mode = 1> (active, scale, bias, mean, var)
}
"""


@pytest.mark.parametrize("order", [ort.ExecutionOrder.DEFAULT, ort.ExecutionOrder.PRIORITY_BASED])
def test_a_normalization_called_twice_moves_its_statistics_twice(order: ort.ExecutionOrder, tmp_path: Path) -> None:
    """As in torch; the momentum of ONNX is one minus torch's, and its variance is the biased one."""
    model = onnx.parser.parse_model(TWICE)
    for name, value in (("scale", 1.5), ("bias", 0.5), ("mean", 0.0), ("var", 1.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, value, np.float32), name))
    files = generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    options = ort.SessionOptions()
    options.execution_order = order
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state, session_options=options)
    x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32) + 1
    module(x, np.zeros_like(x))
    mean, var, given = np.zeros(4), np.ones(4), x.astype(np.float64)
    for _ in range(2):
        mean, var = 0.9 * mean + 0.1 * given.mean(0), 0.9 * var + 0.1 * given.var(0)
        given = np.tanh((given - given.mean(0)) / np.sqrt(given.var(0) + 1e-5) * 1.5 + 0.5)
    np.testing.assert_allclose(state.parameters["mean"].data, mean, rtol=1e-5)
    np.testing.assert_allclose(state.parameters["var"].data, var, rtol=1e-5)
