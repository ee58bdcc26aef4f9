"""Which layers of a module are alike: of one class, with parameters of one form and equal attributes.

An attribute that is a plain value and another one in each layer (a number of the layer) is no difference as long as
nothing reads it, which is watched while the module is traced (``stand_ins``).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.attribute_reads import OWN
from onnxtrain.capture.descriptions import PLAIN, Describer, TooMuchError
from onnxtrain.ir.layers import KEPT, Layers

LEAST = KEPT + 2  # layers of a row: of fewer, all are traced
HOOKS = tuple(n for n in OWN if n.endswith("_hooks") and "state_dict" not in n)


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers that are alike.

    Args:
        layers: where they are.
        owner: the module whose children they are.
        modules: the layers in order.
        differing: names of the attributes that are another value in each of them, with the paths of their owners.
    """

    layers: Layers
    owner: torch.nn.Module
    modules: tuple[torch.nn.Module, ...]
    differing: frozenset[tuple[str, str]]

    @property
    def kept(self) -> tuple[torch.nn.Module, ...]:
        """Those that are traced: the first three and the last."""
        return (*self.modules[: KEPT - 1], self.modules[-1])


def rows_of(module: torch.nn.Module, ignored: Collection[str] = ()) -> tuple[Row, ...]:
    """The rows of a module, each of six layers or more; none lies within a layer of another.

    Args:
        module: the module.
        ignored: names of attributes that do not concern the forward pass.
    """
    found: list[Row] = []
    owners = _owners(module)
    for path, owner in module.named_modules():
        if any(_is_within(path, row.layers) for row in found):
            continue
        for children in _numbered(owner):
            found += _rows(path, owner, children, owners, ignored)
    return tuple(found)


def _is_within(path: str, layers: Layers) -> bool:
    return path.startswith(f"{layers.prefix}." if layers.prefix else "") and path != layers.prefix


def _numbered(owner: torch.nn.Module) -> Iterator[list[tuple[int, torch.nn.Module]]]:
    """Children that follow on each other, numbered, and of one class."""
    named = [(int(n), m) for n, m in owner._modules.items() if n.isdecimal() and m is not None]
    run: list[tuple[int, torch.nn.Module]] = []
    for number, child in named:
        if run and (number != run[-1][0] + 1 or type(child) is not type(run[-1][1])):
            yield run
            run = []
        run.append((number, child))
    yield run


def _rows(
    path: str,
    owner: torch.nn.Module,
    children: Sequence[tuple[int, torch.nn.Module]],
    owners: Mapping[int, int],
    ignored: Collection[str],
) -> Iterator[Row]:
    """The rows among children of one class."""
    if len(children) < LEAST:
        return
    run: list[tuple[int, torch.nn.Module]] = []
    differing: set[tuple[str, str]] = set()
    for number, child in (*children, (0, None)):
        differs = None if child is None or not run else _differences(run[-1][1], child, owners, ignored)
        if run and differs is None:
            if len(run) >= LEAST:
                row = Layers(path, run[0][0], run[-1][0])
                yield Row(row, owner, tuple(m for _, m in run), frozenset(differing))
            run, differing = [], set()
        differing |= differs or set()
        run += [] if child is None else [(number, child)]


def _owners(module: torch.nn.Module) -> dict[int, int]:
    """How many places hold each parameter and buffer, and each module."""
    count: collections.Counter[int] = collections.Counter()
    for _, part in module.named_modules(remove_duplicate=False):
        count[id(part)] += 1
        count.update(id(t) for t in (*part._parameters.values(), *part._buffers.values()) if t is not None)
    return count


def _differences(
    one: torch.nn.Module, other: torch.nn.Module, owners: Mapping[int, int], ignored: Collection[str]
) -> set[tuple[str, str]] | None:
    """The attributes that are another plain value in the second of two layers; None where they differ in more."""
    found: set[tuple[str, str]] = set()
    parts = [list(layer.named_modules(remove_duplicate=False)) for layer in (one, other)]
    if [p for p, _ in parts[0]] != [p for p, _ in parts[1]]:
        return None
    describers = [Describer(names_within(layer)) for layer in (one, other)]
    for (path, a), (_, b) in zip(*parts, strict=True):
        if type(a) is not type(b) or not _are_of_one_form(a, b) or any(owners[id(x)] > 1 for x in _held(a, b)):
            return None
        tables = [{n: v for n, v in vars(x).items() if n not in OWN and n not in ignored} for x in (a, b)]
        if tables[0].keys() != tables[1].keys() or any(vars(x).get(n) for x in (a, b) for n in HOOKS):
            return None
        for name in tables[0]:
            x, y = tables[0][name], tables[1][name]
            if x is y or (type(x) is type(y) and type(x) in PLAIN and x == y):
                continue
            if type(x) in PLAIN and type(y) in PLAIN:
                found.add((path, name))
            elif not _are_described_alike(x, y, *describers):
                return None
    return found


def names_within(layer: torch.nn.Module) -> dict[int, str]:
    """Names of the parts, parameters and buffers of a layer, from the layer on, by identity."""
    named = {id(x): f"module {n}" for n, x in layer.named_modules()}
    named |= {id(x): f"parameter {n}" for n, x in layer.named_parameters()}
    return named | {id(x): f"buffer {n}" for n, x in layer.named_buffers()}


def _held(*modules: torch.nn.Module) -> Iterator[Any]:
    for module in modules:
        yield module
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _are_of_one_form(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    for one, other in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
        if list(one) != list(other):
            return False
        if any(_form(x) != _form(y) for x, y in zip(one.values(), other.values(), strict=True)):
            return False
    return True


def _form(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad


def _are_described_alike(x: Any, y: Any, first: Describer, second: Describer) -> bool:
    try:
        return first.text(x) == second.text(y)
    except (TooMuchError, RecursionError):
        return False
