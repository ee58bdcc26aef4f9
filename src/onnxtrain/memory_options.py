"""What ``Options`` says about memory, as people write it: budgets, shapes of the largest batch, plans by hand."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError

LEVELS = (0, 1, 2)
PLAN_TYPES = (0, 1, 2)
_PLAN = "write 'Gelu+:1:-1': a cluster, 0 for none, 1 for recompute or 2 for compromise, how many or -1 for all"
_UNITS = {"": 1, "b": 1} | {f"{k}b": 1000**i for i, k in enumerate("kmgt", 1)}
_UNITS |= {f"{k}ib": 1024**i for i, k in enumerate("kmgt", 1)}


def budget_of(stated: Any) -> int | float | str | None:
    """A budget in bytes, as a share, or ``"min"``.

    Raises:
        OptionError: it is none of these.
    """
    if stated is None or stated == "min" or (type(stated) is float and 0 < stated <= 1):
        return stated
    found = None if isinstance(stated, float) else number_of_bytes(stated)
    if found is None:
        raise OptionError(
            f"memory_budget={stated!r} is no number of bytes", cure="write '6GB', '512MiB', 0.5 for half, or 'min'"
        )
    return found


def number_of_bytes(stated: Any) -> int | None:
    """A number of bytes above zero, with or without a unit: ``6e9``, ``"6GB"``, ``"512MiB"``; None where it is none."""
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return int(stated) if stated > 0 else None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", stated.lower()) if isinstance(stated, str) else None
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


class WorstCase(dict[str, tuple[int, ...]]):
    """Shapes of inputs by name; it can be part of a key.

    Raises:
        OptionError: something is not a shape.
    """

    def __init__(self, shapes: Mapping[str, Any]) -> None:
        for name, shape in shapes.items():
            if not isinstance(shape, tuple | list) or not all(isinstance(n, int) and n > 0 for n in shape):
                raise OptionError(f"worst_case={{{name!r}: {shape!r}}} is not a shape", cure="write (32, 512), say")
        super().__init__({name: tuple(shape) for name, shape in shapes.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """One entry of a list of memory plans.

    Args:
        cluster: the operators that run again, each followed by a plus: ``Linear+Gelu+``.
        kind: 0 nothing, 1 what can be computed again, 2 also that for which something smaller is kept.
        count: how many of the first of them; -1 all.
    """

    cluster: str
    kind: int
    count: int

    def __str__(self) -> str:
        return f"{self.cluster}:{self.kind}:{self.count}"


def request_of(text: str) -> PlanRequest:
    """An entry of its text.

    Raises:
        OptionError: it does not have three parts, or one of them cannot be.
    """
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3:
        raise OptionError(f"the memory plan {text!r} does not have three parts", cure=_PLAN)
    cluster, kind, count = parts
    if not cluster or kind not in map(str, PLAN_TYPES) or not re.fullmatch(r"-1|\d+", count):
        raise OptionError(f"the memory plan {text!r} cannot be read", cure=_PLAN)
    return PlanRequest(cluster, int(kind), int(count))


def plans_of(stated: Any) -> tuple[str, ...]:
    """Memory plans, each in a text of its own; the last one for a cluster counts.

    Args:
        stated: such texts, one text in which commas join them, or the path of a .json file with a list of texts.

    Raises:
        OptionError: it is none of these.
    """
    if isinstance(stated, Path) or (isinstance(stated, str) and stated.strip().endswith(".json")):
        stated = _from_json(Path(str(stated).strip()))
    texts = [stated] if isinstance(stated, str) else list(stated) if isinstance(stated, Iterable) else [stated]
    if not all(isinstance(text, str) for text in texts):
        raise OptionError(f"memory_plans={stated!r} is not a list of texts", cure=_PLAN)
    found = [request_of(part) for text in texts for part in text.split(",") if part.strip()]
    return tuple(str(request) for request in {request.cluster: request for request in found}.values())


def _from_json(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"the memory plans of {path} cannot be read: {error}", cure="give a list of texts") from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise OptionError(f"{path} is not a list of memory plans", cure='write ["Gelu+:1:-1"], say')
    return found


def probe_of(stated: Any) -> str:
    """How far plans are looked for: ``"level:boundary"``, both 0 or 1.

    Raises:
        OptionError: it is not that.
    """
    if not isinstance(stated, str) or not re.fullmatch(r"[01]:[01]", stated.strip()):
        raise OptionError(
            f"memory_probe={stated!r} is not a level and a boundary", cure="write '0:0', '0:1', '1:0' or '1:1'"
        )
    return stated.strip()


def probe_of_level(text: str) -> str:
    """The probe of a level alone, as the first releases had it."""
    return probe_of(f"{text.strip()}:0")


def one_way(budget: Any, plans: tuple[str, ...], level: int) -> None:
    """Check that a budget and plans by hand are not both asked for.

    Raises:
        OptionError: they are.
    """
    if budget is not None and (plans or level):
        hand = f"memory_level={level}" if level else f"memory_plans={plans}"
        raise OptionError(
            f"memory_budget={budget!r} chooses what is computed again, and so does {hand}",
            cure="leave one of them away (ORTMODULE_MEMORY_OPT_LEVEL and ORTMODULE_MEMORY_OPT_CONFIG are such, too)",
        )


def check_offload(stated: str | None, budget: Any, backend: str) -> None:
    """Check that saved values can wait elsewhere.

    Raises:
        OptionError: nothing asks for it, or nobody does it, or the folder is none.
    """
    if stated is None:
        return
    if budget is None:
        raise OptionError(f"memory_offload={stated!r} is for steps within a budget", cure="state a memory_budget, too")
    if backend not in ("auto", "torch"):
        raise OptionError(f"memory_offload={stated!r}: the {backend} backend keeps all", cure="use backend='torch'")
    if stated != "host" and not Path(stated).is_dir():
        raise OptionError(f"memory_offload={stated!r} is no folder", cure="make it, or write 'host'")
