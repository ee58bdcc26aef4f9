"""Misuse of the command line: status 2, and what to do."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from misuse.room import LABELS, ROWS, Room, Row, shared


def artifacts(*options: object, model: Any = None) -> Any:
    """``onnxtrain artifacts`` with options."""
    return lambda r: r.command("artifacts", model or shared() / "model.onnx", "--out", "out", *options)


def made(*options: object) -> Any:
    """The same with a loss and AdamW."""
    return artifacts("--loss", "cross_entropy", "--optimizer", "adamw", *options)


def train(*options: object) -> Any:
    return lambda r: r.train(*options)


def npz(room: Room, **arrays: Any) -> Path:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return room.write("data.npz", file.getvalue())


def declared(room: Room, shape: tuple[int, ...], content: bytes = b"\0" * 64) -> Path:
    """An array whose header declares more than there is."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("image.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content)
    return room.write("data.npz", file.getvalue())


def bomb(room: Room) -> Path:
    """A member that says of itself that it holds 2⁴⁰ bytes."""
    path = declared(room, (2**38,))
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")
    content[place + 20 : place + 28] = struct.pack("<II", 64, 2**32 - 2)
    return room.write("data.npz", bytes(content))


def prefix_of_another(room: Room) -> None:
    room.train("--prefix", "other_")


def resumed_from_another_set(room: Room) -> None:
    run = room.copied()
    (run / "trained_checkpoint").write_bytes((shared() / "wide" / "checkpoint").read_bytes())
    room.note()
    room.command("export", run, "made.onnx")


def resumed_from_no_run(room: Room) -> None:
    run = room.copied()
    (run / "trained_checkpoint").write_bytes((run / "checkpoint").read_bytes())
    room.note()
    room.train("--resume", folder=run)


