"""Each optimizer against torch's, and every one written over its inputs in any order of execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from onnxtrain import onnxblock
from onnxtrain.api.in_place import unsafe_updates
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock import optim

SHAPES = {"matrix": (5, 4), "bias": (4,), "kernel": (3, 2, 2, 2)}
RATE, STEPS = 1e-2, 12


class HuggingFaceAdamW(torch.optim.Optimizer):
    """AdamW as transformers had it until version 4.x and as onnxruntime-training has it."""

    def __init__(self, parameters: Any, weight_decay: float) -> None:
        super().__init__(parameters, {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            s["t"] = s.get("t", 0) + 1
            s["m"] = s.get("m", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
            s["v"] = s.get("v", torch.zeros_like(p)) * 0.999 + p.grad**2 * 0.001
            size = RATE * (1 - 0.999 ** s["t"]) ** 0.5 / (1 - 0.9 ** s["t"])
            p -= size * s["m"] / (s["v"].sqrt() + 1e-6)
            p -= RATE * self.param_groups[0]["weight_decay"] * p


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            update = (0.9 * m + 0.1 * p.grad).sign()
            p.mul_(1 - RATE * 0.1).sub_(RATE * update)
            m.mul_(0.99).add_(0.01 * p.grad)


CASES: dict[str, tuple[Callable[[], optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: optim.SGD(), lambda p: torch.optim.SGD(p, RATE)),
    "sgd_momentum": (
        lambda: optim.SGD(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, RATE, momentum=0.9, weight_decay=0.1),
    ),
    "sgd_dampening": (
        lambda: optim.SGD(momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, RATE, momentum=0.9, dampening=0.5),
    ),
    "sgd_nesterov": (
        lambda: optim.SGD(momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, RATE, momentum=0.9, nesterov=True),
    ),
    "adam": (lambda: optim.Adam(weight_decay=0.1), lambda p: torch.optim.Adam(p, RATE, weight_decay=0.1)),
    "adamw_torch": (
        lambda: optim.AdamW(eps=1e-8, weight_decay=0.1, formula="torch"),
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
    ),
    "adamw_hf": (lambda: optim.AdamW(weight_decay=0.1), lambda p: HuggingFaceAdamW(p, 0.1)),
    "adamw_hf_plain": (lambda: optim.AdamW(), lambda p: HuggingFaceAdamW(p, 0.0)),
    "adafactor": (lambda: optim.Adafactor(), lambda p: torch.optim.Adafactor(p, RATE)),
    "adafactor_decay": (
        lambda: optim.Adafactor(weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, RATE, weight_decay=0.1),
    ),
    "lion": (lambda: optim.Lion(weight_decay=0.1), lambda p: Lion(p, {})),
}


def build(block: optim.Optimizer) -> Any:
    tensors = [ir.tensor(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
    with onnxblock.empty_base():
        block(tensors)
        return block.to_model_proto()


def session_of(model: Any, order: Any = ort.ExecutionOrder.DEFAULT) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.execution_order = order
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def train(session: ort.InferenceSession, start: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]) -> Any:
    """Parameters after all steps, each written over the last."""
    state = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs() if "_grad" not in i.name}
    state |= {name: array.copy() for name, array in start.items()}
    state |= {"step": np.zeros((), np.int64), "learning_rate": np.array(RATE, np.float32)}
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in state.items()}
    for given in gradients:
        binding = session.io_binding()
        inputs = values | {f"{n}_grad": ort.OrtValue.ortvalue_from_numpy(g) for n, g in given.items()}
        for name, value in inputs.items():
            if name in {i.name for i in session.get_inputs()}:
                binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_ortvalue_output(output.name, values[output.name.removesuffix(".out")])
        session.run_with_iobinding(binding)
    return {name: state[name] for name in start}


def _data() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    random = np.random.default_rng(0)
    start = {n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    return start, [{n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()} for _ in range(STEPS)]


@pytest.mark.parametrize("order", ["DEFAULT", "PRIORITY_BASED"])
@pytest.mark.parametrize("name", CASES)
def test_updates_in_place_are_those_of_torch(name: str, order: str) -> None:
    ours, its = CASES[name]
    start, gradients = _data()
    made = train(session_of(build(ours()), getattr(ort.ExecutionOrder, order)), start, gradients)
    parameters = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in start.items()}
    optimizer = its(list(parameters.values()))
    for given in gradients:
        for n, p in parameters.items():
            p.grad = torch.from_numpy(given[n])
        optimizer.step()
    for n, p in parameters.items():
        np.testing.assert_allclose(made[n], p.detach().numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_no_optimizer_reads_what_it_has_overwritten(name: str) -> None:
    assert unsafe_updates(build(CASES[name][0]())) == []


def test_a_value_read_after_it_may_be_overwritten_is_found() -> None:
    class Careless(optim.Optimizer):
        def update(self, slot: optim.Slot) -> None:
            average = slot.state("exp_avg")
            slot.update(average, average * 0.9 + slot.gradient)
            slot.update(slot.parameter, slot.parameter - average * self.rate_of(slot))  # the old average

    assert unsafe_updates(build(Careless())) == [f"{n}.exp_avg" for n in SHAPES]


def test_gradients_are_clipped_by_their_common_norm() -> None:
    start, gradients = _data()
    made = train(session_of(build(optim.SGD(optim.ClipGradNorm(0.5)))), start, gradients)
    parameters = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in start.items()}
    optimizer = torch.optim.SGD(parameters.values(), RATE)
    for given in gradients:
        for n, p in parameters.items():
            p.grad = torch.from_numpy(given[n].copy())
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
    for n, p in parameters.items():
        np.testing.assert_allclose(made[n], p.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_some_parameters_need_not_decay() -> None:
    start, gradients = _data()
    given = {"eps": 1e-8, "weight_decay": 0.5, "formula": "torch"}
    some = train(session_of(build(optim.AdamW(**given, no_decay=["bias"]))), start, gradients)
    all_ = train(session_of(build(optim.AdamW(**given))), start, gradients)
    none = train(session_of(build(optim.AdamW(eps=1e-8, formula="torch"))), start, gradients)
    assert (some["bias"] == none["bias"]).all() and (some["matrix"] == all_["matrix"]).all()
    assert (some["matrix"] != none["matrix"]).any()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ArtifactError, match="formula='keras'"):
        optim.AdamW(formula="keras")
    with pytest.raises(ArtifactError, match="Nesterov"):
        optim.SGD(nesterov=True)
    with pytest.raises(ArtifactError, match="no parameter"), onnxblock.empty_base():
        optim.SGD()([])
    with pytest.raises(ArtifactError, match="not built"):
        optim.SGD().to_model_proto()


def test_a_checkpoint_can_tell_optimizers_apart() -> None:
    """By name and by every setting, the clipping of gradients among them."""
    made = [
        optim.AdamW(),
        optim.AdamW(eps=1e-8),
        optim.AdamW(clip_grad=optim.ClipGradNorm(1.0)),
        optim.AdamW(clip_grad=optim.ClipGradNorm(2.0)),
        optim.AdamW(no_decay=["*bias"]),
        optim.Adam(eps=1e-6),
    ]
    assert len({block.describe() for block in made}) == len(made)
    assert optim.AdamW().describe() == optim.AdamW().describe()
