"""Trained parameters that a forward pass changes where autograd does not see it: cuts their norm before it reads them.

A trace has copies in the places of such parameters, to which it may write: what a copy becomes is the parameter's new
content after the call, and the gradient passes through the change as if nothing had been written (``hidden_changes``).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture.hidden_changes import hidden
from onnxtrain.capture.keepers import node_of
from onnxtrain.capture.owned_tensors import names_of
from onnxtrain.capture.places import Place, line_that_sets
from onnxtrain.capture.replaced import replaced
from onnxtrain.errors import CaptureError, SetUpError

_NAMES: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


class ChangedParametersError(CaptureError):
    """A trace came upon parameters that the call changes; the next one has copies of them."""


def note(module: torch.nn.Module, parameters: Collection[torch.Tensor]) -> None:
    """From now on traces have copies of some parameters; nothing where there are none.

    Args:
        module: the module.
        parameters: those that a call changes, as the module has them now.

    Raises:
        ChangedParametersError: there are some.
        CaptureError: one is not the module's.
    """
    names = names_of(module)
    found = {names.get(id(parameter), "") for parameter in parameters}
    known = _NAMES.setdefault(module, set())
    if "" in found or found & known:
        raise hidden("the forward pass", "one that is trained and no parameter of the module,")
    known |= found
    if found:
        raise ChangedParametersError(f"the forward pass changes {', '.join(sorted(found))}")


@contextlib.contextmanager
def copies(module: torch.nn.Module) -> Iterator[None]:
    """Within it a module has copies in the places of the parameters that its calls change and that are trained."""
    known, tables = _NAMES.get(module, ()), [m._parameters for m in module.modules()]
    changed = {id(p): p for name, p in module.named_parameters(remove_duplicate=False) if name in known}
    made = {key: p.clone() for key, p in changed.items() if p.requires_grad}  # one for all names of a parameter
    with replaced(*((t, leaf, made[id(p)]) for t in tables for leaf, p in t.items() if id(p) in made)):
        yield


def refuse_trained(
    module: torch.nn.Module, made: Mapping[Place, torch.nn.Parameter], results: Iterable[torch.Tensor]
) -> None:
    """Raise SetUpError where a call sets parameters anew, and trains them then: eager keeps their gradients.

    Args:
        module: the module.
        made: the parameters by place.
        results: what the call returns and leaves.
    """
    mode: Any = get_proxy_mode()
    tracer, nodes = mode.tracer, functools.partial(node_of, mode.tracer)
    ends = {*map(nodes, (t for t in tracer.tensor_tracker if not t.requires_grad))}
    returned = {*map(nodes, (t for t in results if t.requires_grad))}
    for place, parameter in made.items():
        if any(node in returned or _writes(node) for node in _trained_by(nodes(parameter), ends)):
            line = line_that_sets(type(place.owner(module)), place.name)
            raise SetUpError([place.label], f"sets {place.label}: a parameter, and trains it then", line)


def _trained_by(start: torch.fx.Node | None, ends: Collection[torch.fx.Node | None]) -> Iterator[torch.fx.Node]:
    """The recorded nodes through which gradients may come to one, and that one; not through some ends."""
    waiting: list[Any] = [start]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen or node in ends or node is None:
            continue
        seen.add(node)
        yield node
        waiting += [user for user in node.users if user.target is not torch.ops.aten.detach.default]


def _writes(node: torch.fx.Node) -> bool:
    """Whether a call writes to what it is given: nobody knows who reads that."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
