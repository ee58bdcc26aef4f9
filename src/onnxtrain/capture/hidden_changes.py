"""Changes in place that autograd does not see: of what is written under ``no_grad``, or to a detached tensor.

Eager PyTorch passes gradients on as if nothing had been written. A trace writes such a change so that autograd sees it:
the new content, and the gradient of the old one.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.made_of_parts import is_made_of_others
from onnxtrain.capture.running_statistics import UNCOUNTED, statistics_moved
from onnxtrain.errors import CaptureError, SetUpError

Tensor = torch.Tensor
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
PASSED_ON = "whose gradient eager PyTorch passes on as if nothing had happened"
HOOKS = "_onnxtrain_hooks"  # the attribute of a tensor that has hooks for its gradient (``gradient_hooks``)
_UNCOUNTED = "_onnxtrain_data"
_UNNOTICED = frozenset(f"logical_{name}_" for name in ("not", "and", "or", "xor"))  # by autograd
_HARMLESS = frozenset(("requires_grad_", "detach_", "retain_grad_"))


class HiddenChanges:
    """Sees, while a call is traced, what it changes behind autograd's back.

    Attributes:
        parameters: those of the module that it changes so. Autograd lets nobody write to them where gradients go on:
            another trace has copies in their places (``changed_parameters``).
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self._detached: list[weakref.ref[Tensor]] = []

    def detach(self, tensor: Tensor) -> None:
        """A tensor is detached; of a view, what it is a view of."""
        whole = whole_of(tensor)
        if tensor.requires_grad and not any(known() is whole for known in self._detached):
            self._detached.append(weakref.ref(whole))

    def behind(self, changed: Tensor, name: str) -> list[Tensor]:
        """The tensors whose gradient goes on although they, or parts of them, are changed; none where autograd sees it.

        Those that others were detached from come after these.

        Args:
            changed: the tensor that is written to.
            name: of the function that writes.

        Raises:
            CaptureError: one is an input, or nobody knows which, or a view of one has hooks.
        """
        memory, own = memory_of(changed), whole_of(changed)
        sources = [t for source in reversed(self._detached) if (t := source()) is not None and t is not own]
        if memory is None and sources and not changed.requires_grad:
            raise hidden(name, "under torch.no_grad() or detached,")
        is_seen = torch.is_grad_enabled() and name not in _UNNOTICED
        found = [changed] if changed.requires_grad and not is_seen else []
        found += [t for t in sources if memory is not None and memory_of(t) == memory]
        wholes = [whole_of(t) for t in found if not is_made_in_call(t)]
        self.parameters += [t for t in wholes if t.is_leaf and isinstance(t, torch.nn.Parameter)]
        if any(
            not (t.is_floating_point() or t.is_complex()) or (t.is_leaf and not isinstance(t, torch.nn.Parameter))
            for t in wholes
        ):
            raise hidden(name, "under torch.no_grad() or detached,")
        if wholes and hasattr(own, _UNCOUNTED) and _has_view_with_hooks(memory):
            raise hidden(name, "a view of which has a hook, through .data,")
        return [_recorded(whole, name) for whole in wholes if not whole.is_leaf]

    def is_known(self, changed: Tensor) -> bool:
        """Whether a tensor is among ``parameters``, or a view of one."""
        return any(parameter is whole_of(changed) for parameter in self.parameters)

    def replace_data(self, tensor: Tensor, content: Tensor) -> None:
        """Give a tensor another content, as ``tensor.data = content`` does.

        Args:
            tensor: the tensor.
            content: of the same sizes and type.

        Raises:
            CaptureError: the content has another form, or who shares the tensor's memory would see it too.
        """
        if (tensor.shape, tensor.dtype) != (content.shape, content.dtype):
            raise _refused_data("with a tensor of other sizes, or of another type")
        with torch.no_grad():
            behind = self.behind(tensor, "an assignment to .data")
            if whole_of(tensor) is not tensor or any(other is not tensor for other in behind):
                raise _refused_data("of a view, which no longer is one then")
            content = content.detach().clone()
            write(behind, lambda: tensor.copy_(content))


def uncounted(tensor: Tensor) -> Tensor:
    """What ``.data`` gives: its changes are counted in no version but its own."""
    setattr(tensor, _UNCOUNTED, True)
    return tensor


def _has_view_with_hooks(memory: int | None) -> bool:
    """Whether a view has hooks: those of a view whose version counts a change are not called any more after it."""
    mode: Any = get_proxy_mode()
    tensors = [] if mode is None else mode.tracer.tensor_tracker
    return any(hasattr(t, HOOKS) and t._is_view() and memory_of(t) == memory for t in tensors)


def is_made_in_call(tensor: Tensor) -> bool:
    """Whether it is the parameter of a layer that the call makes: no gradient goes on from there."""
    mode: Any = get_proxy_mode()
    if mode is None or not isinstance(tensor, torch.nn.Parameter):
        return False
    known = mode.tracer.tensor_tracker.get(whole_of(tensor))
    return known is not None and known.proxy.node.op == "call_function"


def _recorded(whole: Tensor, name: str) -> Tensor:
    """A tensor; where it was made within a call, what that returned: a view that is all of it.

    Raises:
        CaptureError: a part alone was returned.
    """
    mode: Any = get_proxy_mode()
    if mode is None or whole in mode.tracer.tensor_tracker:
        return whole
    views = [t for t in mode.tracer.tensor_tracker if whole_of(t) is whole]
    complete = [t for t in views if statically_known_true(t.numel() == whole.numel())]
    if complete:
        return complete[0]
    raise hidden(name, "a part of a result, under torch.no_grad() or detached,")


