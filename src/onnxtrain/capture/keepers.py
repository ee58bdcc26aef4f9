"""Objects that keep tensors by layer, as the caches of keys and values of Transformers do, while layers are traced.

A layer hands them tensors with its number, ``cache.update(keys, values, layer_idx)``, and reads what it is given back.
That is all that it may do with one, and all that it may do with its number: then it is like the others, and for a
layer that is not traced the same is handed over with that layer's number. The keeper's own code runs; what it
computes must be the same each time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.stand_in_modules import Refuse
from onnxtrain.capture.stand_in_tensors import known_of

_METHOD, _NUMBER = "update", "layer_idx"
_SMALL = 16  # elements of a constant that is compared with another one
_COPIES = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.detach_.default, torch.ops.aten.detach.default)
_LEFT = ("__class__", "__dict__", "__doc__", "__init_subclass__", "__module__", "__new__", "__subclasshook__")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a layer has its number: the path of a part, and the name of the attribute."""

    path: str
    name: str

    def number(self, layer: torch.nn.Module) -> Any:
        """The number of a layer; whatever it is that the attribute holds."""
        return vars(layer.get_submodule(self.path))[self.name]


class _Number:
    """What is read as the number of a layer: it may be handed to a keeper, and nothing may be asked of it."""

    __slots__ = ("source",)


_SOURCE: Any = _Number.__dict__["source"]  # which ``__getattribute__`` does not refuse


def unread_number(source: Source, refuse: Refuse) -> Any:
    """What is read in the place of a layer's number.

    Args:
        source: where the layer has it.
        refuse: notes that something is asked of it.
    """

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise refuse(f"{source.name} is read, which is another one in each")

    made = object.__new__(type("Number", (_Number,), {**_special(int, refused), "__slots__": ()}))
    _SOURCE.__set__(made, source)
    return made


def _special(kind: type, refused: Callable[..., Any]) -> dict[str, Any]:
    """The special methods of a class, all refused."""
    names = [n for n in dir(kind) if n.startswith("__") and n.endswith("__") and n not in _LEFT]
    return {n: refused for n in names if callable(inspect.getattr_static(kind, n))}


def is_keeper(value: Any) -> bool:
    """Whether an object keeps tensors by layer: it has a method ``update`` with an argument ``layer_idx``."""
    return not issubclass(type(value), torch.Tensor | torch.nn.Module) and _keeps(type(value))


