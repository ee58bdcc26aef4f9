"""A training run that can be killed at any moment and goes on, to the bit, from its last checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain import api
from onnxtrain.cli.data import DataSet
from onnxtrain.errors import CheckpointError, DataError, OptionError, close_to
from onnxtrain.files import remove_partials
from onnxtrain.number_ranges import check_number

RESERVED = "onnxtrain.train."  # how the names of properties begin that a run keeps in its checkpoint
_SETTINGS = f"{RESERVED}settings"


@dataclasses.dataclass(frozen=True)
class Files:
    """The artifacts in a folder, and the checkpoint that a run writes beside them."""

    folder: Path
    prefix: str = ""

    def model(self, kind: str) -> Path:
        """The training, eval or optimizer model."""
        return self.folder / f"{self.prefix}{kind}_model.onnx"

    @property
    def checkpoint(self) -> Path:
        """What a run starts from."""
        return self.folder / f"{self.prefix}checkpoint"

    @property
    def trained(self) -> Path:
        """What a run writes."""
        return self.folder / f"{self.prefix}trained_checkpoint"

    def clean(self) -> None:
        """Remove what a run left that was killed while it wrote its checkpoint."""
        remove_partials(self.trained)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run: the same when it is resumed.

    Args:
        epochs, batch_size, lr, schedule, warmup, seed, valid_share: as given to the command.
        whole_batches: whether rows that do not fill a batch are left out, since the model takes one size alone.
        data: digest of the data.
    """

    epochs: int
    batch_size: int
    lr: float
    schedule: str
    warmup: int
    seed: int
    valid_share: float
    whole_batches: bool
    data: str

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{_option(name)} is {getattr(self, name)}", cure=f"give {least} or more")
        check_number("--lr", self.lr, least=0, error=OptionError)
        if not 0 <= self.valid_share < 1:
            raise OptionError(f"--valid-share is {self.valid_share}", cure="choose another --valid-share, below 1")

    def differences(self, earlier: dict[str, Any]) -> list[str]:
        """Options that differ from an earlier run's; more epochs are none where the rate does not depend on them."""
        mine = dataclasses.asdict(self)
        return [
            name
            for name in mine
            if mine[name] != earlier.get(name) and not (name == "epochs" and self.schedule == "constant")
        ]


@dataclasses.dataclass
class Position:
    """Where a run stands.

    Args:
        epoch: epochs done.
        batch: batches done of this epoch.
        loss: sum of the loss of each row of this epoch so far.
        rows: how many these are.
        learning_rate: of the latest update.
    """

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    rows: int = 0
    learning_rate: float = 0.0

    @classmethod
    def read(cls, properties: api.Properties) -> Position:
        """The position that a checkpoint has; the start where it has none."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{n: properties[RESERVED + n] for n in names if RESERVED + n in properties})  # type: ignore[arg-type]

    def write(self, properties: api.Properties) -> None:
        """Keep the position in a checkpoint."""
        for name, value in dataclasses.asdict(self).items():
            properties[RESERVED + name] = value


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What is reported of an epoch; losses are means over rows, None where nothing is held out."""

    epoch: int
    steps: int
    loss: float
    valid_loss: float | None
    accuracy: float | None
    learning_rate: float


class Run:
    """A run over the artifacts of a folder.

    Args:
        files: where they are.
        settings: what decides its numbers.
        data: what is trained on.
        held_out: what is evaluated after each epoch, if anything.
        device: as for ``api.Module``.
        resume: go on from ``files.trained`` where that exists.
        accuracy: output that has the scores of classes, and input that has the labels.

    Raises:
        OnnxTrainError: files, settings and data do not fit each other.
    """

    def __init__(
        self,
        files: Files,
        settings: Settings,
        data: DataSet,
        held_out: DataSet | None,
        *,
        device: str = "cpu",
        resume: bool = False,
        accuracy: tuple[str, str] | None = None,
    ) -> None:
        self.files, self.settings, self.data, self.held_out = files, settings, data, held_out
        files.clean()
        self.is_resumed = resume and files.trained.exists()
        self.state = _state(files, settings, self.is_resumed)
        self.position = Position.read(self.state.properties)
        evaluation = files.model("eval") if held_out is not None else None
        seed = None if self.is_resumed else settings.seed
        self.module = api.Module(files.model("training"), self.state, evaluation, device, seed=seed)
        self.optimizer = api.Optimizer(files.model("optimizer"), self.module)
        self.steps = data.steps(settings.batch_size, settings.whole_batches)
        self._schedule = _schedule(self.optimizer, settings, self.steps * settings.epochs)
        self._accuracy = _Accuracy(self.module, *accuracy) if accuracy is not None else None

    def train(
        self, save_every: int | None, on_step: Callable[[], None], is_stopped: Callable[[], bool]
    ) -> Iterator[Epoch]:
        """Train to the end; an ``Epoch`` after each, when the checkpoint is already written.

        Args:
            save_every: write a checkpoint each time so many updates were done, besides the end of each epoch.
            on_step: called after each update.
            is_stopped: whether to write a checkpoint and return; asked after each batch.

        Raises:
            DataError: the loss is not finite any more, or a batch does not fit the model.
        """
        while self.position.epoch < self.settings.epochs:
            order = self.data.order(self.settings.seed, self.position.epoch)
            for batch in self._batches(self.data, order, self.position.batch):
                self._step(batch)
                on_step()
                if is_stopped() or (save_every and self.optimizer.updates % save_every == 0):
                    self.save()
                if is_stopped():
                    return
            valid_loss, accuracy = self._evaluate(is_stopped)
            if is_stopped():
                return self.save()
            at = self.position
            mean, rate = at.loss / at.rows, at.learning_rate
            made = Epoch(at.epoch + 1, self.optimizer.updates, mean, valid_loss, accuracy, rate)
            self.position = Position(at.epoch + 1)
            self.save()
            yield made

    def _batches(self, data: DataSet, order: np.ndarray | None = None, start: int = 0) -> Iterator[list[np.ndarray]]:
        return data.batches(self.settings.batch_size, self.settings.whole_batches, order, start)

    def _step(self, batch: list[np.ndarray]) -> None:
        """Train on a batch."""
        outputs, rows = self.module(*batch), len(batch[0])
        loss = float(outputs[0] if isinstance(outputs, tuple) else outputs)
        if not math.isfinite(loss):
            what = f"the loss is {loss} in epoch {self.position.epoch + 1}, batch {self.position.batch + 1}"
            raise DataError(what, cure="lower --lr, or make the artifacts with --clip-norm; look at the data")
        rate = self.optimizer.get_learning_rate()
        self.optimizer.step()
        self.module.lazy_reset_grad()
        self._schedule.step()
        at = self.position
        self.position = Position(at.epoch, at.batch + 1, at.loss + loss * rows, at.rows + rows, rate)

    def _evaluate(self, is_stopped: Callable[[], bool]) -> tuple[float | None, float | None]:
        """Loss and accuracy of what is held out."""
        if self.held_out is None:
            return None, None
        self.module.eval()
        total, rows = 0.0, 0
        for batch in self._batches(self.held_out):
            outputs = self.module(*batch)
            total += float(outputs[0] if isinstance(outputs, tuple) else outputs) * len(batch[0])
            rows += len(batch[0])
            if self._accuracy is not None:
                self._accuracy.add(outputs, dict(zip(self.held_out.arrays, batch, strict=True)))
            if is_stopped():
                break
        self.module.train()
        return total / rows, self._accuracy.take() if self._accuracy is not None else None

    def save(self) -> None:
        """Write the checkpoint with all that the run needs to go on."""
        self.position.write(self.state.properties)
        self.state.properties[_SETTINGS] = json.dumps(dataclasses.asdict(self.settings))
        api.CheckpointState.save_checkpoint(self.state, self.files.trained, include_optimizer_state=True)


