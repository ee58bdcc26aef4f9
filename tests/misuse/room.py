"""A row of the table, and the room in which its situation is made: an empty folder, and artifacts to be misused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import numpy as np
import onnx

from onnxtrain import api, cli
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

ROWS = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
LABELS = np.arange(4)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of misuse.

    Args:
        name: a short one.
        use: makes the situation in a room.
        match: pattern of the error's message, its cure included.
    """

    name: str
    use: Callable[[Room], Any]
    match: str


class CommandFailed(Exception):
    """The command line ended with 2; the text is what it printed."""


@functools.cache
def shared() -> Path:
    """A folder with artifacts of two models and some data, which no row changes; made once for each process."""
    folder = tempfile.TemporaryDirectory(prefix="misuse-")
    _KEPT.append(folder)
    path = Path(folder.name)
    given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW, "additional_output_names": ["scores"]}
    for name, hidden in (("run", 8), ("wide", 9)):
        generate_artifacts(digits.network(hidden), artifact_directory=path / name, nominal_checkpoint=True, **given)
    onnx.save(digits.network(8), path / "model.onnx")
    np.savez(path / "data.npz", image=np.repeat(ROWS, 8, 0), labels=np.repeat(LABELS, 8))
    return path


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


class Room:
    """Where one row happens.

    Args:
        folder: an empty folder.

    Attributes:
        written: names of files that the situation itself consists of.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, set[str]()

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of the situation."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.note()
        return path

    def note(self) -> None:
        """Take all files that are there for part of the situation."""
        self.written = self.names()

    def names(self) -> set[str]:
        """All that is in the folder."""
        return {str(p.relative_to(self.folder)) for p in self.folder.rglob("*")}

    def fifo(self, name: str) -> Path:
        """A pipe that no one writes to."""
        os.mkfifo(self.folder / name)
        self.note()
        return self.folder / name

    def copied(self, name: str = "run") -> Path:
        """A copy of artifacts, to be damaged."""
        for file in (shared() / name).iterdir():
            self.write(f"{name}/{file.name}", file.read_bytes())
        return self.folder / name

    def generate(self, model: Any = None, **options: Any) -> Any:
        """Artifacts of the small network, in this room."""
        given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.SGD, "artifact_directory": self.folder}
        return generate_artifacts(digits.network(8) if model is None else model, **{**given, **options})

    def state(self, name: str = "run") -> api.CheckpointState:
        """The state of artifacts."""
        return api.CheckpointState.load_checkpoint(shared() / name / "checkpoint")

    def module(self, name: str = "run", **options: Any) -> api.Module:
        """A module of artifacts."""
        folder = shared() / name
        return api.Module(folder / "training_model.onnx", self.state(name), folder / "eval_model.onnx", **options)

    def optimizer(self, name: str = "run") -> api.Optimizer:
        """An optimizer of artifacts."""
        return api.Optimizer(shared() / name / "optimizer_model.onnx", self.module(name))

    def command(self, *arguments: object) -> None:
        """Run the command line in this room."""
        out, error, before = io.StringIO(), io.StringIO(), Path.cwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                try:
                    status = cli.main([str(a) for a in arguments])
                except SystemExit as ended:
                    status = int(ended.code or 0)
        finally:
            os.chdir(before)
        if status == 2:
            raise CommandFailed(error.getvalue())

    def train(self, *arguments: object, folder: Path | None = None, data: Any = None) -> None:
        """``onnxtrain train`` of the artifacts, copied to this room."""
        run = self.copied() if folder is None else folder
        self.command("train", run, "--data", data or shared() / "data.npz", "--epochs", 1, *arguments)
