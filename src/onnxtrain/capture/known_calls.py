"""Calls that a trace has recorded before: the same operator on tensors of the same form is written from the record.

What a call returns is found by running it on tensors without content. With symbolic sizes that is nearly all of what a
trace costs, and a model of many layers makes the same calls in each of them. An operator's result depends on nothing
but its arguments and a few modes; what the call returned in the first layer, it returns in the others: tensors of the
same type and sizes, views of the same argument, with the same guards. Nothing is taken for known of the user's code,
which runs in every layer as it stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain.capture.call_forms import NUMBERS, Form, anew, form_of, has_content, is_of_form, is_plain, unbacked_of
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.substitutes import substitute
from onnxtrain.capture.told_results import told, told_in_place


@dataclasses.dataclass
class Count:
    """How many calls of operators a trace has run and recorded, has written from the record, and have raised."""

    recorded: int = 0
    known: int = 0
    raised: int = 0


@dataclasses.dataclass(frozen=True)
class _Result:
    """One tensor that a call returned.

    Attributes:
        like: its form.
        source: the position of the argument, among the call's leaves, whose memory it is in; None where it has its own.
        is_source: whether it is that argument itself.
    """

    like: FakeTensor
    source: int | None
    is_source: bool


@dataclasses.dataclass(frozen=True)
class _Known:
    results: tuple[_Result, ...]
    kind: type | None  # of the sequence that holds them; None for one tensor


class _View(TorchDispatchMode):
    """Within it views of tensors without content are made at once."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.as_strided.default:
            return func(*args, **(kwargs or {}))
        with in_kernel_invocation_manager(self._fakes):
            inner = func(*args)
        return FakeTensor(self._fakes, inner, args[0].fake_device)


class _Calls:
    """The calls of one recorder."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._known: dict[Form, _Known | None] = {}

    def call(self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """What a call returns; it is in the graph then."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        slots = [mode.tracer.tensor_tracker.get(x) if isinstance(x, torch.Tensor) else None for x in leaves]
        form = _form_of_call(func, spec, leaves, slots)
        known = None if form is None else self._known.get(form)
        if known is not None:
            self._count.known += 1
            return _written(mode.tracer, known, func, leaves, spec, slots)
        self._count.recorded += 1
        if form is not None and (like := told(func, args, kwargs)) is not None:
            known = self._known[form] = _Known((_Result(like, None, False),), None)
            return _written(mode.tracer, known, func, leaves, spec, slots)
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result = _PROXY_CALL(mode, func, pre_dispatch, args, kwargs)
        for value, slot in zip(leaves, slots, strict=True):
            if value is result and slot is not None:  # it goes on as it was, also where nobody differentiates this call
                mode.tracer.tensor_tracker[value] = slot
        if form is not None and form not in self._known:
            self._known[form] = _known(mode.tracer, func, leaves, result, last)
        return result


_PROXY_CALL = proxy_tensor.proxy_call


@substitute(torch.tensor)
def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **named: Any) -> Any:
    """Of nothing, as caches of keys and values begin: a call that can be known, and no constant."""
    return NotImplemented if named or type(data) is not list or data else torch.empty(0, dtype=dtype, device=device)


