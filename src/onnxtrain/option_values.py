"""Values of ``Options`` as people write them: a path as text, a list of names instead of a tuple."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError


def as_declared(name: str, declared: str, value: Any) -> Any:
    """A value as a field has it.

    Args:
        name: of the field.
        declared: its type, as the class has it: ``"bool"``, ``"int"``, ``"Path | None"``, ``"tuple[str, ...]"``.
        value: what was given.

    Raises:
        OptionError: it is of another type.
    """
    if declared == "bool" and not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is neither True nor False", cure=f"write {name}=True or {name}=False")
    if declared == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        raise OptionError(f"{name}={value!r} is not a whole number", cure=f"write {name}=1, say")
    if declared == "Path | None" and value is not None:
        if not isinstance(value, str | os.PathLike):
            raise OptionError(f"{name}={value!r} is not a path", cure=f"write {name}='a/folder', or a pathlib.Path")
        return Path(value)
    if declared == "tuple[str, ...]":
        names = tuple(value) if isinstance(value, tuple | list | set | frozenset) else (None,)
        if not all(isinstance(text, str) for text in names):
            raise OptionError(f"{name}={value!r} is not a tuple of names", cure=f'write {name}=("one", "other"), say')
        return names
    return value


def truth_of(text: str) -> bool:
    """A truth value as an environment variable has it.

    Raises:
        ValueError: the text is none.
    """
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("write 1 or 0")
