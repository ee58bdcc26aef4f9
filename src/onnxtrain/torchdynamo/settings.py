"""What ``torch.compile`` is told about a compilation: its options and its mode, as ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from onnxtrain.errors import OptionError, close_to
from onnxtrain.options import Options, from_environment

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},  # a step is one call of a program as it is
    "max-autotune": {"conv_algo_search": "EXHAUSTIVE"},
    "max-autotune-no-cudagraphs": {"conv_algo_search": "EXHAUSTIVE"},
}
_NAMES = tuple(field.name for field in dataclasses.fields(Options))


def settings(mode: str | None = None, options: Mapping[str, Any] | Options | None = None) -> Options:
    """The options in force; environment variables override them.

    Args:
        mode: ``torch.compile``'s.
        options: ``torch.compile``'s: fields of ``Options`` by name, or the object itself.

    Raises:
        OptionError: a name or a value is not known.
    """
    if (mode or "default") not in MODES:
        raise OptionError(f"mode={mode!r} is not known", cure=f"choose one of {', '.join(MODES)}")
    if isinstance(options, Options):
        return from_environment(options)
    given = dict(options or {})
    check_known(given, _NAMES, "onnxtrain", "onnxtrain.Options")
    return from_environment(Options(**{**MODES[mode or "default"], **given}))


def check_known(given: Iterable[str], known: Collection[str], backend: str, place: str) -> None:
    """Refuse names of options that a backend does not have.

    Args:
        given: the names.
        known: those that there are.
        backend: its name.
        place: what has the names as fields.

    Raises:
        OptionError: a name is not known; close ones are listed.
    """
    for name in given:
        if name not in known:
            raise OptionError(
                f"option {name!r} of the backend {backend} is not known{close_to(name, known)}",
                cure=f"choose fields of {place}",
            )
