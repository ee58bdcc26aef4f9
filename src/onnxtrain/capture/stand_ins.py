"""Layers that are not traced: where layers are alike, three and the last are, and the others have stand-ins.

A stand-in is called in the place of its layer and gives tensors like those that the layer gives. What it is trusted
on is seen, not guessed: the first layers are watched while they are traced, in all that they read and write, and a
stand-in compares what it is given with what they were. Where anything is otherwise, or somebody asks a stand-in for
more than a call, the module is traced as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from onnxtrain.capture.attribute_reads import watched
from onnxtrain.capture.descriptions import Describer
from onnxtrain.capture.host_random import HostGenerators
from onnxtrain.capture.keepers import Handed, Keepers, Source, is_keeper, node_of, unread_number
from onnxtrain.capture.layer_values import Given, Leaves, is_same, place_of, version_of
from onnxtrain.capture.left_behind import Watch
from onnxtrain.capture.like_layers import HOOKS, Row, names_within
from onnxtrain.capture.readings import CodeWatch, GlobalNames, Unwatched
from onnxtrain.capture.stand_in_modules import UnlikeError, stand_in
from onnxtrain.capture.stand_in_tensors import is_further, known_of, take_out
from onnxtrain.errors import ContentError
from onnxtrain.ir.layers import COPIED, KEPT, MODEL, Layers

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class StandIns:
    """The stand-ins of a module's rows while it is traced.

    Args:
        rows: the rows.
        ignored: names of attributes that do not concern the forward pass.

    Attributes:
        unlike: why the rows are not what they seemed; empty as long as they are.
    """

    def __init__(self, rows: Sequence[Row], ignored: Collection[str] = ()) -> None:
        self.unlike = ""
        self._rows = [_Calls(row, ignored, self._refuse) for row in rows]

    @property
    def layers(self) -> tuple[Layers, ...]:
        """The rows of which layers have stand-ins."""
        return tuple(calls.row.layers for calls in self._rows)

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Within it the stand-ins are in their places."""
        with contextlib.ExitStack() as stack:
            for calls in self._rows:
                stack.enter_context(calls.standing())
            yield

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Within it the module is called; what an earlier trace saw is forgotten: a call may be traced more than once.

        Raises:
            UnlikeError: the earlier one showed that layers are not alike.
        """
        if self.unlike:
            raise UnlikeError(self.unlike)
        for calls in self._rows:
            calls.begin()
        with Unwatched() if self._rows else contextlib.nullcontext():  # without rows a profiler is somebody else's
            yield

    def check_kept(self) -> None:
        """Whether what layers handed to keepers is read by nothing else than by them, and given to the user.

        Raises:
            UnlikeError: it is, and nothing would tell of which layer it is.
        """
        if not any(calls.handed for calls in self._rows):
            return
        mode: Any = get_proxy_mode()
        order = {node.name: at for at, node in enumerate(mode.tracer.graph.nodes)}
        for node in mode.tracer.graph.nodes:
            ends = [order[calls.ends[node.name]] for calls in self._rows if node.name in calls.ends]
            if any(order[user.name] > end for end in ends for user in node.users if not is_further(user)):
                raise self._refuse("what a layer hands over is read by something else")

    def shown(self, output: torch.Tensor) -> torch.Tensor:
        """An output of the module; of what a layer handed to a keeper the graph has to know whose it is."""
        mode: Any = get_proxy_mode()
        handing = [calls for calls in self._rows if calls.handed]
        node = node_of(mode.tracer, output) if handing else None
        for calls in handing:
            if node is not None and node.name in calls.handed:
                return torch.ops.onnxtrain.layers_further(output, calls.row.layers.prefix, calls.handed[node.name])
        return output

    def take_out(self, program: torch.export.ExportedProgram, prefix: str) -> None:
        """Take what stand-ins gave out of a recorded program, which has a prefix before names of parameters.

        Raises:
            UnlikeError: a layer was read by something else than the layer after it, or was not called in its turn.
        """
        if not self.unlike:
            for calls in self._rows:
                calls.check_called()
        if self.unlike:
            raise UnlikeError(self.unlike)
        take_out(program, self.layers, prefix)

    def _refuse(self, why: str) -> UnlikeError:
        self.unlike = self.unlike or why
        for calls in self._rows:  # they hold tensors of the trace, which ends
            calls.begin()
        return UnlikeError(why)


def with_stand_ins(rows: Sequence[Row], ignored: Collection[str], trace: Callable[[StandIns], T]) -> T:
    """A trace with stand-ins for layers; without them where these are not what they seemed.

    Args:
        rows: layers that are alike.
        ignored: names of attributes that do not concern the forward pass.
        trace: traces, and has what the stand-ins gave taken out.
    """
    if rows and sys.getprofile() is None:
        stand_ins = StandIns(rows, ignored)
        try:
            with stand_ins.standing():
                return trace(stand_ins)
        except ContentError:
            raise
        except Exception as error:
            _LOG.info("all layers are traced: %s", stand_ins.unlike or error)
        finally:
            sys.setprofile(None)
    return trace(StandIns(()))


class _Calls:
    """The calls of one row's layers.

    Args:
        row: the layers.
        ignored: names of attributes that do not concern the forward pass.
        refuse: notes why they are not alike, and gives the error.

    Attributes:
        handed: names of the nodes that the traced layers handed to keepers, and that these made of them, with how much
            further each is in a graph of all layers.
        ends: names of such nodes of all layers but the first, with the last node of the layer.
    """

    def __init__(self, row: Row, ignored: Collection[str], refuse: Callable[[str], UnlikeError]) -> None:
        self.row, self._ignored, self._refuse = row, ignored, refuse
        self._kept = {id(m): place for place, m in enumerate(row.kept)}
        self._attributes: list[list[dict[str, int]]] = []
        self._seen: list[_Seen] = []  # of the layers that are traced
        self._next = 0  # of the row
        self._watched: tuple[Any, ...] = ()
        self._keepers: Keepers | None = None  # of the layer that is called
        self._latest = Leaves(None)  # what the layer before gave
        self.handed: dict[str, int] = {}
        self.ends: dict[str, str] = {}

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Within it the stand-ins are in their places, and the other layers are watched."""
        children, first = self.row.owner._modules, self.row.layers.first
        missing = dict(enumerate(self.row.modules[KEPT - 1 : -1], first + KEPT - 1))
        made = {
            str(n): stand_in(layer, functools.partial(self.skip, n - first), self.refuse)
            for n, layer in missing.items()
        }
        with contextlib.ExitStack() as stack:
            stack.callback(self.begin)
            for layer in self.row.kept:
                stack.callback(layer.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._end, with_kwargs=True).remove)
            self._attributes = [_attributes(layer) for layer in self.row.kept]
            for path, name in self.row.differing:
                stack.enter_context(self._unread(path, name, map(id, made.values())))
            stack.callback(children.update, {str(n): layer for n, layer in missing.items()})
            children.update(made)
            yield

    def begin(self) -> None:
        """Forget the calls of an earlier trace."""
        self._close()
        self.handed, self.ends = {}, {}
        self._seen, self._next, self._watched, self._latest = [], 0, (), Leaves(None)

    def _close(self) -> tuple[Handed, ...]:
        """Watch keepers no longer; what was handed to them."""
        keepers, self._keepers = self._keepers, None
        if keepers is not None:
            keepers.close()
        return () if keepers is None else tuple(keepers.handed)

    def check_called(self) -> None:
        """Note where not every layer was called once, in its turn."""
        if self._next != len(self.row.modules):
            self._refuse(f"of {self.row.layers} {self._next} are called in turn")

    def _unread(self, path: str, name: str, stand_ins: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """Watch an attribute that differs: what reads it is not alike, but for a number that is only handed over."""
        source = Source(path, name)
        is_number = all(type(source.number(layer)) is int for layer in self.row.modules)
        parts = {id(layer.get_submodule(path)) for layer in self.row.kept} | ({*stand_ins} if not path else set())

        def tell(owner: Any) -> None:
            if id(owner) in parts and not (is_number and self._keepers is not None):
                raise self.refuse(f"{name} is read, which is another one in each")

        def instead(owner: Any, value: Any) -> Any:
            return unread_number(source, self.refuse) if id(owner) in parts else value

        return watched(type(self.row.modules[0].get_submodule(path)), name, tell, instead=instead)

    def refuse(self, why: str) -> UnlikeError:
        """Note why the layers are not alike; gives the error."""
        return self._refuse(f"{self.row.layers}: {why}")

    def _turn(self, place: int) -> None:
        if place != self._next:
            raise self.refuse("they are not called in turn")
        self._next += 1

    def _begin(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        place = self._kept[id(layer)]
        self._turn(len(self.row.modules) - 1 if place == KEPT - 1 else place)
        if _attributes(layer) != self._attributes[place]:
            raise self.refuse("a layer is not what it was before the call")
        given = Given(args, kwargs)
        self._check_given(given)
        code = CodeWatch(Describer(names_within(layer), while_traced=True))
        self._watched = given, Watch(layer, self._ignored), _state(layer), code
        self._close()  # where the layer before raised
        if any(map(is_keeper, given.leaves)):
            self._keepers = Keepers(layer, given.leaves, self.refuse)
        if place:
            sys.setprofile(code.watch)

    def _end(self, layer: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        sys.setprofile(None)
        given, watch, state, code = self._watched
        handed = self._close()
        is_last = len(self._seen) == KEPT - 1
        self.handed |= {name: self.row.layers.missing * is_last for h in handed for name in h.nodes}
        if handed and self._seen:
            mode: Any = get_proxy_mode()
            end = next(iter(reversed(mode.tracer.graph.nodes))).name
            pairs = zip(handed, self._seen[-1].handed, strict=False)
            self.ends |= {name: self.ends.get(name, end) for h, before in pairs for name in h.own(before)}
        found, why, names = frozenset(code.found), code.unreadable, GlobalNames(code.names)
        code.release()
        changes = watch.changes()
        if changes.left or changes.reformed or _state(layer) != state:
            why = "a call leaves something behind"
        if not given.is_same(Given(args, kwargs)):
            why = "a call changes what it is given"
        if len(self._seen) > 1 and found != self._seen[1].code:
            why = "the code reads something else in each"
        if len(self._seen) > 1 and not _are_like(handed, self._seen[1].handed):
            why = "they do not hand over the same"
        made = Leaves(result)
        if made.shares_memory([*given.leaves, *(x for h in handed for x in h.tensors)]):
            why = "what a layer gives is a view of what else there is"
        if why:
            raise self.refuse(why)
        self._seen.append(_Seen(given, made, found, names, handed))
        self._latest, self._watched = self._seen[-1].result, ()
        if len(self._seen) == KEPT:  # tensors of a trace that there still are after it would be kept by somebody
            self._seen, self._latest = [], Leaves(None)

    def _check_given(self, given: Given) -> None:
        """Whether what a layer is given is what the one before was: the same tensors, and what that one gave."""
        if not self._seen:
            return
        then = self._seen[-1].given
        if given.spec != then.spec or given.ambient != then.ambient:
            raise self.refuse("they are given other arguments")
        for index, (x, y) in enumerate(zip(given.leaves, then.leaves, strict=True)):
            place = place_of(x, self._latest)
            is_next = place is not None and known_of(x) == known_of(y) and self._latest.versions[place] == version_of(x)
            if not is_next and not (is_same(x, y) and then.versions[index] == version_of(x)):
                raise self.refuse(f"argument {index} is another one for each")

    def skip(self, number: int, args: Any, kwargs: Any) -> Any:
        """What a layer that is not traced gives: what the next one is given is like what it was given itself.

        Args:
            number: of the layer in the row.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        self._turn(number)
        given, like = Given(args, kwargs), self._seen[KEPT - 2]
        self._check_given(given)
        before = self._seen[KEPT - 3].result
        if not like.names.are_the_same():
            raise self.refuse("a global name is another in one of them")
        roles = [place_of(x, before) for x in like.given.leaves]
        if roles != [place_of(x, self._latest) for x in given.leaves]:
            raise self.refuse("they are given other results of the layer before")
        self._hand_over(number)
        made = [self._result(i, x, given, like, roles) for i, x in enumerate(like.result.leaves)]
        result = pytree.tree_unflatten(made, like.result.spec)
        self._latest = Leaves(result)
        return result

    def _hand_over(self, number: int) -> None:
        """Hand to keepers what a layer would that is not traced."""

        def further(x: torch.Tensor) -> torch.Tensor:
            made = torch.ops.onnxtrain.layers_further(x, self.row.layers.prefix, 1)  # a known call from the second on
            node: Any = node_of(mode.tracer, made)
            node.update_arg(2, number - COPIED)
            return made

        mode: Any = get_proxy_mode()
        before, like = (self._seen[place].handed for place in (MODEL, COPIED))
        if not all(h.again(self.row.modules[number], b, further) for h, b in zip(like, before, strict=True)):
            raise self.refuse("what is handed over is kept in another way")

    def _result(self, index: int, result: Any, given: Given, like: _Seen, roles: Sequence[int | None]) -> Any:
        if not isinstance(result, torch.Tensor):
            known_of(result)
            return result
        same = next((i for i, x in enumerate(like.given.leaves) if x is result), None)
        if same is not None:
            return given.leaves[same]
        if index not in roles:
            return torch.ops.onnxtrain.like_layer(result, False)
        source = given.leaves[roles.index(index)]
        if known_of(result) != known_of(source):
            raise self.refuse(f"result {index} is of another form than what the layer is given")
        return torch.ops.onnxtrain.like_layer(source, True)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What was seen of a layer that was traced.

    Args:
        given: what it was given.
        result: what it gave.
        code: what its code read.
        names: global names that it read.
        handed: what it handed to objects that keep tensors by layer.
    """

    given: Given
    result: Leaves
    code: frozenset[str]
    names: GlobalNames
    handed: tuple[Handed, ...]


def _are_like(some: Sequence[Handed], others: Sequence[Handed]) -> bool:
    return len(some) == len(others) and all(map(Handed.is_like, some, others))


def _attributes(layer: torch.nn.Module) -> list[dict[str, int]]:
    """The identities of all that the parts of a layer hold but for parameters and buffers, which a trace exchanges."""
    found = []
    for part in layer.modules():
        own = vars(part)
        found.append({n: id(x) for table in (own, own["_modules"]) for n, x in table.items()})
        found[-1] |= {n: len(own[n]) for n in (*HOOKS, "_parameters", "_buffers")}
    return found


def _state(layer: torch.nn.Module) -> Any:
    """What a call may change that is no attribute: contents, and what Python and numpy draw next."""
    return [t._version for t in (*layer.parameters(), *layer.buffers())], HostGenerators(layer).states


__all__ = ["StandIns", "UnlikeError"]
