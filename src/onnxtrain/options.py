"""Options of one compilation, and the one table of environment variables."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError

BACKENDS = ("auto", "torch", "onnxruntime", "reference")
LOG_LEVELS = ("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL")
OPSETS = (20, 21)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose about one compilation; immutable, so it can be part of a cache key.

    Args:
        backend: ``"auto"`` (torch where it is installed), ``"torch"``, ``"onnxruntime"`` or ``"reference"``.
        opset: ONNX opset of the graph, 20 or 21.
        verify: compare the first training step of every new graph with eager PyTorch.
        verify_passes: run ``ir.verify`` after every pass.
        save_onnx: folder that receives one ``.onnx`` file for each stage; None saves nothing.
        onnx_prefix: how the names of these files begin.
        log_level: one of ``LOG_LEVELS``.

    Raises:
        OptionError: a value is outside its list.
    """

    backend: str = "auto"
    opset: int = 20
    verify: bool = False
    verify_passes: bool = True
    save_onnx: Path | None = None
    onnx_prefix: str = ""
    log_level: str = "WARNING"

    def __post_init__(self) -> None:
        for name, allowed in (("backend", BACKENDS), ("opset", OPSETS), ("log_level", LOG_LEVELS)):
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"{name}={getattr(self, name)!r} is not known", cure=f"choose one of {', '.join(map(str, allowed))}"
                )


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the option it sets and how its text is read."""

    name: str
    option: str
    read: Callable[[str], Any]


ENVIRONMENT = (
    Variable("ORTMODULE_ONNX_OPSET_VERSION", "opset", int),
    Variable("ORTMODULE_LOG_LEVEL", "log_level", str.upper),
    Variable("ORTMODULE_SAVE_ONNX_PATH", "save_onnx", Path),
)


def from_environment(options: Options | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Options after the second phase: defaults first, then code, then the environment, which wins.

    Raises:
        OptionError: a variable's text cannot be read.
    """
    environ = os.environ if environ is None else environ
    changes: dict[str, Any] = {}
    for variable in ENVIRONMENT:
        if text := environ.get(variable.name, ""):
            try:
                changes[variable.option] = variable.read(text)
            except ValueError as error:
                raise OptionError(f"{variable.name}={text!r} cannot be read: {error}") from error
    return dataclasses.replace(options or Options(), **changes)
