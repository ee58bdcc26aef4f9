"""The kinds of random things: how one is made of a seed, tried, made smaller, and printed."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GENERATORS = {
    "tensors": "fuzz.modules.tensor_programs",
    "changes": "fuzz.modules.changing_programs",
    "rows": "fuzz.modules.transformers",
    "scripts": "fuzz.modules.scripted_programs",
    "layers": "fuzz.modules.layer_stacks",
}
KINDS = ("files", *GENERATORS)


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the command line asks for beyond seeds.

    Args:
        kind: one of ``KINDS``.
        without: features of files to leave out.
        save: where a file is written.
        is_whole: whether nothing is made smaller.
        device: where random modules and their inputs are; ``torch.set_default_device`` puts them there.
    """

    kind: str = "files"
    without: tuple[str, ...] = ()
    save: Path | None = None
    is_whole: bool = False
    device: str = "cpu"


def outcome(seed: int, wish: Wish | None = None) -> dict[str, object]:
    """One seed, as plain data."""
    wish = wish or Wish()
    began = time.monotonic()
    found = _file(seed, wish) if wish.kind == "files" else _program(seed, wish)
    return found | {"seed": seed, "seconds": round(time.monotonic() - began, 2)}


def told(seed: int, wish: Wish) -> tuple[str, bool]:
    """One seed and what became of it as text, made smaller where it is a fault or refused; whether it is a fault."""
    return _file_told(seed, wish) if wish.kind == "files" else _program_told(seed, wish)


def prepare(kind: str) -> None:
    """Import once what all processes need, which know it by fork."""
    if kind == "files":
        from fuzz.calls import calls

        calls()
    else:
        _generator(kind)


def _generator(kind: str) -> Callable[[int], Any]:
    return importlib.import_module(GENERATORS[kind]).generate


def _program(seed: int, wish: Wish) -> dict[str, object]:
    from fuzz.modules.check import check
    from fuzz.outcomes import FAULT, REFUSED

    program = _generator(wish.kind)(seed)
    found = check(program, wish.device)
    text = program.text if found.kind in (FAULT, REFUSED) else ""  # the vocabulary may change before it is looked at
    return dataclasses.asdict(found) | {"operators": [], "text": text}


def _program_told(seed: int, wish: Wish) -> tuple[str, bool]:
    from fuzz.modules.check import check, shrunk
    from fuzz.outcomes import FAULT, REFUSED

    program = _generator(wish.kind)(seed)
    found = check(program, wish.device)
    if not wish.is_whole and found.kind in (FAULT, REFUSED):
        program = shrunk(program, found, device=wish.device)
        found = check(program, wish.device)
    told = "".join(f"# {line}\n" for line in f"{found.kind}: {found.reason}\n{found.detail}".splitlines()[:30])
    return f"{told}{program.text}\n# python -m fuzz.run --kinds {wish.kind} --seed {seed}", found.kind == FAULT


def _file(seed: int, wish: Wish) -> dict[str, object]:
    from fuzz.onnx_files import FEATURES, generate
    from fuzz.oracle import check
    from fuzz.outcomes import THROWN, Outcome
    from fuzz.units import Rejected

    try:
        file = generate(seed, [f for f in FEATURES if f not in wish.without])
    except Rejected as error:
        return dataclasses.asdict(Outcome(THROWN, str(error)[:200])) | {"operators": []}
    operators = sorted({n.op_type for n in file.model.graph.node})
    return dataclasses.asdict(check(file)) | {"operators": operators}


def _file_told(seed: int, wish: Wish) -> tuple[str, bool]:
    import onnx

    from fuzz.onnx_files import FEATURES, generate
    from fuzz.oracle import check
    from fuzz.outcomes import FAULT, REFUSED
    from fuzz.shrink import shrunk, told

    file = generate(seed, [f for f in FEATURES if f not in wish.without])
    found = check(file)
    if not wish.is_whole and found.kind in (FAULT, REFUSED):
        file = shrunk(file, found)
        found = check(file)
    if wish.save:
        onnx.save(file.model, wish.save)
    return told(file, found), found.kind == FAULT
