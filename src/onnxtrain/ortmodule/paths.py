"""Paths: the graphs of calls that look alike and saw different things in their tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from onnxtrain.capture import ARGUMENT, COUNTED, Answers, Key, Look, Path, same
from onnxtrain.engine.path_check import ANY

_NUMBERS = ("item", "__int__", "__index__")  # looks whose answer can be a number that varies
_FLOATS = ("item", "__float__")
_CURES = {
    "numpy": "compute on the tensor itself, or pass the numbers to the module as an argument",
    COUNTED: "count in a buffer, and choose with torch.where",
    ARGUMENT: "pass it as a tensor, and choose with torch.where",
    "__bool__": "choose with torch.where or torch.cond, or multiply by the condition",
}
_CURE = "keep it a tensor: scale by it as it is, cut by a mask, torch.arange(n) < length; or pass it as an argument"


def can_follow(found: Sequence[Look], looks: Sequence[Look]) -> bool:
    """Whether a path with these looks may be the one whose first looks were found.

    Only as long as both look at the same can they differ: what is asked of free numbers is not among the looks.
    """
    for a, b in zip(found, looks, strict=False):
        if a.key != b.key:
            return True
        if a.answer is not ANY and not same(a.answer, b.answer):
            return False
    return True


def difference(old: Path, new: Answers) -> str:
    """Where a call saw something else than an earlier one, for a person to read."""
    waiting = {key: collections.deque(answers) for key, answers in new.by_key.items()}
    for look in old.looks:
        answers = waiting.get(look.key)
        answer = answers.popleft() if answers else None
        if not same(answer, look.answer):
            return f"{Look(*look.key, answer)} and earlier {look.answer!r}"
    return "what is asked of numbers in tensors is answered otherwise"


def varying(paths: Iterable[Path], answers: Answers) -> frozenset[Key]:
    """The looks that see numbers which are others than on known paths, floats, which hardly ever come again, what
    calls count, and what they are given.
    """
    now = answers.by_key
    found = {key for key, seen in now.items() if key[0] in _FLOATS and any(isinstance(a, float) for a in seen)}
    found |= {key for key in now if key[0] in (COUNTED, ARGUMENT)}
    for path in paths:
        for look in path.looks:
            if _is_integer(look) and look.answer not in now.get(look.key, [look.answer]):
                found.add(look.key)
    return frozenset(found)


def integers(answers: Answers) -> frozenset[Key]:
    """The looks that see integers."""
    return frozenset(look.key for look in answers.looks if _is_integer(look))


def _is_integer(look: Look) -> bool:
    return look.kind in _NUMBERS and type(look.answer) is int


def too_many(name: str, paths: Sequence[Path]) -> str:
    """What is said of a module that has too many paths: which line makes them, and what to write instead."""
    seen: dict[Key, set[tuple[object, ...]]] = collections.defaultdict(set)
    for path in paths:
        answers: dict[Key, list[object]] = collections.defaultdict(list)
        for look in (*path.looks, *(n.look for n in path.conditions.numbers)):
            answers[look.key].append(look.answer)
        for key, found in answers.items():
            seen[key].add(tuple(found))
    kind, place = max(seen, key=lambda key: len(seen[key]))
    return (
        f"{name} has {len(paths)} paths, each a graph of its own; from now on a call that sees something new runs in "
        f"eager PyTorch\n  source: {place}, which saw {len(seen[kind, place])} different contents of a tensor\n"
        f"  cure: {_CURES.get(kind, _CURE)} (model.explain() lists the paths)"
    )
