"""What must be true of the artifacts of a file, whatever the file is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from fuzz.onnx_files import File
from fuzz.outcomes import FAULT, PASS, REFUSED, THROWN, Fault, Outcome
from fuzz.units import Evaluator, Rejected, close
from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import OnnxTrainError

_LOSSES = {"mse": LossType.MSELoss, "cross_entropy": LossType.CrossEntropyLoss, "bce": LossType.BCEWithLogitsLoss}
_STEPS = (1e-5, 1e-6)  # of differences in doubles
_COARSE = (2e-2, 1e-2)  # where a node is computed in float32
_OURS = "report this model"  # a cure that says that the fault is ours


class Smooth(onnxblock.Block):
    """A smooth loss of several values: the mean of ``sin(y) + y² / 4`` of each, added."""

    def build(self, *names: str) -> str:
        """The name of the loss."""
        op, made = self.op, None
        with op.arithmetic():
            for name in names:
                y = self.value(name)
                part = op.ReduceMean(op.Sin(y) + y * y * 0.25, keepdims=0)
                made = part if made is None else made + part
        return str(made.name)


def loss_of(file: File, values: dict[str, Any]) -> float:
    """The loss in doubles, by formulas of numpy."""
    ys = [np.asarray(values[n], np.float64) for n in file.outputs]
    y, t = ys[0], file.target
    if file.loss == "own":
        return float(y)
    if file.loss == "smooth":
        return float(sum(np.mean(np.sin(v) + v * v / 4) for v in ys))
    assert t is not None
    if file.loss == "mse":
        return float(np.mean((y - t) ** 2))
    if file.loss == "bce":
        return float(np.mean(np.logaddexp(0, -y) + y - y * t))
    scores = y - y.max(1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return float(-np.mean(np.take_along_axis(logs, t[:, None], 1)))


def check(file: File) -> Outcome:
    """Artifacts, a step, and an exported model of a file."""
    with tempfile.TemporaryDirectory() as folder, _quiet():
        try:
            return _check(file, Path(folder))
        except Rejected as error:
            return Outcome(THROWN, _plain(error, file))
        except Fault as fault:
            return Outcome(FAULT, fault.reason, fault.detail)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _check(file: File, folder: Path) -> Outcome:
    path = _saved(file, folder)
    truth = Evaluator(file.model, file.feeds)
    _same_as_onnxruntime(file, path, truth)
    moved = _Differences(file, truth)
    rng = np.random.default_rng([file.seed, 20])
    slopes = {n: moved.along(n, rng) for n in file.weights}
    wanted = [n for n, s in slopes.items() if s.is_smooth and abs(s.value) > 1e-3 * max(1.0, abs(moved.base))]
    everything = not wanted or rng.random() < 0.3
    asked = None if everything else wanted
    made = _artifacts(file, path, folder, asked)
    if isinstance(made, Outcome):
        return _expected(made, wanted)
    try:
        return _trained(file, made, folder, moved, slopes, rng, truth)
    except Fault as fault:
        by_rank = "BackendError" in fault.reason or fault.reason == "an output is another"
        if by_rank and any(_squeezes_by_size(n) for n in _nodes(file.model)):
            return Outcome(THROWN, "the rank of a Squeeze depends on sizes")
        raise


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of bodies and functions too."""
    waiting = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [n for a in node.attribute if a.HasField("g") for n in a.g.node]


def _squeezes_by_size(node: onnx.NodeProto) -> bool:
    """Whether it drops the axes that have size 1 when it runs: onnxtrain takes those of unknown sizes for longer."""
    return node.op_type == "Squeeze" and len(node.input) == 1 and not node.attribute


def _saved(file: File, folder: Path) -> Path:
    try:
        path = file.save(folder)
        onnx.checker.check_model(str(path))
        return path
    except Exception as error:  # of the checker, or protobuf's
        raise Rejected(f"onnx.checker: {_first(error)}") from error


def _same_as_onnxruntime(file: File, path: Path, truth: Evaluator) -> None:
    try:
        session = _session(path)
        made = session.run(None, file.feeds)
        _session(_with_constants(path, file))
    except Exception as error:  # of onnxruntime
        raise Rejected(f"onnxruntime: {_first(error)}") from error
    names = [o.name for o in session.get_outputs()]
    for name, value in zip(names, made, strict=True):
        if not close(truth.values[name], value) or not close(truth.exact[name], value):
            raise Rejected("onnxruntime computes something else with and without its optimizers or precision")