class _Accuracy:
    """The share of labels whose class has the highest score; labels that are no class do not count."""

    def __init__(self, module: api.Module, output: str, labels: str) -> None:
        outputs, inputs = module.eval().output_names(), module.input_names()
        module.train()
        if output not in outputs:
            what = f"the evaluation model has no output {output}{close_to(output, outputs)}"
            raise OptionError(what, cure=f"make the artifacts with --output {output}")
        if labels not in inputs:
            what = f"the model has no input {labels}{close_to(labels, inputs)}"
            raise OptionError(what, cure="name the input that has the labels in --labels")
        self._output, self._labels = outputs.index(output), labels
        self._right = self._count = 0

    def add(self, outputs: Any, batch: dict[str, np.ndarray]) -> None:
        """Count a batch."""
        scores, labels = np.asarray(outputs[self._output]), batch[self._labels]
        axes = [i for i in range(scores.ndim) if scores.shape[:i] + scores.shape[i + 1 :] == labels.shape]
        if not axes:
            what = f"scores of shape {list(scores.shape)} have no axis of classes besides labels {list(labels.shape)}"
            raise DataError(what, cure="name the output that has the scores of all classes in --accuracy")
        axis = 1 if 1 in axes else axes[-1]
        counts = (labels >= 0) & (labels < scores.shape[axis])
        self._right += int(((scores.argmax(axis) == labels) & counts).sum())
        self._count += int(counts.sum())

    def take(self) -> float | None:
        """The share so far, and begin anew."""
        share = self._right / self._count if self._count else None
        self._right = self._count = 0
        return share


def _state(files: Files, settings: Settings, is_resumed: bool) -> api.CheckpointState:
    """The state to begin with: that of the run, or the weights of the artifacts without what an optimizer left."""
    state = api.CheckpointState.load_checkpoint(files.trained if is_resumed else files.checkpoint)
    if not is_resumed:
        state.optimizer.clear()
        state.settings.clear()
        for name in [n for n, _ in state.properties if n.startswith(RESERVED)]:
            del state.properties[name]
        return state
    if _SETTINGS not in state.properties:
        raise CheckpointError(f"{files.trained} is of no run of onnxtrain train", cure="train without --resume")
    earlier = json.loads(str(state.properties[_SETTINGS]))
    if names := settings.differences(earlier):
        name = names[0]
        what = f"{_option(name)} was {earlier.get(name)} in the run to be resumed, it is {getattr(settings, name)}"
        what = "the data are not those of the run to be resumed" if name == "data" else what
        raise OptionError(what, cure="give the same, or train without --resume")
    return state


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _schedule(optimizer: api.Optimizer, settings: Settings, total: int) -> api.LRScheduler:
    """The schedule of that name over all steps."""
    rate, warmup = settings.lr, settings.warmup
    if settings.schedule == "constant":
        return api.ConstantLRScheduler(optimizer, rate, warmup)
    if settings.schedule == "one_cycle":
        return api.OneCycleLRScheduler(optimizer, rate, total, **({"pct_start": warmup / total} if warmup else {}))
    kinds = {
        "linear": api.LinearLRScheduler,
        "cosine": api.CosineLRScheduler,
        "polynomial": api.PolynomialLRScheduler,
    }
    return kinds[settings.schedule](optimizer, warmup, total, rate)
