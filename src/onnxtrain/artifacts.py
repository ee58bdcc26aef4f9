"""Training artifacts from an ONNX model: three models and a checkpoint, trained by the ordinary onnxruntime."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from onnxtrain import onnxblock
from onnxtrain.checkpoint import encoded
from onnxtrain.errors import ArtifactError, first_line
from onnxtrain.files import read_file, write_atomically, write_set
from onnxtrain.ir.graphs import values
from onnxtrain.ir.reading import Source, decisions
from onnxtrain.ir.weights import Decision, as_text, is_meant
from onnxtrain.number_ranges import check_names
from onnxtrain.onnxblock import Block, TrainingBlock, base, empty_base, ties
from onnxtrain.onnxblock import loss as losses
from onnxtrain.onnxblock import optim as optimizers
from onnxtrain.onnxblock.base import Base
from onnxtrain.onnxblock.blocks import PassThrough
from onnxtrain.onnxblock.saving import checkpoint_of
from onnxtrain.onnxblock.training import reached_weights
from onnxtrain.options import Options
from onnxtrain.ort_format import OptimizationStyle, convert_onnx_models_to_ort
from onnxtrain.portable import add_facts, sealed

_KINDS = ("training_model", "eval_model", "optimizer_model")
_NAMES = (*(f"{kind}.{end}" for kind in _KINDS for end in ("onnx", "ort")), "checkpoint", "nominal_checkpoint")

__all__ = [
    "LossType",
    "OptimType",
    "OptimizationStyle",
    "convert_onnx_models_to_ort",
    "generate_artifacts",
    "seal",
    "weights",
]


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
        before = {v.name for v in values(self.base.ir_model.graph)}
        made = self.loss(*names)
        first = self.value(made[0] if isinstance(made, tuple) else made)
        if first.name not in before:  # a value that the model had keeps its name
            first.name = name = self.base.free_name("loss")
            made = (name, *made[1:]) if isinstance(made, tuple) else name
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
    tie: bool | Sequence[Sequence[str]] | None = None,
    untie: Sequence[str] = (),
    memory_budget: int | float | str | None = None,
    worst_case: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Path]:
    """Write what it takes to train an ONNX model: ``training_model.onnx``, ``eval_model.onnx``,
    ``optimizer_model.onnx`` and ``checkpoint``.

    The models hold standard operators and functions with bodies, of the opset of the model (20 at least), with the
    model's own names; parameters are their inputs. ``onnxtrain.api`` trains them with any onnxruntime from 1.20 on.

    The files are a set: they appear at once or not at all, in place of the set of that prefix that was there, and have
    an id in them that ``onnxtrain.api`` compares.

    Args:
        model: path of the ``.onnx`` file, or the model; from 2 GB on, a path.
        requires_grad: names or patterns of the initializers to train; None trains all that the loss depends on, but
            for ``frozen_params``, running statistics and constants that ``weights(model)`` does not take for weights;
            a warning names those that it doubts.
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
        batch_statistics: BatchNormalization takes the batch's statistics and keeps running ones as PyTorch does (the
            variance is the unbiased one), also where the model was exported for inference.
        tie: pairs of weights that were one before the export, such as ``[("embedding", "head")]``, and are trained as
            one; True ties all tables and heads that hold the same numbers, None warns of them, False does neither.
        untie: weights that several modules read and that each gets for itself, as where an exporter merged equal
            weights of copied layers; those of ones or zeros are untied in any case.
        memory_budget: bytes that the training model may have in use at once beside weights and inputs, its outputs
            included: a number, text such as ``"50MB"`` or ``"64MiB"``, a share such as ``0.5`` of what it needs
            without a budget, or ``"min"``, as few as possible. What does not fit is not kept for the backward pass but
            computed again there. It is kept by an estimate, without the workspace of kernels.
        worst_case: shapes of inputs by name, such as ``{"ids": (16, 128)}``, that the budget is kept for; all that have
            dimensions without numbers have to be known by these.

    Returns:
        The files by what they are: ``"training_model"``, ``"eval_model"``, ``"optimizer_model"``, ``"checkpoint"``, …

    Raises:
        ArtifactError: a name is not known (close ones are listed) or in both lists, nothing would be trained, a value
            is of the wrong type, or the loss is no scalar.
        GraphError: the model cannot be read.
        WriteError: the files cannot be written; those of before are still there.
        GradientError: the loss cannot be differentiated; the operator is named.
        OptionError: the budget is no number of bytes, or ``worst_case`` does not fit the inputs or lacks some.
        BudgetError: no step fits into the budget; the least that fits is named.
    """
    _refuse_contradictions(requires_grad, frozen_params, additional_output_names)
    options = Options(memory_budget=memory_budget, worst_case=worst_case)  # type: ignore[arg-type]
    folder, prefix = _place(artifact_directory, prefix)
    more = list(additional_output_names or [])
    block = _Training(_block(loss, LossType, losses, "loss"), more)
    with _library(custom_op_library), base(model, untie=untie) as built:
        _tie(built, tie)
        block.batch_statistics, block.memory_options = batch_statistics, options
        for name in more:
            built.value(name)
        names = _loss_inputs(built, loss, loss_input_names)
        block(*names)
        _choose(block, built, requires_grad, frozen_params)
        training_model, eval_model = block.to_model_proto()
    models = {"training_model": training_model, "eval_model": eval_model}
    parameters = block.tensors()
    if optimizer is not None:
        made = _block(optimizer, OptimType, optimizers, "optimizer")
        with empty_base():
            made(parameters[0])
            models["optimizer_model"] = made.to_model_proto()  # type: ignore[attr-defined]
    set_id = _mark(models)
    files = _model_files(models, prefix, custom_op_library if ort_format else None, ort_format)
    for kind in ("checkpoint", *(["nominal_checkpoint"] if nominal_checkpoint else [])):
        content = checkpoint_of(parameters, kind == "nominal_checkpoint", set_id)
        files[kind] = f"{prefix}{kind}", encoded(content, f"{prefix}{kind}")
    written = dict(files.values())
    write_set(folder, prefix, written, [n for n in map(prefix.__add__, _NAMES) if n not in written])
    return {kind: folder / name for kind, (name, _) in files.items()}


def _place(folder: str | os.PathLike[str] | None, prefix: str) -> tuple[Path, str]:
    """The folder of the files and how their names begin, where the prefix names a folder too."""
    try:
        head, start = os.path.split(prefix)
        return Path(folder or Path.cwd()) / head, start
    except TypeError as error:
        raise ArtifactError(f"the place of the files is no path: {first_line(error)}", cure="pass strings") from error


def _mark(models: Mapping[str, onnx.ModelProto]) -> str:
    """Say in each model which set it belongs to: an id of the content of all of them, weights left out."""
    digest = hashlib.sha256()
    for kind, proto in models.items():
        content = proto.SerializeToString(deterministic=True)
        digest.update(f"{kind} {len(content)}\n".encode() + content)
    for proto in models.values():
        add_facts(proto, {"set": digest.hexdigest()})
    return digest.hexdigest()


def _model_files(
    models: Mapping[str, onnx.ModelProto], prefix: str, library: str | os.PathLike[str] | None, has_twins: bool
) -> dict[str, tuple[str, bytes]]:
    """Name and content of the file of each model and of its twin, by what it is."""
    files = {}
    for kind, proto in models.items():
        content = sealed(proto)
        files[kind] = f"{prefix}{kind}.onnx", content
        if has_twins:
            from onnxtrain.execute.onnxruntime import to_ort_format

            files[f"{kind}.ort"] = f"{prefix}{kind}.ort", to_ort_format(content, library)
    return files


def weights(model: Source) -> Weights:
    """What each floating initializer of a model is, and why; a table when it is printed.

    What is a weight is trained by ``generate_artifacts`` where nobody names what to train.

    Raises:
        GraphError: the model cannot be read.
    """
    return Weights(decisions(model))


class Weights(list[Decision]):
    """Decisions about initializers; prints as a table."""

    def __str__(self) -> str:
        return as_text(self)


def seal(path: str | os.PathLike[str]) -> None:
    """Accept the present content of an artifact that was changed on purpose, which ``api`` refuses otherwise."""
    content = read_file(path, ArtifactError, "give a model of the artifacts")
    try:
        proto = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ArtifactError(f"{path} is no .onnx model: {first_line(error)}", cure="generate it again") from error
    write_atomically(Path(path), sealed(proto))


def _refuse_contradictions(
    requires_grad: Sequence[str] | None, frozen: Sequence[str] | None, more: Sequence[str] | None
) -> None:
    given = {"requires_grad": requires_grad, "frozen_params": frozen, "additional_output_names": more}
    for name, names in given.items():
        if names is not None:
            check_names(name, names)
    if both := set(requires_grad or ()) & set(frozen or ()):
        raise ArtifactError(
            f"{sorted(both)[0]} is in requires_grad and in frozen_params", cure="leave it in one of them"
        )
    if requires_grad is not None and not requires_grad:
        raise ArtifactError("requires_grad is empty: nothing would be trained", cure="name what to train, or pass None")


def _block(given: Any, kinds: type[enum.IntEnum], classes: Any, what: str) -> Block:
    """The block that a name or a block stands for."""
    if given is None:
        return PassThrough()
    if isinstance(given, kinds):
        return getattr(classes, given.name)()
    if isinstance(given, Block):
        if isinstance(given, optimizers.Optimizer) == (what == "loss"):
            cure = f"pass a {kinds.__name__} or an instance of onnxblock.{what[:5]}"
            raise ArtifactError(f"{type(given).__name__} is given as {what}, which it is not", cure=cure)
        return given
    raise ArtifactError(f"{what} is {type(given).__name__}", cure=f"pass a {kinds.__name__} or an instance of a block")


def _library(path: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if path is None else onnxblock.custom_op_library(path)


def _loss_inputs(built: Base, loss: Any, names: Sequence[str] | None) -> list[str]:
    known = list(built.predictions)
    if names is not None and not check_names("loss_input_names", names):
        raise ArtifactError("loss_input_names is empty: the loss would read nothing", cure="name what it reads")
    chosen = list(names) if names is not None else known
    if not chosen:
        raise ArtifactError("the model has no outputs", cure="give an .onnx file that onnx.checker accepts")
    for name in chosen:
        built.value(name)
    if loss is None:
        return chosen[:1]
    if isinstance(loss, LossType) and len(chosen) != 1:
        raise ArtifactError(
            f"the model has the outputs {', '.join(known)}; {loss.name} reads one", cure="name it in loss_input_names"
        )
    return chosen


def _tie(built: Base, asked: bool | Sequence[Sequence[str]] | None) -> None:
    """Tie what was asked for; where nothing was said, say what could be tied."""
    if asked is not None:
        ties.tie(built, asked)
        return
    for table, head in ties.untied(built):
        warnings.warn(
            f"{head} holds the numbers of {table}: they were one weight before the export and are two now. "
            f"tie=True trains them as one, tie=False as two without this warning",
            stacklevel=3,
        )


def _warn_of_doubtful(names: Sequence[str]) -> None:
    """Name what is not trained and may be a weight."""
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(
            f"not trained, as they may be constants, not weights: {shown}. artifacts.weights(model) has the reasons, "
            f"requires_grad and frozen_params decide",
            stacklevel=4,
        )


def _choose(
    block: TrainingBlock, built: Base, requires_grad: Sequence[str] | None, frozen: Sequence[str] | None
) -> None:
    """Tell the block what is trained."""
    if requires_grad is None:
        reached, doubtful = reached_weights(built, block.outputs[0])
        free = [n for n in built.weights if not any(is_meant(n, p, built.weights) for p in frozen or ())]
        _warn_of_doubtful([n for n in doubtful if n in free])
        requires_grad = [n for n in reached if n in free]
    for name in requires_grad:
        block.requires_grad(name)
    for name in frozen or ():
        block.requires_grad(name, False)
