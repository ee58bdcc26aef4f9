"""What a run prints: a line for each epoch, in words or as JSON, and a bar where somebody watches."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from typing import Any

from onnxtrain.cli.runs import Epoch


class Bar:
    """A bar of an epoch's batches, where standard error is a terminal and rich is installed; else nothing.

    Args:
        total: batches of an epoch.
    """

    def __init__(self, total: int) -> None:
        self._total, self._progress, self._task = total, None, None
        self._is_watched = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None

    def step(self, epoch: int, done: int) -> None:
        """Show how many batches of an epoch are done."""
        if not self._is_watched:
            return
        if self._progress is None:
            self._progress = _progress()
            self._task = self._progress.add_task("", total=self._total)
        self._progress.update(self._task, description=f"epoch {epoch}", completed=done)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None


def _progress() -> Any:
    """A bar of rich on standard error, started."""
    from rich.console import Console
    from rich.progress import Progress

    made = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    made.start()
    return made


def line(epoch: Epoch, epochs: int, seconds: float, as_json: bool) -> str:
    """An epoch in a line.

    Args:
        epoch: what is known of it.
        epochs: how many there are.
        seconds: how long it took.
        as_json: as an object of JSON instead of words.
    """
    if as_json:
        return json.dumps({**dataclasses.asdict(epoch), "seconds": round(seconds, 3)})
    parts = [f"epoch {epoch.epoch}/{epochs}", f"loss {epoch.loss:.4f}"]
    if epoch.valid_loss is not None:
        parts.append(f"held-out loss {epoch.valid_loss:.4f}")
    if epoch.accuracy is not None:
        parts.append(f"accuracy {epoch.accuracy:.2%}")
    return "  ".join([*parts, f"rate {epoch.learning_rate:.3g}", f"{seconds:.1f} s"])