TABLE = [
    Row("no command", lambda r: r.command(), "required: command"),
    Row("no such command", lambda r: r.command("trian"), "invalid choice: 'trian'"),
    Row("artifacts of no model", artifacts(model="none.onnx"), "none.onnx cannot be read"),
    Row("artifacts of a folder", artifacts(model="."), "is a folder, no file"),
    Row(
        "artifacts of text",
        lambda r: r.command("artifacts", r.write("m.onnx", b"text"), "--out", "out"),
        "m.onnx cannot be read",
    ),
    Row("artifacts without a place", lambda r: r.command("artifacts", shared() / "model.onnx"), "required: --out"),
    Row("loss that is none", artifacts("--loss", "cross"), "--loss cross is not known"),
    Row("optimizer that is none", artifacts("--loss", "mse", "--optimizer", "adamx"), "--optimizer adamx is not known"),
    Row("option without its loss", artifacts("--label-smoothing", 0.1), "--label-smoothing is given without --loss"),
    Row("option without its optimizer", artifacts("--loss", "mse", "--eps", 1), "--eps is given without --optimizer"),
    Row("option of another loss", artifacts("--loss", "mse", "--blank", 1), "MSELoss has no --blank"),
    Row(
        "option of another optimizer",
        artifacts("--loss", "mse", "--optimizer", "sgd", "--betas", 0.9, 0.9),
        "SGD has no --betas",
    ),
    Row("label smoothing of 2", artifacts("--loss", "cross_entropy", "--label-smoothing", 2), "label_smoothing=2"),
    Row("label smoothing of a text", artifacts("--label-smoothing", "much"), "invalid float value"),
    Row("betas of 1", made("--betas", 1, 1), "betas=1"),
    Row("one beta", made("--betas", 1), "expected 2 arguments"),
    Row("decay of nan", made("--weight-decay", "nan"), "weight_decay=nan"),
    Row("norm of nan", made("--clip-norm", "nan"), "max_norm=nan"),
    Row("norm below 0", made("--clip-norm", -1), "max_norm=-1"),
    Row("eps of inf", made("--eps", "inf"), "eps=inf"),
    Row("formula that is none", made("--formula", "paper"), "formula='paper'"),
    Row("reduction that is none", artifacts("--loss", "mse", "--reduction", "median"), "reduction='median'"),
    Row("axis beyond the scores", artifacts("--loss", "nll", "--class-axis", 7), "axis=7"),
    Row("output that is none", made("--output", "logits"), "no value logits"),
    Row("weight that is none", made("--train", "third"), "no floating initializer third"),
    Row("trained and frozen", made("--train", "first_bias", "--freeze", "first_bias"), "and in frozen_params"),
    Row(
        "artifacts to a file",
        lambda r: r.command("artifacts", shared() / "model.onnx", "--loss", "mse", "--out", r.write("f", b"")),
        "cannot be written",
    ),
    Row("train without data", lambda r: r.command("train", "run", "--epochs", 1), "required: --data"),
    Row("train in no folder", lambda r: r.train(folder=r.folder / "none"), "training_model.onnx cannot be read"),
    Row("train with another prefix", prefix_of_another, "other_training_model.onnx cannot be read"),
    Row("rate of nan", train("--lr", "nan"), "lr=nan"),
    Row("rate below 0", train("--lr", "-1"), "lr=-1"),
    Row("rate of inf", train("--lr", "inf"), "lr=inf"),
    Row("rate of a text", train("--lr", "fast"), "invalid float value"),
    Row("share of nan", train("--valid-share", "nan"), "--valid-share is nan"),
    Row("share of 1", train("--valid-share", 1), "--valid-share"),
    Row("share below 0", train("--valid-share", -0.5), "--valid-share"),
    Row("batch of 0", train("--batch-size", 0), "--batch-size is 0"),
    Row("epochs below 0", train("--epochs", -3), "--epochs is -3"),
    Row("epochs of a half", train("--epochs", 0.5), "invalid int value"),
    Row("seed below 0", train("--seed", -1), "--seed is -1"),
    Row("saving every 0 steps", train("--save-every", 0), "--save-every is 0"),
    Row("warm-up below 0", train("--warmup", -1), "--warmup is -1"),
    Row("warm-up longer than the run", train("--schedule", "linear", "--warmup", 99), "does not fit"),
    Row("schedule that is none", train("--schedule", "stairs"), "invalid choice"),
    Row("device that is not there", train("--device", "cuda"), "no CUDAExecutionProvider"),
    Row("accuracy of nothing held out", train("--accuracy", "scores"), "no data to be measured on"),
    Row("resumed from no run", resumed_from_no_run, "is of no run of onnxtrain train"),
    Row("export of another set's checkpoint", resumed_from_another_set, "trained_checkpoint of the set"),
    Row(
        "export of no checkpoint",
        lambda r: r.command("export", shared() / "run", "m.onnx", "--checkpoint", "none"),
        "none cannot be read",
    ),
    Row(
        "export of no value",
        lambda r: r.command("export", shared() / "run", "m.onnx", "--output", "logits"),
        "no value logits",
    ),
    Row("check of no model", lambda r: r.command("check", "none.onnx"), "none.onnx cannot be read"),
    Row("check of a pipe", lambda r: r.command("check", r.fifo("m.onnx")), "is a pipe, no file"),
    Row("operator that is none", lambda r: r.command("ops", "Sofmax"), "no operator Sofmax"),
    Row("no such data", lambda r: r.train(data="none.npz"), "none.npz cannot be read"),
    Row("data is a folder", lambda r: r.train(data=r.folder), "is a folder, no file"),
    Row("data is a pipe", lambda r: r.train(data=r.fifo("d.npz")), "is a pipe, no file"),
    Row("data is a device", lambda r: r.train(data="/dev/zero"), "is a device, no file"),
    Row("data is text", lambda r: r.train(data=r.write("d.npz", b"no data")), "cannot be read as .npz"),
    Row("data is empty", lambda r: r.train(data=r.write("d.npz", b"")), "cannot be read as .npz"),
    Row(
        "data of objects",
        lambda r: r.train(data=npz(r, image=np.array([None]), labels=LABELS)),
        "cannot be read as .npz",
    ),
    Row("data without labels", lambda r: r.train(data=npz(r, image=ROWS)), "has no array labels"),
    Row("data with more", lambda r: r.train(data=npz(r, image=ROWS, labels=LABELS, ids=LABELS)), "has the array ids"),
    Row(
        "data of unequal length",
        lambda r: r.train(data=npz(r, image=ROWS, labels=LABELS[:2])),
        "unequal numbers of rows",
    ),
    Row("data of no rows", lambda r: r.train(data=npz(r, image=ROWS[:0], labels=LABELS[:0])), "no rows"),
    Row("data of a scalar", lambda r: r.train(data=npz(r, image=ROWS, labels=np.int64(1))), "labels is a scalar"),
    Row(
        "data of another type", lambda r: r.train(data=npz(r, image=ROWS.astype(int), labels=LABELS)), "image is int64"
    ),
    Row("data of another width", lambda r: r.train(data=npz(r, image=ROWS[:, :5], labels=LABELS)), r"shape \[4, 5\]"),
    Row("data that declares terabytes", lambda r: r.train(data=declared(r, (2**40,))), "declares .* bytes and has"),
    Row("data that declares less than nothing", lambda r: r.train(data=declared(r, (-4,))), "declares|cannot be read"),
    Row("data of a size beyond int64", lambda r: r.train(data=declared(r, (2**70,))), "declares|cannot be read"),
    Row("data that is a bomb", lambda r: r.train(data=bomb(r)), "declares|cannot be read"),
]
