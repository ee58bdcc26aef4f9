"""DebugOptions and LogLevel, under the names that ``onnxruntime.training`` had; and where messages go."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
from pathlib import Path

from onnxtrain.options import DEVINFO, Options
from onnxtrain.processes import rank


class LogLevel(enum.IntEnum):
    """How much is said: from everything to fatal errors only."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


_PYTHON_LEVELS = {"VERBOSE": 10, "DEVINFO": DEVINFO, "INFO": 20, "WARNING": 30, "ERROR": 40, "FATAL": 50}


class DebugOptions:
    """Debugging knobs; environment variables override the arguments.

    Args:
        log_level: how much is said.
        save_onnx: write one ``.onnx`` file for each stage.
        onnx_prefix: how the file names begin; required with ``save_onnx``.
        save_path: folder of the files; the working directory where empty.

    Raises:
        TypeError: ``log_level`` is not a LogLevel, or ``onnx_prefix`` is not a string.
        ValueError: ``save_onnx`` without ``onnx_prefix``.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str | os.PathLike[str] = "",
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"log_level must be a LogLevel, not {log_level!r}")
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"onnx_prefix must be a string, not {onnx_prefix!r}")
        if save_onnx and not onnx_prefix:
            raise ValueError("save_onnx needs an onnx_prefix: how the file names begin")
        self._log_level, self._save_onnx, self._onnx_prefix = log_level, save_onnx, onnx_prefix
        self._save_path = Path(save_path) if save_path else Path.cwd()
        if save_onnx and not os.access(self._save_path, os.W_OK):
            raise OSError(f"the folder {self._save_path} cannot be written; set ORTMODULE_SAVE_ONNX_PATH to another")

    @property
    def log_level(self) -> LogLevel:
        """How much is said."""
        return self._log_level

    @property
    def save_onnx(self) -> bool:
        """Whether one ``.onnx`` file for each stage is written."""
        return self._save_onnx

    @property
    def onnx_prefix(self) -> str:
        """How the file names begin."""
        return self._onnx_prefix

    @property
    def save_path(self) -> Path:
        """Folder of the files."""
        return self._save_path

    def apply_to(self, options: Options) -> Options:
        """The options with these knobs turned."""
        changes: dict[str, object] = {"log_level": self.log_level.name}
        if self.save_onnx:
            changes |= {"save_onnx": self.save_path, "onnx_prefix": self.onnx_prefix}
        return dataclasses.replace(options, **changes)  # type: ignore[arg-type]


def start_logging(options: Options) -> None:
    """Let messages of a level through, to standard error where the program has not said where they go.

    End users' levels are rank 0's; developers' levels (DEVINFO, VERBOSE) are every rank's.
    """
    level = _PYTHON_LEVELS[options.log_level]
    logger = logging.getLogger("onnxtrain")
    logger.setLevel(level if rank() == 0 or level <= DEVINFO else logging.CRITICAL)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("onnxtrain: %(message)s"))
        logger.addHandler(handler)
