"""Training artifacts from an ONNX model: three models and a checkpoint, trained by the ordinary onnxruntime."""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxtrain import onnxblock
from onnxtrain.errors import ArtifactError
from onnxtrain.ir.graphs import values
from onnxtrain.ir.reading import Source
from onnxtrain.onnxblock import Block, TrainingBlock, base, empty_base, save_checkpoint
from onnxtrain.onnxblock import loss as losses
from onnxtrain.onnxblock import optim as optimizers
from onnxtrain.onnxblock.base import Base
from onnxtrain.onnxblock.blocks import PassThrough
from onnxtrain.onnxblock.training import reached_weights
from onnxtrain.portable import sealed, write_atomically


class LossType(enum.IntEnum):
    """Losses that ``generate_artifacts`` knows by name; each is the class of that name in ``onnxblock.loss``."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4
    BCELoss = 5
    SmoothL1Loss = 6
    KLDivLoss = 7
    NLLLoss = 8
    CTCLoss = 9


class OptimType(enum.IntEnum):
    """Optimizers that ``generate_artifacts`` knows by name; each is the class of that name in ``onnxblock.optim``."""

    AdamW = 1
    SGD = 2
    Adam = 3
    Adafactor = 4
    Lion = 5


class _Training(TrainingBlock):
    """A loss, or the model's own first output where there is none, and further outputs."""

    def __init__(self, loss: Block, more: Sequence[str]) -> None:
        super().__init__()
        self.loss, self.more = loss, tuple(more)

    def build(self, *names: str) -> tuple[str, ...]:
        """The loss of the named values, what else the loss block returns, and the further outputs."""
        made = self.loss(*names)
        first = self.value(made[0] if isinstance(made, tuple) else made)
        if not isinstance(self.loss, PassThrough) and not any(v.name == "loss" for v in values(self.base.model.graph)):
            first.name = "loss"
            made = ("loss", *made[1:]) if isinstance(made, tuple) else "loss"
        return (*(made if isinstance(made, tuple) else (made,)), *self.more)


def generate_artifacts(
    model: Source,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Block | None = None,
    optimizer: OptimType | Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    batch_statistics: bool = False,
) -> dict[str, Path]:
    """Write what it takes to train an ONNX model: ``training_model.onnx``, ``eval_model.onnx``,
    ``optimizer_model.onnx`` and ``checkpoint``.

    The models hold standard operators and functions with bodies, of the opset of the model (20 at least), with the
    model's own names; parameters are their inputs. ``onnxtrain.api`` trains them with any onnxruntime from 1.20 on.

    Args:
        model: path of the ``.onnx`` file, or the model; from 2 GB on, a path.
        requires_grad: names or patterns of the initializers to train; None trains all that the loss depends on, but
            for ``frozen_params`` and running statistics.
        frozen_params: names or patterns of initializers not to train.
        loss: a ``LossType`` or a block that makes a loss of ``loss_input_names``; None: the model's first output is
            the loss.
        optimizer: an ``OptimType`` or an optimizer block; None writes no optimizer model.
        artifact_directory: where the files go; the current directory where there is none.
        prefix: how their names begin.
        ort_format: write ``.ort`` twins as well.
        custom_op_library: library of the model's custom operators; the session that trains must load it too.
        additional_output_names: values of the model that training and evaluation give back after the loss.
        nominal_checkpoint: also write ``nominal_checkpoint``: names, types and shapes without content.
        loss_input_names: values that the loss reads; None is all outputs of the model.
        batch_statistics: BatchNormalization takes the batch's statistics and keeps running ones, also where the model
            was exported for inference.

    Returns:
        The files by what they are: ``"training_model"``, ``"eval_model"``, ``"optimizer_model"``, ``"checkpoint"``, …

    Raises:
        ArtifactError: a name is not known (close ones are listed) or in both lists, nothing would be trained, a value
            is of the wrong type, or the loss is no scalar.
        GraphError: the model cannot be read.
        GradientError: the loss cannot be differentiated; the operator is named.
    """
    _refuse_contradictions(requires_grad, frozen_params, additional_output_names)
    more = list(additional_output_names or [])
    block = _Training(_block(loss, LossType, losses, "loss"), more)
    with _library(custom_op_library), base(model) as built:
        block.batch_statistics = batch_statistics
        for name in more:
            built.value(name)
        names = _loss_inputs(built, loss, loss_input_names)
        block(*names)
        _choose(block, built, requires_grad, frozen_params)
        training_model, eval_model = block.to_model_proto()
    trainable, frozen = block.parameters()
    files = {"training_model": sealed(training_model), "eval_model": sealed(eval_model)}
    if optimizer is not None:
        made = _block(optimizer, OptimType, optimizers, "optimizer")
        with empty_base():
            made(trainable)
            files["optimizer_model"] = sealed(made.to_model_proto())  # type: ignore[attr-defined]
    folder = Path(artifact_directory or Path.cwd())
    paths = {kind: folder / f"{prefix}{kind}.onnx" for kind in files}
    for kind, content in files.items():
        write_atomically(paths[kind], content)
        if ort_format:
            from onnxtrain.execute.onnxruntime import to_ort_format

            paths[f"{kind}.ort"] = paths[kind].with_suffix(".ort")
            write_atomically(paths[f"{kind}.ort"], to_ort_format(content, custom_op_library))
    for kind in ("checkpoint", *(["nominal_checkpoint"] if nominal_checkpoint else [])):
        paths[kind] = folder / f"{prefix}{kind}"
        save_checkpoint((trainable, frozen), paths[kind], nominal_checkpoint=kind == "nominal_checkpoint")
    return paths