@functools.lru_cache(1024)
def _keeps(kind: type) -> bool:
    method = inspect.getattr_static(kind, _METHOD, None)
    return isinstance(method, types.FunctionType) and _NUMBER in inspect.signature(method).parameters


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a layer handed to a keeper.

    Args:
        keeper: the object.
        leaves: the arguments.
        spec: their structure.
        done: the operators that the keeper called, and what it gave back: of which form, and from where.
        nodes: names of the recorded nodes that gave the tensors which were handed over, and of those of the keeper.
        names: for each argument the name of the node that gave it; empty where none did.
    """

    keeper: Any
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    done: Any
    nodes: frozenset[str]
    names: tuple[str, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that were handed over."""
        return [x for x in self.leaves if issubclass(type(x), torch.Tensor)]

    def own(self, before: Handed) -> frozenset[str]:
        """The nodes of tensors without those of what the layer before handed over, too."""
        both = zip(self.leaves, before.leaves, self.names, strict=False)
        return self.nodes - {name for x, y, name in both if x is y}

    def is_like(self, other: Handed) -> bool:
        """Whether another layer handed over the same but for tensors, and the keeper did the same with it."""
        is_same = self.keeper is other.keeper and self.spec == other.spec and self.done == other.done
        return is_same and [*map(_form, self.leaves)] == [*map(_form, other.leaves)]

    def again(self, layer: torch.nn.Module, before: Handed, further: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Hand over what a layer that is not traced would; whether the keeper did the same with it.

        Args:
            layer: that layer.
            before: the call of the layer before this one: tensors of both are the same for all.
            further: gives that layer's tensor which is like one of this layer.
        """
        both = zip(self.leaves, before.leaves, strict=True)
        own = {id(x): x for x, y in both if issubclass(type(x), torch.Tensor) and x is not y}
        made = {key: further(x) for key, x in own.items()}
        leaves = [made.get(id(x), x) for x in self.leaves]
        return _hand(self.keeper, leaves, self.spec, layer)[0].done == self.done


class Keepers:
    """The keepers that a layer is given, while it is called: they are watched until they are closed.

    Args:
        layer: the layer.
        given: what it is given.
        refuse: notes what else is done with them.

    Attributes:
        handed: what the layer handed to them.
    """

    def __init__(self, layer: torch.nn.Module, given: Iterable[Any], refuse: Refuse) -> None:
        self.handed: list[Handed] = []
        self._layer, self._refuse = layer, refuse
        self._kinds: list[tuple[Any, type]] = []
        try:
            for keeper in {id(x): x for x in given if is_keeper(x)}.values():
                self._kinds.append((keeper, type(keeper)))
                _be(keeper, self._watched(type(keeper)))
        except TypeError:  # of a class with slots
            self.close()
            raise refuse("what keeps tensors by layer cannot be watched") from None

    def close(self) -> None:
        """Let them be what they were."""
        while self._kinds:
            _be(*self._kinds.pop())

    def _watched(self, kind: type) -> type:
        """A class of which nothing but the method that hands over may be used."""

        def refused(keeper: Any, *args: Any, **kwargs: Any) -> Any:
            raise self._refuse(f"something else is asked of {kind.__name__} than to keep tensors")

        def read(keeper: Any, name: str) -> Any:
            if name == "__class__":
                return kind
            return functools.partial(self._hand, keeper, kind) if name == _METHOD else refused(keeper)

        return type(kind.__name__, (kind,), _special(kind, refused) | {"__getattribute__": read})

    def _hand(self, keeper: Any, kind: type, *args: Any, **kwargs: Any) -> Any:
        watched = type(keeper)
        _be(keeper, kind)
        try:
            made, result = _hand(keeper, *pytree.tree_flatten((args, kwargs)), self._layer)
        finally:
            _be(keeper, watched)
        self.handed.append(made)
        return result


def _be(value: Any, kind: type) -> None:
    object.__setattr__(value, "__class__", kind)


def _hand(keeper: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, layer: torch.nn.Module) -> tuple[Handed, Any]:
    """Hand something to a keeper; what was handed over, and what the keeper gives back."""
    given = [_SOURCE.__get__(x).number(layer) if issubclass(type(x), _Number) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(given, spec)
    mode: Any = get_proxy_mode()
    mark = next(iter(reversed(mode.tracer.graph.nodes)))
    result = getattr(keeper, _METHOD)(*args, **kwargs)
    calls, place = _calls(mode.tracer, mark, given)
    done = calls, [(known_of(x), _origin(mode.tracer, x, place)) for x in pytree.tree_leaves(result)]
    names = tuple(node.name if (node := node_of(mode.tracer, x)) is not None else "" for x in given)
    return Handed(keeper, tuple(leaves), spec, done, frozenset(n.name for n in place if _is_tensor(n)), names), result


def _origin(tracer: Any, value: Any, place: Mapping[torch.fx.Node, Any]) -> Any:
    """Where a tensor comes from: from among the calls or what was given, or which other one it is."""
    if not isinstance(value, torch.Tensor):
        return None
    node = node_of(tracer, value)
    return id(value) if node is None else place.get(node, node)


def _is_tensor(node: torch.fx.Node) -> bool:
    """Whether a node gives a tensor, and no size."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def node_of(tracer: Any, value: Any) -> torch.fx.Node | None:
    """The recorded node that gave a tensor; None where none did, or the value is none."""
    is_tracked = issubclass(type(value), torch.Tensor) and value in tracer.tensor_tracker
    return tracer.tensor_tracker[value].proxy.node if is_tracked else None


def _calls(tracer: Any, mark: torch.fx.Node, given: Sequence[Any]) -> tuple[list[Any], Mapping[torch.fx.Node, Any]]:
    """The calls of operators since a node, told by where among them or what is given their arguments come from.

    Returns:
        The calls, and where their nodes and those of the tensors that are given come from.
    """
    place: dict[torch.fx.Node, Any] = {}
    for at, value in enumerate(given):
        if (made := node_of(tracer, value)) is not None:
            place.setdefault(made, ("given", at))
    found: list[Any] = []
    node = mark.next

    def told(read: torch.fx.Node) -> Any:
        return place[read] if read in place else _constant(tracer.root, read)

    while node.op != "root":
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), told)
        found.append((node.op, _constant(tracer.root, node) if node.op == "get_attr" else node.target, args, kwargs))
        place[node] = ("made", len(found))
        node = node.next
    return found, place


def _constant(root: Any, node: torch.fx.Node) -> Any:
    """What tells a constant from others, by its content where that is little; of what is none, which node it is."""
    read: Any = node
    while read.target in _COPIES:
        read = read.args[0]
    value = getattr(root, str(read.target), None) if read.op == "get_attr" else None
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # so that nobody sees it read
        if not isinstance(value, torch.Tensor) or value.numel() > _SMALL:
            return node
        return value.dtype, value.device, tuple(value.shape), repr(value.tolist())


def _form(value: Any) -> Any:
    if issubclass(type(value), _Number):
        return _SOURCE.__get__(value)
    return known_of(value)