def write(targets: Sequence[Tensor], change: Callable[[], Any]) -> Any:
    """What a change gives; the gradient of what is changed stays what it is: 1 for each element (0 where not finite).

    Args:
        targets: the tensors.
        change: changes them, or what is in the same memory.
    """
    with torch.enable_grad():
        finite = [torch.where(torch.isfinite(target), target, 0.0) for target in targets]
        nothing = [value - value.detach() for value in finite]
    made = change()
    with torch.enable_grad():
        for target, zeros in zip(targets, nothing, strict=True):
            target.copy_(target.detach() + zeros)
    return made


def refuse_freezing(tensor: Tensor, requires_grad: bool = True) -> None:
    """Raise SetUpError where a forward pass decides whether a parameter of the module is trained."""
    is_own = isinstance(tensor, torch.nn.Parameter) and not is_made_in_call(tensor)
    if is_own and tensor.requires_grad != requires_grad:
        raise SetUpError(["requires_grad"], "sets requires_grad of a parameter")


def _refused_data(how: str) -> CaptureError:
    return CaptureError(
        f"the forward pass replaces the data {how}",
        cure="compute a new tensor and use that, or change the data outside of forward",
    )


class Versions:
    """Sees which tensors are changed in place from now on.

    Args:
        tensors: they, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._before = [(name, tensor, tensor._version, tensor.shape) for name, tensor in tensors.items()]

    def written(self) -> dict[str, Tensor]:
        """Those that were changed, by name: a momentum encoder's parameters, say."""
        return {name: tensor for name, tensor, version, _ in self._before if tensor._version != version}

    def reshaped(self) -> dict[str, Tensor]:
        """Those that have another shape, by name."""
        return {name: tensor for name, tensor, _, shape in self._before if tensor.shape != shape}


def whole_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself where it is none."""
    return tensor if tensor._base is None else tensor._base


def history(tensor: Tensor) -> tuple[int, Any]:
    """How often a tensor was changed, and what autograd knows of it; of a view, of what it is a view of."""
    return tensor._version, whole_of(tensor).grad_fn


def refuse_unnoticed(before: Iterable[tuple[Tensor, tuple[int, Any]]], name: str) -> None:
    """Raise where autograd took no notice of what a function changed, ``logical_not_`` say, or that was a parameter.

    Args:
        before: what may have changed, and the ``history`` that it had.
        name: of the function.

    Raises:
        CaptureError: one is so.
    """
    for changed, (version, function) in before:
        now = history(changed)
        if changed.requires_grad and now[0] != version and now[1] is function:
            raise hidden(name, "which has no gradient of its own,")
        if isinstance(changed, torch.nn.Parameter) and changed.grad_fn is not None and function is None:
            raise hidden(name, "a parameter of the module,")


def hidden(name: str, how: str) -> CaptureError:
    """The error of a change that is refused."""
    return CaptureError(
        f"{name} changes a tensor, {how} {PASSED_ON}",
        cure="write y = x + (changed - x).detach() with a changed copy of x, or change parameters outside of forward",
    )


def is_view_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function changes how a tensor is looked at, not what is in it."""
    packet = getattr(torch.ops.aten, func.__name__, None)
    return packet is not None and any(torch.Tag.inplace_view in getattr(packet, o).tags for o in packet.overloads())


def tensors_written_by(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function writes to: its first argument, or all in that, and ``out``; running statistics."""
    if (statistics := statistics_moved(func, args, kwargs)) is not None:
        return statistics
    first = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("data")))
    is_changed = _is_in_place(func) or _is_asked_to_be_in_place(func, args, kwargs)
    written = [first if is_changed else None, kwargs.get("out")]
    return [x for w in written for x in (w if isinstance(w, list | tuple) else [w]) if isinstance(x, Tensor)]


def is_uncounted(func: Callable[..., Any]) -> bool:
    """Whether tensors without content do not count that a function writes to them."""
    return func in UNCOUNTED or getattr(func, "__name__", "").startswith("_foreach_")


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):  # augmented assignments of floats are methods such as add_
        return func in (Tensor.__setitem__, SET_DATA)
    return name.endswith("_") and name not in _HARMLESS


def _is_asked_to_be_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is told so by an argument, as ``F.relu(x, inplace=True)`` is."""
    place = _place_of_inplace(func)
    return place is not None and bool(kwargs["inplace"] if "inplace" in kwargs else len(args) > place and args[place])


@functools.cache
def _place_of_inplace(func: Callable[..., Any]) -> int | None:
    if getattr(func, "__module__", None) != torch.nn.functional.__name__:
        return None
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else None


class Overwritten(TorchFunctionMode):
    """Keeps, of some tensors, those that functions of torch write to within it, as they were.

    Args:
        tensors: they; no copy is made of those that stay.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        wholes = sorted(tensors, key=torch.numel)  # the largest in a memory is the last
        self._tensors = {place: t for t in wholes if (place := place_in_memory(t)) is not None}
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for place in map(place_in_memory, tensors_written_by(func, args, kwargs or {})):
            if place is not None and place in self._tensors and place not in self._kept:
                own = self._tensors[place]
                with unset_fake_temporarily():
                    self._kept[place] = own, own.detach(), own.detach().clone()
        return func(*args, **(kwargs or {}))

    def take_back(self) -> None:
        """The tensors as they were."""
        for tensor, memory, content in self._kept.values():
            tensor.data = memory
            tensor.data.copy_(content)


def place_in_memory(tensor: Tensor) -> int | None:
    """Where a tensor lies in memory, beneath what ``torch.func`` wraps it in; None where it has none of its own."""
    if isinstance(tensor, FakeTensor) or is_made_of_others(tensor):
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