def seal(path: str | os.PathLike[str]) -> None:
    """Accept the present content of an artifact that was changed on purpose, which ``api`` refuses otherwise."""
    proto = onnx.load(path)
    write_atomically(Path(path), sealed(proto))


def _refuse_contradictions(
    requires_grad: Sequence[str] | None, frozen: Sequence[str] | None, more: Sequence[str] | None
) -> None:
    if both := set(requires_grad or ()) & set(frozen or ()):
        raise ArtifactError(
            f"{sorted(both)[0]} is in requires_grad and in frozen_params", cure="leave it in one of them"
        )
    if requires_grad is not None and not requires_grad:
        raise ArtifactError("requires_grad is empty: nothing would be trained", cure="name what to train, or pass None")
    if more is not None and not isinstance(more, list | tuple):
        raise ArtifactError(
            f"additional_output_names is {type(more).__name__}, not a list", cure="pass a list of names"
        )


def _block(given: Any, kinds: type[enum.IntEnum], classes: Any, what: str) -> Block:
    """The block that a name or a block stands for."""
    if given is None:
        return PassThrough()
    if isinstance(given, kinds):
        return getattr(classes, given.name)()
    if isinstance(given, Block):
        return given
    raise ArtifactError(f"{what} is {type(given).__name__}", cure=f"pass a {kinds.__name__} or an instance of a block")


def _library(path: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if path is None else onnxblock.custom_op_library(Path(path))


def _loss_inputs(built: Base, loss: Any, names: Sequence[str] | None) -> list[str]:
    known = list(built.predictions)
    chosen = list(names) if names is not None else known
    for name in chosen:
        built.value(name)
    if loss is None:
        return chosen[:1]
    if isinstance(loss, LossType) and len(chosen) != 1:
        raise ArtifactError(
            f"the model has the outputs {', '.join(known)}; {loss.name} reads one", cure="name it in loss_input_names"
        )
    return chosen


def _choose(
    block: TrainingBlock, built: Base, requires_grad: Sequence[str] | None, frozen: Sequence[str] | None
) -> None:
    """Tell the block what is trained."""
    if requires_grad is None:
        reached = reached_weights(built, block.outputs[0])
        requires_grad = [n for n in reached if not any(fnmatch.fnmatchcase(n, p) for p in frozen or ())]
    for name in requires_grad:
        block.requires_grad(name)
    for name in frozen or ():
        block.requires_grad(name, False)