@substitute(torch.Tensor.contiguous)
def contiguous(self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The tensor itself, or the call: asked here, torch would record the arithmetic of its sizes."""
    if not isinstance(self, FakeTensor):
        return NotImplemented
    if _is_contiguous(self, memory_format):
        return self
    return torch.ops.aten.contiguous.default(self, memory_format=memory_format)


@substitute(torch.Tensor.is_contiguous)
def is_contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The answer, which torch finds from sizes: without a record of their arithmetic.

    An axis of size 1 has no part in it, which is noted where somebody asks for strides.
    """
    if not isinstance(self, FakeTensor):
        return NotImplemented
    self.stride()
    return _is_contiguous(self, memory_format)


def _is_contiguous(self: torch.Tensor, memory_format: torch.memory_format) -> bool:
    with proxy_tensor.disable_proxy_modes_tracing():
        return self.is_contiguous(memory_format=memory_format)


@contextlib.contextmanager
def known_calls() -> Iterator[Count]:
    """Within it, traces write calls from the record where they can."""
    count = Count()
    recorders: dict[int, tuple[Any, _Calls]] = {}

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if not pre_dispatch or not is_of_form(func):
            return _PROXY_CALL(mode, func, pre_dispatch, args, kwargs)
        _, calls = recorders.setdefault(id(mode.tracer), (mode.tracer, _Calls(count)))
        return calls.call(mode, func, pre_dispatch, args, kwargs)

    with replaced((proxy_tensor, "proxy_call", call)), told_in_place():
        yield count


def _form_of_call(func: Any, spec: Any, leaves: Sequence[Any], slots: Sequence[Any]) -> Form | None:
    """What decides on what a call returns; None where it may be more than that, the content of a constant say."""
    tensors = [slot for value, slot in zip(leaves, slots, strict=True) if isinstance(value, torch.Tensor)]
    if any(slot is None or has_content(slot.constant) for slot in tensors):
        return None
    if tensors and all(slot.constant is not None for slot in tensors):
        return None  # so is what it returns
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # within vmap no copy of what it returns can be made
    return form_of(func, spec, leaves)


def _known(tracer: Any, func: Any, leaves: Sequence[Any], result: Any, last: Any) -> _Known | None:
    """What was recorded of a call; None where that does not tell what another call returns."""
    results = result if isinstance(result, tuple | list) else (result,)
    if not results or not all(isinstance(r, FakeTensor) and is_plain(r) for r in results):
        return None
    nodes = _nodes_after(tracer.graph, last)
    if sum(n.target is func for n in nodes) != 1 or unbacked_of(results) - unbacked_of(leaves):
        return None
    given = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    memories = [x.untyped_storage()._cdata for _, x in given]
    places = {memory: i for memory, (i, _) in zip(memories, given, strict=True)}
    found = []
    for one in results:
        slot = tracer.tensor_tracker.get(one)
        source = places.get(one.untyped_storage()._cdata)
        is_told = len(places) == len(given)  # whose memory it is in
        is_source = source is not None and leaves[source] is one
        is_known = source is None or (is_told and _is_plain_view(one, leaves[source], func))
        if slot is None or not is_known or (is_source and len(results) > 1):
            return None
        found.append(_Result(one if is_source else _copied(one), source, is_source))
    return _Known(tuple(found), type(result) if isinstance(result, tuple | list) else None)


def _is_plain_view(view: FakeTensor, source: torch.Tensor, func: Any) -> bool:
    """Whether autograd and memory have it that strides tell a view; a detached one is none to autograd."""
    is_differentiable = source.requires_grad and torch.is_grad_enabled()
    return view is source or (
        func is not torch.ops.aten.detach.default
        and view.dtype == source.dtype
        and view.requires_grad == is_differentiable
    )


def _nodes_after(graph: Any, last: Any) -> list[Any]:
    nodes = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes


def _copied(value: FakeTensor) -> Any:
    made = fast_detach(value.fake_mode, value)
    return made.requires_grad_() if value.requires_grad else made


def _written(tracer: Any, known: _Known, func: Any, leaves: Sequence[Any], spec: Any, slots: Sequence[Any]) -> Any:
    """Write a call whose results are known; one that returns an argument as it is needs no node."""
    if known.kind is None and known.results[0].is_source:
        return leaves[known.results[0].source]  # type: ignore[index]
    symbols, pairs = proxy_tensor.fetch_sym_proxy(tracer), zip(slots, leaves, strict=True)
    proxies = [s.proxy if s else symbols(x) if isinstance(x, NUMBERS) else x for s, x in pairs]
    args, kwargs = pytree.tree_unflatten(proxies, spec)
    proxy = tracer.create_proxy(
        "call_function", func, args, kwargs, name=tracer.graph._target_to_str(func.overloadpacket.__name__)
    )
    made = [_made(r, leaves) for r in known.results]
    for i, one in enumerate(made):
        named = proxy if known.kind is None else proxy[i]
        proxy_tensor.track_tensor(one, named, constant=None, tracer=tracer)
        named.node.meta["val"] = fast_detach(one.fake_mode, one)
    if known.kind is None:
        return made[0]
    proxy.node.meta["val"] = known.kind([p.meta["val"] for p in proxy.node.users])
    return known.kind(made)


def _made(result: _Result, leaves: Sequence[Any]) -> Any:
    """A tensor like the one that was returned before."""
    if result.is_source:
        return leaves[result.source]  # type: ignore[index]
    like = result.like
    if result.source is None:
        return anew(like)
    mode = like.fake_mode
    silent = contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()
    with proxy_tensor.disable_proxy_modes_tracing(), _View(mode), silent:
        return torch.ops.aten.as_strided.default(  # as autograd sees it
            leaves[result.source], like.shape, like.stride(), like.storage_offset()
        )


__all__ = ["Count", "known_calls"]
