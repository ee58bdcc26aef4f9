"""Misuse of onnxtrain.api: files of other sets, batches, devices, states, schedules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime as ort

from misuse.room import LABELS, ROWS, Room, Row, shared
from onnxtrain import api

NAN = math.nan


def path(kind: str, name: str = "run") -> Any:
    return shared() / name / (kind if "checkpoint" in kind else f"{kind}_model.onnx")


def data(room: Room, name: str, content: Any) -> None:
    room.state().parameters[name].data = content


def no_gradients(room: Room) -> None:
    room.optimizer().step()


def no_evaluation(room: Room) -> None:
    api.Module(path("training"), room.state()).eval()


def nominal(room: Room) -> None:
    state = api.CheckpointState.load_checkpoint(path("nominal_checkpoint"))
    api.Module(path("training"), state)(ROWS, LABELS)


def nominal_export(room: Room) -> None:
    state = api.CheckpointState.load_checkpoint(path("nominal_checkpoint"))
    module = api.Module(path("training"), state, path("eval"))
    module.export_model_for_inferencing(room.folder / "made.onnx")


def save_to(room: Room, place: Any) -> None:
    api.CheckpointState.save_checkpoint(room.state(), place)


def schedule(kind: Any, *given: Any, **options: Any) -> Any:
    return lambda room: kind(room.optimizer(), *given, **options)


TABLE = [
    Row(
        "module of another set's state",
        lambda r: api.Module(path("training"), r.state("wide")),
        "run/training_model.onnx is of the set .*wide/checkpoint of the set(.|\n)*of_any_set=True",
    ),
    Row(
        "module of another set's evaluation",
        lambda r: api.Module(path("training"), r.state(), path("eval", "wide")),
        "wide/eval_model.onnx of the set",
    ),
    Row(
        "optimizer of another set",
        lambda r: api.Optimizer(path("optimizer", "wide"), r.module()),
        "wide/optimizer_model.onnx of the set",
    ),
    Row(
        "state of other sizes, on purpose",
        lambda r: api.Module(
            path("training"), api.CheckpointState.load_checkpoint(path("checkpoint", "wide"), of_any_set=True)
        ),
        "in the state",
    ),
    Row("training model in another's place", lambda r: api.Module(path("eval"), r.state()), "is the evaluation model"),
    Row(
        "evaluation model in another's place",
        lambda r: api.Module(path("training"), r.state(), path("optimizer")),
        "is the optimizer model",
    ),
    Row(
        "optimizer model in another's place",
        lambda r: api.Optimizer(path("training"), r.module()),
        "is the training model",
    ),
    Row("checkpoint as a model", lambda r: api.Module(path("checkpoint"), r.state()), "no model of generate_artifacts"),
    Row(
        "plain model as a model",
        lambda r: api.Module(shared() / "model.onnx", r.state()),
        "no model of generate_artifacts",
    ),
    Row(
        "model as a checkpoint",
        lambda r: api.CheckpointState.load_checkpoint(path("training")),
        "damaged|no checkpoint",
    ),
    Row("no such model", lambda r: api.Module(r.folder / "none.onnx", r.state()), "none.onnx cannot be read"),
    Row("no such checkpoint", lambda r: api.CheckpointState.load_checkpoint(r.folder / "none"), "none cannot be read"),
    Row("model is a folder", lambda r: api.Module(r.folder, r.state()), "is a folder, no file"),
    Row("checkpoint is a folder", lambda r: api.CheckpointState.load_checkpoint(r.folder), "is a folder, no file"),
    Row("model is a pipe", lambda r: api.Module(r.fifo("m.onnx"), r.state()), "is a pipe, no file"),
    Row("checkpoint is a pipe", lambda r: api.CheckpointState.load_checkpoint(r.fifo("c")), "is a pipe, no file"),
    Row("checkpoint is a device", lambda r: api.CheckpointState.load_checkpoint("/dev/zero"), "is a device, no file"),
    Row("model of a number", lambda r: api.Module(7, r.state()), "7 cannot be read"),
    Row("checkpoint of nothing", lambda r: api.CheckpointState.load_checkpoint(None), "None cannot be read"),
    Row("path as a state", lambda r: api.Module(path("training"), path("checkpoint")), "no CheckpointState"),
    Row("path as a module", lambda r: api.Optimizer(path("optimizer"), path("training")), "no Module"),
    Row("device that is not there", lambda r: r.module(device="cuda"), "no CUDAExecutionProvider here"),
    Row("device of a name that is none", lambda r: r.module(device="gpu"), "no gpu here"),
    Row("device of a number", lambda r: r.module(device=0), "no 0 here"),
    Row("device of no index", lambda r: r.module(device="cuda:x"), "no number after its colon"),
    Row("seed of a half", lambda r: r.module(seed=0.5), "seed=0.5"),
    Row("seed of a text", lambda r: r.module(seed="1"), "seed='1'"),
    Row("too few inputs", lambda r: r.module()(ROWS), "1 inputs were given, not 2"),
    Row("too many inputs", lambda r: r.module()(ROWS, LABELS, LABELS), "3 inputs were given"),
    Row("list as input", lambda r: r.module()(ROWS.tolist(), LABELS), "image is list"),
    Row("double rows", lambda r: r.module()(ROWS.astype(np.float64), LABELS), "image is float64, not float32"),
    Row("float labels", lambda r: r.module()(ROWS, LABELS.astype(np.float32)), "labels is float32, not int64"),
    Row("text labels", lambda r: r.module()(ROWS, LABELS.astype(str)), "labels is str, not int64"),
    Row("narrow rows", lambda r: r.module()(ROWS[:, :9], LABELS), r"shape \[4, 9\], not"),
    Row("flat rows", lambda r: r.module()(ROWS.reshape(-1), LABELS), r"shape \[256\], not"),
    Row("no rows", lambda r: r.module()(ROWS[:0], LABELS[:0]), "nothing to learn from"),
    Row("fewer labels than rows", lambda r: r.module()(ROWS, LABELS[:3]), "4|3"),
    Row("label beyond the classes", lambda r: r.module()(ROWS, LABELS + 10), "label outside of the classes"),
    Row("label below the classes", lambda r: r.module()(ROWS, LABELS - 1), "label outside of the classes"),
    Row(
        "text as OrtValue",
        lambda r: r.module()(ROWS, ort.OrtValue.ortvalue_from_numpy(ROWS)),
        "labels is float32, not int64",
    ),
    Row("evaluation without its model", no_evaluation, "no evaluation model"),
    Row("update without gradients", no_gradients, "no gradients"),
    Row("nominal parameters in a step", nominal, "has no content"),
    Row("nominal parameters in an export", nominal_export, "has no content"),
    Row(
        "export of no value",
        lambda r: r.module().export_model_for_inferencing(r.folder / "m.onnx", ["logits"]),
        "no value logits",
    ),
    Row("export to a folder", lambda r: r.module().export_model_for_inferencing(r.folder), "is a folder, no file"),
    Row(
        "export below a file",
        lambda r: r.module().export_model_for_inferencing(r.write("f", b"") / "m.onnx"),
        "cannot be written",
    ),
    Row(
        "vector of another size",
        lambda r: r.module().copy_buffer_to_parameters(np.zeros(3, np.float32)),
        "the buffer has 3 elements",
    ),
    Row("vector of another type", lambda r: r.module().copy_buffer_to_parameters(np.zeros(610)), "of float64"),
    Row("vector of a list", lambda r: r.module().copy_buffer_to_parameters([1.0]), "the buffer is list"),
    Row("parameter of another shape", lambda r: data(r, "first_bias", np.zeros(3, np.float32)), "first_bias is"),
    Row("parameter of another type", lambda r: data(r, "first_bias", np.zeros(8)), "first_bias is"),
    Row("parameter of a text", lambda r: data(r, "first_bias", "0"), "first_bias is"),
    Row("property of a list", lambda r: r.state().properties.__setitem__("a", [1]), "properties are int, float"),
    Row("property of nan", lambda r: r.state().properties.__setitem__("a", NAN), "JSON"),
    Row("property of no name", lambda r: r.state().properties.__setitem__(3, 1), "name of the property is int"),
    Row("checkpoint to a folder", lambda r: save_to(r, r.folder), "is a folder, no file"),
    Row("checkpoint to a pipe", lambda r: save_to(r, r.fifo("c")), "is a pipe, no file"),
    Row("checkpoint below a file", lambda r: save_to(r, r.write("f", b"") / "c"), "cannot be written"),
    Row("checkpoint of a name that is too long", lambda r: save_to(r, r.folder / ("x" * 300)), "cannot be written"),
    Row("rate of nan", lambda r: r.optimizer().set_learning_rate(NAN), "learning_rate=nan"),
    Row("rate below 0", lambda r: r.optimizer().set_learning_rate(-1), "learning_rate=-1"),
    Row("rate of inf", lambda r: r.optimizer().set_learning_rate(math.inf), "learning_rate=inf"),
    Row("rate beyond float32", lambda r: r.optimizer().set_learning_rate(1e39), "learning_rate=1e.39"),
    Row("rate of a text", lambda r: r.optimizer().set_learning_rate("0.1"), "learning_rate='0.1'"),
    Row("rate of a bool", lambda r: r.optimizer().set_learning_rate(True), "learning_rate=True"),
    Row("warm-up longer than all", schedule(api.LinearLRScheduler, 10, 5, 0.1), "does not fit"),
    Row("warm-up of a half", schedule(api.LinearLRScheduler, 0.5, 5, 0.1), "warmup_step_count=0.5"),
    Row("total of a half", schedule(api.CosineLRScheduler, 0, 5.5, 0.1), "total_step_count=5.5"),
    Row("first rate of nan", schedule(api.LinearLRScheduler, 0, 5, NAN), "initial_lr=nan"),
    Row("first rate below 0", schedule(api.ConstantLRScheduler, -1), "initial_lr=-1"),
    Row("first rate of 0 to divide by", schedule(api.CosineLRScheduler, 0, 5, 0.0), "initial_lr=0"),
    Row("least rate below 0", schedule(api.CosineLRScheduler, 0, 5, 0.1, min_lr=-1), "min_lr=-1"),
    Row("power below 0", schedule(api.PolynomialLRScheduler, 0, 5, 0.1, power=-1), "power=-1"),
    Row("end of nan", schedule(api.PolynomialLRScheduler, 0, 5, 0.1, end_lr=NAN), "end_lr=nan"),
    Row("constant with a warm-up below 0", schedule(api.ConstantLRScheduler, 0.1, -1), "warmup_step_count=-1"),
    Row("cycle of one step", schedule(api.OneCycleLRScheduler, 0.1, 1), "no way up and down"),
    Row("cycle with a share of nan", schedule(api.OneCycleLRScheduler, 0.1, 10, NAN), "pct_start=nan"),
    Row("cycle divided by 0", schedule(api.OneCycleLRScheduler, 0.1, 10, div_factor=0), "div_factor=0"),
]
