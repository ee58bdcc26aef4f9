"""One exported file against eager PyTorch: what is trained, the losses of the steps, and the trained model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from exporters import ExporterError, first_output
from parametrization import FORMS, Match, match
from specimens import Specimen

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts, weights
from onnxtrain.errors import OnnxTrainError
from onnxtrain.onnxblock import loss, optim

STEPS, RATE, CLOSE = 10, 1e-3, 1e-3


class Differs(Exception):
    """What the artifacts do is not what eager does."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Reference:
    """Eager PyTorch over the same batches: losses of the steps, and outputs after them."""

    def __init__(self, specimen: Specimen, training: bool, vary: bool = True) -> None:
        self.module = specimen.build()
        self.batches = specimen.batches(STEPS, vary)
        self.training, self.text, self.varies = training, specimen.text, vary
        self._known: dict[tuple[str, tuple[str, ...]], tuple[list[float], torch.nn.Module]] = {}
        with torch.no_grad():
            outputs = [first_output(self.module(**given)) for given in self.batches]
        torch.manual_seed(1)
        self.is_classes = outputs[0].dim() in (2, 3) and outputs[0].shape[-1] > 1
        self.targets = [
            torch.randint(0, y.shape[-1], y.shape[:-1]) if self.is_classes else torch.randn_like(y) for y in outputs
        ]

    def artifact_loss(self) -> Any:
        """The loss for ``generate_artifacts``."""
        return loss.CrossEntropyLoss(axis=-1) if self.is_classes else loss.MSELoss()

    def start(self, form: str) -> torch.nn.Module:
        """The module in one of ``FORMS`` as it is before the first step."""
        return FORMS[form](self.module, self.batches[0])

    def trained(self, form: str, frozen: Sequence[str]) -> tuple[list[float], torch.nn.Module]:
        """The losses, and the module after the steps."""
        key = form, tuple(frozen)
        if key not in self._known:
            self._known[key] = self._train(self.start(form), frozen)
        return self._known[key]

    def noise(self, form: str, frozen: Sequence[str]) -> tuple[list[float], float]:
        """How far eager is from itself in double precision, begun from weights that differ by a unit in the last place:
        in the losses up to each step, and in the last outputs."""
        losses, module = self.trained(form, frozen)
        start, random = self.start(form).double(), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in start.parameters():
                p.mul_(1 + 1.2e-7 * torch.randn(p.shape, generator=random, dtype=p.dtype))
        double, exact = self._train(start, frozen)
        far = [abs(a - b) / abs(b) for a, b in zip(losses, double, strict=True)]
        with torch.no_grad():
            given = self.batches[1]
            ours, theirs = first_output(module(**given)), first_output(exact(**_double(given)))
        return [max(far[: i + 1]) for i in range(STEPS)], float((ours - theirs).abs().max() / theirs.abs().max())

    def _train(self, module: torch.nn.Module, frozen: Sequence[str]) -> tuple[list[float], torch.nn.Module]:
        module.train(self.training)
        parameters = dict(module.named_parameters())
        for name in frozen:
            parameters[name].requires_grad_(False)
        chosen = [p for p in parameters.values() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(chosen, RATE, weight_decay=1e-2), []
        is_double = chosen[0].dtype == torch.float64
        for given, target in zip(self.batches, self.targets, strict=True):
            y = first_output(module(**(_double(given) if is_double else given)))
            target = target.to(y.dtype) if target.is_floating_point() else target
            value = F.cross_entropy(y.flatten(0, -2), target.flatten()) if self.is_classes else F.mse_loss(y, target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses, module.eval()


def _double(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in given.items()}


def check(path: Path, references: Callable[[bool], Reference], folder: Path) -> tuple[float, tuple[str, ...]]:
    """Make artifacts of a file, train them, export them: the largest difference of a loss, and what is worth saying.

    Raises:
        Differs: losses, outputs or what is trained are not eager's.
        OnnxTrainError: onnxtrain refuses the model.
    """
    graph = onnx.load(path, load_external_data=False).graph
    reference = _that_it_runs(path, references)
    settings = {
        "loss": reference.artifact_loss(),
        "optimizer": optim.AdamW(formula="torch", eps=1e-8, weight_decay=1e-2),
        "loss_input_names": [graph.output[0].name],
        "artifact_directory": folder,
    }
    files = generate_artifacts(path, **settings)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    form, found = _parametrization(state, reference)
    if found.copies:  # what the exporter made two of is one parameter in the module
        settings["tie"] = [(held, copied) for copied, held in found.copies.items()]
        files = generate_artifacts(path, **settings)
        state = CheckpointState.load_checkpoint(files["checkpoint"])
    trained = {n for n, p in state.parameters.items() if p.requires_grad}
    wanted = {*found.holders}
    wrong = _wrong(trained, wanted, path)
    if trained != wanted:
        files = generate_artifacts(path, requires_grad=sorted(wanted), **settings)
        state = CheckpointState.load_checkpoint(files["checkpoint"])
    losses, module = reference.trained(form, found.absent)
    ours = Module(files["training_model"], state, files["eval_model"])
    far = _train(ours, Optimizer(files["optimizer_model"], ours), reference, losses)
    apart, worst = _exported(ours, reference, module, folder / "trained.onnx"), max(far)
    noisy = worst > CLOSE or apart > 10 * CLOSE
    if noisy:  # rounding may grow from step to step, in eager as well
        _that_it_is_noise(far, apart, *reference.noise(form, found.absent))
    if wrong and found.absent and not wanted - trained:
        raise ExporterError(f"constants are computed of parameters ({', '.join(found.absent)}): {wrong}")
    doubtful = {d.name for d in weights(path) if d.kind == "doubtful"}
    if wrong and not (trained <= wanted <= trained | doubtful):
        raise Differs("weights", wrong)
    asked = f"trained where they are named, as the warning says: {', '.join(sorted(wanted - trained))}"
    fixed = (asked,) if wrong else ()
    fixed += ("the exporter wrote the length as it was",) if reference.text and not reference.varies else ()
    fixed += ("no farther from eager than rounding takes eager from itself",) if noisy else ()
    return worst, (*fixed, *_notes(form, found))


def _that_it_runs(path: Path, references: Callable[[bool], Reference]) -> Reference:
    """The reference whose batches the file computes as eager does: with lengths that vary, or else without.

    Raises:
        ExporterError: onnxruntime does not run the file on either, or computes something else than eager.
    """
    why = _fault(path, references(True))
    if why and references(True).text and not _fault(path, references(False)):
        return references(False)
    if why:
        raise ExporterError(why)
    return references(True)


def _fault(path: Path, reference: Reference) -> str:
    """How the file itself, before anything is made of it, differs from eager; empty where it does not."""
    module = copy.deepcopy(reference.module).train(reference.training)
    try:
        session = ort.InferenceSession(path, _unchanged(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return f"onnxruntime does not load what it writes: {line(error)}"
    names = {i.name for i in session.get_inputs()}
    for given in reference.batches[:2]:
        try:
            found = session.run(None, {n: t.numpy() for n, t in given.items() if n in names})[0]
        except Exception as error:
            sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in given.items())
            return f"what it writes does not run with {sizes}: {line(error)}"
        with torch.no_grad():
            expected = first_output(module(**given)).numpy()
        if found.shape != expected.shape or not np.abs(found - expected).max() <= CLOSE * np.abs(expected).max():
            return "what it writes does not compute what eager does"
    return ""


def _unchanged() -> ort.SessionOptions:
    """onnxruntime without its optimizer, which removes Dropout in training mode, and quiet."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options


def _parametrization(state: CheckpointState, reference: Reference) -> tuple[str, Match]:
    """The form of the module of which the file holds most weights as they are, and what holds what."""
    constants = {n: np.asarray(p.data) for n, p in state.parameters.items()}
    best, found = "", match(constants, reference.start(""))
    for form in FORMS if not reference.training else ():
        if found.absent and len((other := match(constants, reference.start(form))).absent) < len(found.absent):
            best, found = form, other
    return best, found


def _wrong(trained: set[str], wanted: set[str], path: Path) -> str:
    """What is trained by default and is no parameter, and the other way round."""
    said = [f"trains {_described(path, n)}" for n in sorted(trained - wanted)]
    said += [f"leaves out {_described(path, n)}" for n in sorted(wanted - trained)]
    return "; ".join(said)


def _described(path: Path, name: str) -> str:
    """A constant by its name, shape and uses."""
    graph = onnx.load(path, load_external_data=False).graph
    shape = next((list(t.dims) for t in graph.initializer if t.name == name), "")
    uses = sorted({f"{n.op_type}:{list(n.input).index(name)}" for n in graph.node if name in n.input})
    return f"{name} {shape} ({', '.join(uses)})"


def _notes(form: str, found: Match) -> tuple[str, ...]:
    notes = [form] if form else []
    if found.copies:
        notes.append(f"tied again: {', '.join(f'{a} to {b}' for a, b in found.copies.items())}")
    if found.absent:
        notes.append(f"computed of others, frozen here and in eager: {', '.join(found.absent)}")
    return tuple(notes)


def _that_it_is_noise(far: Sequence[float], apart: float, losses: Sequence[float], outputs: float) -> None:
    """Raise where losses or outputs are farther from eager's than twice eager's are from those in double precision."""
    for step, (ours, noise) in enumerate(zip(far, losses, strict=True)):
        if ours > max(CLOSE, 2 * noise):
            raise Differs("losses", f"the loss of step {step + 1} differs by {ours:.1e} from eager's")
    if apart > max(10 * CLOSE, 2 * outputs):
        raise Differs("outputs", f"the outputs of the trained model differ by {apart:.1e} of the largest")


def _train(ours: Module, optimizer: Optimizer, reference: Reference, losses: Sequence[float]) -> list[float]:
    """How far each loss is from eager's."""
    optimizer.set_learning_rate(RATE)
    far = []
    for given, target, expected in zip(reference.batches, reference.targets, losses, strict=True):
        arrays = {name: tensor.numpy() for name, tensor in given.items()}
        more = [n for n in ours.input_names() if n not in arrays]
        if len(more) != 1:
            raise Differs("inputs", f"the inputs are {ours.input_names()}")
        found = float(ours(*({**arrays, more[0]: target.numpy()}[n] for n in ours.input_names())))
        optimizer.step()
        ours.lazy_reset_grad()
        if not np.isfinite(found):
            raise Differs("losses", f"the loss of step {len(far) + 1} is {found}, in eager {expected:.6g}")
        far.append(abs(found - expected) / abs(expected))
    return far


def _exported(ours: Module, reference: Reference, module: torch.nn.Module, path: Path) -> float:
    """The trained model is valid and runs by itself; how far its outputs are from eager's after the same steps."""
    ours.eval()
    ours.export_model_for_inferencing(path)
    onnx.checker.check_model(path)
    if reference.training:
        _take_statistics(ours, module)
    given = reference.batches[1]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    found = session.run(None, {n: t.numpy() for n, t in given.items() if n in names})[0]
    with torch.no_grad():
        expected = first_output(module(**given)).numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _take_statistics(ours: Module, module: torch.nn.Module) -> None:
    """Running statistics of ours: ONNX keeps the biased variance, torch the other."""
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.from_numpy(np.array(ours.state.parameters[f"inner.{name}"].data)))


def line(error: BaseException | str) -> str:
    """What an error says in one line; the exporters say what failed first somewhere in the middle."""
    text = str(error)
    if isinstance(error, BaseException):
        while error.__cause__ is not None and not isinstance(error, OnnxTrainError):
            error = error.__cause__
        text = f"{type(error).__name__}: {error}"
    lines = [re.sub(r"0x[0-9a-f]+", "…", part.strip()) for part in text.splitlines() if part.strip()]
    return (lines[0] if lines else "")[:240]