def _with_constants(path: Path, file: File) -> bytes:
    """The model whose initializers are no inputs, but for weights: so are those that are not trained in ours."""
    model = onnx.load(path)
    held = {i.name for i in model.graph.initializer} - {*file.weights}
    inputs = [i for i in model.graph.input if i.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model.SerializeToString()


def _session(path: Path | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(path if isinstance(path, bytes) else str(path), options, ["CPUExecutionProvider"])


@dataclasses.dataclass
class Slope:
    """The derivative of the loss along a direction of one weight, and whether the loss is smooth there."""

    direction: np.ndarray
    value: float
    is_smooth: bool


class _Differences:
    """Differences of the loss of the original model."""

    def __init__(self, file: File, truth: Evaluator) -> None:
        self.file, self.truth = file, truth
        self.steps = _COARSE if truth.coarse else _STEPS
        self.base = self._loss({})

    def _loss(self, changed: dict[str, np.ndarray]) -> float:
        return loss_of(self.file, self.truth.run(changed))

    def along(self, name: str, rng: np.random.Generator) -> Slope:
        """The slope along a random direction; smooth where differences of both sides and of two steps agree."""
        at = np.asarray(self.truth.exact[name], np.float64)
        v = rng.uniform(0.5, 1, at.shape) * rng.choice([-1.0, 1.0], at.shape)
        try:
            found = [self._sides(name, at, v, step) for step in self.steps]
        except Exception:  # a node does not compute there
            return Slope(v, 0.0, False)
        (up, down), (nearer_up, nearer_down) = found
        means = [(up + down) / 2, (nearer_up + nearer_down) / 2]
        noise = 2e-3 if self.truth.coarse else 1e-4
        scale = abs(means[1]) + 1e-2 * max(1.0, abs(self.base))
        bends = abs(nearer_up - nearer_down) > (0.7 * abs(up - down) + noise * scale)
        steady = abs(means[0] - means[1]) <= (2e-2 if self.truth.coarse else 1e-3) * scale
        kinked = not self.truth.coarse and abs(nearer_up - nearer_down) > 1e-2 * scale
        return Slope(v, means[1], bool(np.isfinite(means).all() and steady and not bends and not kinked))

    def agrees_near(self, name: str, slope: Slope, found: float, allowed: float) -> bool:
        """Whether the loss has a kink nearby that larger steps go over: it bends there, or has this slope up to it."""
        at = np.asarray(self.truth.exact[name], np.float64)
        up, down = self._sides(name, at, slope.direction, self.steps[-1] / 10)
        return abs(up - down) > 2 * allowed or abs(found - (up + down) / 2) <= allowed

    def _sides(self, name: str, at: np.ndarray, v: np.ndarray, step: float) -> tuple[float, float]:
        above, below = self._loss({name: at + step * v}), self._loss({name: at - step * v})
        return (above - self.base) / step, (self.base - below) / step


def _artifacts(file: File, path: Path, folder: Path, asked: list[str] | None) -> dict[str, Path] | Outcome:
    loss = Smooth() if file.loss == "smooth" else _LOSSES.get(file.loss)
    try:
        return generate_artifacts(
            path,
            requires_grad=asked,
            loss=loss,
            loss_input_names=file.outputs,
            optimizer=onnxblock.optim.AdamW(),
            artifact_directory=folder / "run",
            additional_output_names=_more(file),
        )
    except OnnxTrainError as error:
        foreign = error.__cause__ is not None and not isinstance(error.__cause__, OnnxTrainError)
        if foreign or (error.cure and _OURS in error.cure):
            raise Fault(f"artifacts: {_plain(error, file)}", str(error)) from error
        return Outcome(REFUSED, _plain(error, file), str(error))
    except Exception as error:
        raise Fault(f"artifacts: {type(error).__name__}: {_where(error)}", traceback.format_exc()) from error


def _more(file: File) -> list[str]:
    """Outputs besides the loss."""
    return [] if file.loss == "own" else file.outputs


def _expected(refusal: Outcome, wanted: list[str]) -> Outcome:
    """Where nothing has a slope, that nothing would be trained is what must be said."""
    if not wanted and ("nothing would be trained" in refusal.detail or "requires_grad is empty" in refusal.detail):
        return Outcome(THROWN, "nothing can be trained")
    return refusal


def _trained(
    file: File,
    paths: dict[str, Path],
    folder: Path,
    moved: _Differences,
    slopes: dict[str, Slope],
    rng: np.random.Generator,
    truth: Evaluator,
) -> Outcome:
    batch_names = list(file.feeds)
    try:
        state = CheckpointState.load_checkpoint(paths["checkpoint"])
        module = Module(paths["training_model"], state, paths["eval_model"])
        optimizer = Optimizer(paths["optimizer_model"], module)
        batch = [file.feeds.get(n, file.target) for n in module.input_names()]
        made = np.atleast_1d(module(*batch)) if file.loss == "own" else module(*batch)
    except Exception as error:
        raise Fault(f"first step: {type(error).__name__}: {_plain(error, file)}", traceback.format_exc()) from error
    loss, outputs = float(made[0]), dict(zip(_more(file), made[1:], strict=True))
    if {*batch_names} - {*module.input_names()}:
        raise Fault("inputs are missing", str(module.input_names()))
    _same_numbers(file, loss, outputs, moved.base, truth)
    gradients = {n: p.grad for n, p in state.parameters if p.requires_grad}
    compared = _same_gradients(gradients, slopes, truth, moved)
    try:
        optimizer.step()
        module.lazy_reset_grad()
        again = module.eval()(*batch)
        evaluated = dict(zip(["", *file.outputs], (again, again) if file.loss == "own" else again, strict=True))
        module.export_model_for_inferencing(folder / "trained.onnx", file.outputs)
        onnx.checker.check_model(str(folder / "trained.onnx"))
        session = _session(folder / "trained.onnx")
        read = [i.name for i in session.get_inputs()]
        exported = session.run(file.outputs, {n: file.feeds[n] for n in read})
    except Exception as error:
        raise Fault(f"second step: {type(error).__name__}: {_plain(error, file)}", traceback.format_exc()) from error
    weights = {n: p.data for n, p in state.parameters if p.requires_grad}
    _same_exports(file, evaluated, exported, weights, truth)
    return Outcome(PASS, compared=compared, gradients=len(gradients))


def _same_numbers(file: File, loss: float, outputs: dict[str, Any], base: float, truth: Evaluator) -> None:
    for name, value in outputs.items():
        if not close(truth.values[name], value, 2e-3):
            raise Fault("an output is another", f"{name}: {value} is not {truth.values[name]}")
    if not abs(loss - base) <= 1e-3 * max(1.0, abs(base)):
        raise Fault(f"the loss is another: {file.loss}", f"{loss} is not {base}")


def _same_gradients(gradients: dict[str, Any], slopes: dict[str, Slope], truth: Evaluator, moved: _Differences) -> int:
    """Compare gradients with slopes; the number compared."""
    compared = 0
    for name, gradient in gradients.items():
        if gradient is None or not np.isfinite(gradient).all():
            if name in slopes and not slopes[name].is_smooth:
                continue
            raise Fault("a gradient is no number", f"{name}: {gradient}")
        slope = slopes.get(name)
        if slope is None or not slope.is_smooth:
            continue
        compared += 1
        ours = float((np.asarray(gradient, np.float64) * slope.direction).sum())
        length = float(np.linalg.norm(gradient) * np.linalg.norm(slope.direction))
        allowed = (1e-2 if truth.coarse else 2e-3) * (length + abs(slope.value) + 0.02 * max(1.0, abs(moved.base)))
        if not abs(ours - slope.value) <= allowed and not moved.agrees_near(name, slope, ours, allowed):
            raise Fault("a gradient is wrong", f"{name}: along {slope.direction.tolist()} {ours}, not {slope.value}")
    return compared


def _same_exports(
    file: File, evaluated: dict[str, Any], exported: list[Any], weights: dict[str, np.ndarray], truth: Evaluator
) -> None:
    for name, value in zip(file.outputs, exported, strict=True):
        if not np.isfinite(evaluated[name]).all():
            if not np.isfinite(truth.run({n: np.asarray(a, np.float64) for n, a in weights.items()})[name]).all():
                return  # the step has left where the model is defined
            raise Fault("an output is no number after a step", name)
        if not close(evaluated[name], value, 2e-3):
            raise Fault("the exported model computes something else", f"{name}: {value} is not {evaluated[name]}")
    if any(n.op_type in ("Dropout", "BatchNormalization") for n in file.model.graph.node):
        return
    values = truth.run({n: np.asarray(a, np.float64) for n, a in weights.items()})
    for name, value in zip(file.outputs, exported, strict=True):
        if not _near(values[name], value):
            raise Fault("the exported model is not the original with new weights", f"{name}: {value}, {values[name]}")


def _near(a: Any, b: Any) -> bool:
    """Whether most numbers are the same: a comparison may have gone the other way by a rounding."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a.shape == b.shape and float(np.mean(np.isclose(a, b, 2e-2, 2e-2))) > 0.5


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _plain(error: BaseException, file: File) -> str:
    """The message without names of the file."""
    text = error.what if isinstance(error, OnnxTrainError) else _first(error)
    names = {*file.feeds, *file.weights, *file.outputs} | {o for n in file.model.graph.node for o in n.output}
    for name in sorted((n for n in names if len(n) > 2), key=len, reverse=True):
        text = text.replace(name, "…")
    text = re.sub(r"/\S*/(?=\w+\.onnx)", "", text)
    return re.sub(r"\d+", "#", text)[:160]


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_first(error)[:80]} ({Path(last.filename).name}:{last.name})"
