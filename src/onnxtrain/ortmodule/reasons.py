"""Why no graph serves a call: how it differs from one that a graph was captured for, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from onnxtrain.ortmodule.contents import Contents
from onnxtrain.ortmodule.guards import PARTS, Call, Found, Inspector
from onnxtrain.ortmodule.values import shown


def differences(old: Call, contents: Contents, new: Call, inspector: Inspector) -> list[str]:
    """How a call differs from an earlier one.

    Args:
        old: the earlier one.
        contents: what it read.
        new: the call.
        inspector: of the module.
    """
    found = [f"{label} {how}" for label, how in contents.changed().items()]
    if old.schema.spec != new.schema.spec:
        found += _structure_changes(old, new)
    elif old.schema != new.schema:
        found += _value_changes(old, new)
    elif old.inputs != new.inputs:
        found += _tensor_changes(old.inputs, new.inputs)
    if old.state != new.state:
        found += _state_changes(inspector.found(old.state), inspector.found(new.state))
    if old.ambient != new.ambient:
        found.append("autocast, the default dtype or determinism was switched")
    sizes = "sizes differ that the forward pass compares, or needs as constants"
    return found or [f"{sizes}; or inputs lie in memory in another order"]


def always_another(name: str, graphs: int, reasons: Sequence[str]) -> str:
    """What is said of a module whose state is another one at every call."""
    return (
        f"{name} has {graphs} graphs, and what they stand on is another at every call: {'; '.join(reasons)}; such "
        "calls run in eager PyTorch until two in a row are alike\n"
        "  cure: make it a tensor, which is read at each call: a buffer, or an input; or, if it does not concern the "
        "forward pass, name it in Options(ignored_attributes=...)"
    )


def _state_changes(old: Found, new: Found) -> list[str]:
    if old.structure != new.structure:
        pairs = zip(type(old.structure)._fields, old.structure, new.structure, strict=True)
        return [f"the module was altered: other {', '.join(_altered(*pair) for pair in pairs if pair[1] != pair[2])}"]
    found = [name for name, x, y in zip(PARTS, old.rest, new.rest, strict=True) if x != y]
    return [f"its {name} changed" for name in found] + list(dict.fromkeys(_changed_values(old, new)))


def _altered(name: str, old: Any, new: Any) -> str:
    if name != "labels":
        return name
    before, now = ({n for names in labels for n in names} for labels in (old, new))
    return (
        f"attributes are compared ({', '.join(sorted(before ^ now))})" if before != now else "attributes are compared"
    )


def _changed_values(old: Found, new: Found) -> Iterator[str]:
    for names, x, y in zip(old.structure.labels, old.values, new.values, strict=True):
        for name, before, after in zip(names, x, y, strict=True):
            if before != after:
                yield f"attribute {name} was {shown(before)} and is {shown(after)}"


def _structure_changes(old: Call, new: Call) -> list[str]:
    a, b = _leaves(old), _leaves(new)
    found = [f"input {name} is new" for name in b if name not in a]
    found += [f"input {name} is missing" for name in a if name not in b]
    return found or ["the structure of the inputs is another"]


def _value_changes(old: Call, new: Call) -> list[str]:
    a, b = dict(old.schema.constants), dict(new.schema.constants)
    names = _leaves(new)
    found = []
    for i in sorted({*a, *b}):
        before, now = repr(a[i]) if i in a else "a tensor", repr(b[i]) if i in b else "a tensor"
        if before != now:
            found.append(f"input {names[i]} is {now} and was {before}")
    return found or ["a number among the inputs became a tensor"]


def _leaves(call: Call) -> list[str]:
    """What the caller would call each leaf of the inputs: ``args[0]``, ``labels``, ``batch['ids'][1]``."""
    spec = call.schema.spec
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    return [_name(path) for path, _ in paths]


def _name(path: Sequence[Any]) -> str:
    where, *rest = path[0].idx, *path[1:]
    if where == 0:
        return f"args{pytree.keystr(tuple(rest))}"
    return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"


def _tensor_changes(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    found = []
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        for name, x, y in zip(("dtype", "rank", "device"), a, b, strict=True):
            if x != y:
                found.append(f"{name} of input tensor {i} is {y} and was {x}")
    return found or ["the number of input tensors is another"]
