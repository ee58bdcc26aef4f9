"""Modules inside of the captured one whose parameters DeepSpeed's ZeRO stage 3 has in shards.

DeepSpeed gathers the parameters of a module by hooks of it, which a graph in the place of those around it does not
call. So its programs call what these hooks call, DeepSpeed's coordinator: before the first operator that reads a
module's parameters, and after the last. What stays, and what is fetched ahead, it decides as ever. Gradients reach it
by hooks of the parameters.

A parameter in shards is the same object as when it is whole, of no elements. What a graph needs to know of it, its
shape, DeepSpeed keeps.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from onnxtrain.errors import ModuleError
from onnxtrain.execute.torch.effects import is_silent

BOOKKEEPING = (  # attributes that DeepSpeed sets on a module whose hooks gather, and looks up in its ``__dict__``
    *("ds_id", "ds_recompute_parameters", "ds_grads_remaining", "ds_inflight_param_registry", "ds_model_granularity"),
    *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"),
    *("_external_params", "ds_external_parameters", "all_parameters", "_original_parameters"),
)
_HOME = "deepspeed.runtime.zero.parameter_offload"
# Methods of DeepSpeed that gather a module's parameters, and give them back.
_FORWARD_CALLS = ("pre_sub_module_forward_function", "post_sub_module_forward_function")
_BACKWARD_CALLS = ("pre_sub_module_backward_function", "post_sub_module_backward_function")
_FORWARD_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_TABLES = (*_FORWARD_TABLES, "_backward_hooks")
_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, ZeroShards] = weakref.WeakKeyDictionary()
_UNDISCOVERED: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("onnxtrain_undiscovered", default=())


def is_in_shards(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed gathers it, and gives it back."""
    return hasattr(tensor, "ds_status")


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape that it has where it is whole."""
    return getattr(tensor, "ds_shape", tensor.shape)


@contextlib.contextmanager
def no_discovery(module: torch.nn.Module) -> Iterator[None]:
    """Within it a parameter that is looked at stays where it is, which DeepSpeed gathers in the forward pass."""
    if not getattr(module._parameters, "_in_forward", False):
        yield
        return
    tables: list[Any] = [m._parameters for m in module.modules() if getattr(m._parameters, "_in_forward", False)]
    token = _UNDISCOVERED.set(tables)
    _discover(tables, False)
    try:
        yield
    finally:
        _discover(tables, True)
        _UNDISCOVERED.reset(token)


@contextlib.contextmanager
def discovery() -> Iterator[None]:
    """Within it DeepSpeed gathers what is looked at again: the forward pass runs in eager PyTorch."""
    tables = _UNDISCOVERED.get()
    _discover(tables, True)
    try:
        yield
    finally:
        _discover(tables, False)


def _discover(tables: Sequence[Any], discovers: bool) -> None:
    for table in tables:
        table._in_forward = discovers


@contextlib.contextmanager
def plain_linear() -> Iterator[None]:
    """Within it ``F.linear`` is PyTorch's, for which DeepSpeed puts an autograd function that computes the same."""
    functional: Any = torch.nn.functional
    replaced = functional.linear
    if getattr(replaced, "__module__", None) != "deepspeed.runtime.zero.linear":
        yield
        return
    functional.linear = torch._C._nn.linear
    try:
        yield
    finally:
        functional.linear = replaced


def zero_shards_of(module: torch.nn.Module) -> ZeroShards | None:
    """What gathers the parameters of modules inside of this one; None where DeepSpeed gathers none."""
    if _HOME not in sys.modules or not any(map(is_in_shards, module.parameters())):
        return None
    inner = [m for m in module.modules() if m is not module and _hooks_of(m)]
    known = _KNOWN.get(module)
    if inner and (known is None or known.inner != inner):
        known = _KNOWN[module] = ZeroShards(module, inner)
    return known if inner else None


class InShardsError(ModuleError):
    """Where a forward pass looks into tensors, ranks may go different ways, and what they gather would not match.

    Args:
        module: the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(
            f"{type(module).__name__} looks into tensors, and its parameters are in shards",
            cure="call it in a step of training before: its parameters are gathered as a whole from then on",
        )


def gather_as_whole(module: torch.nn.Module) -> None:
    """Have DeepSpeed gather all parameters inside of a module around its calls, and none of modules inside; and now.

    Args:
        module: within a call of it, after DeepSpeed's hook.
    """
    home: Any = sys.modules[_HOME]
    known = {id(p) for p in module.parameters(recurse=False)}
    for inner in [m for m in module.modules() if m is not module]:
        _drop_hooks(inner.__dict__[name] for name in _FORWARD_TABLES)
        for parameter in inner.parameters(recurse=False):
            if id(parameter) not in known:
                known.add(id(parameter))
                home.register_external_parameter(module, parameter)
                if parameter.shape != shape_of(parameter):
                    parameter.all_gather()  # type: ignore[operator]


class ZeroShards:
    """The parameters that DeepSpeed gathers for modules inside of a captured one.

    Args:
        module: the captured one; what is its own is gathered by hooks around it.
        inner: the modules inside that have DeepSpeed's hooks.
    """

    def __init__(self, module: torch.nn.Module, inner: Sequence[torch.nn.Module]) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        known = {id(p): p for p in module.parameters(recurse=False)}  # a parameter of several is the first one's
        self.inner, self._owners, self.groups = [*inner], list[torch.nn.Module](), list[frozenset[str]]()
        self._group_of: dict[int, int] = {}
        for each in inner:
            own = {id(p): p for p in each.parameters(recurse=_is_leaf(each)) if id(p) not in known}
            if own:
                known |= own
                self._group_of |= dict.fromkeys(own, len(self.groups))
                self._owners.append(each)
                self.groups.append(frozenset(name for key in own for name in names[key]))
        self._parameters = [*known.values()]
        self._nodes: dict[int, Any] = {}  # what accumulates the gradient of a parameter, made for its whole shape
        self._missing = [0] * len(self.groups)  # gradients that a backward pass still has to bring

    @property
    def ranks(self) -> list[int]:
        """Those that gather together."""
        return dist.get_process_group_ranks(self._parameters[0].ds_process_group)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it parameters have their shape, though no content, and modules no hooks of DeepSpeed."""
        tables = [(m.__dict__[name], dict(m.__dict__[name])) for m in self.inner for name in _TABLES]
        _drop_hooks(table for table, _ in tables)
        with _shaped(self._parameters):
            try:
                yield
            finally:
                for table, before in tables:
                    table.clear()
                    table.update(before)

    def gathered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters themselves: they have content while a program has entered their group."""
        fresh = [t for t in tensors if t.requires_grad and id(t) not in self._nodes and is_in_shards(t)]
        with _shaped(fresh):  # which autograd compares with the gradient's
            self._nodes |= {id(tensor): get_gradient_edge(tensor).node for tensor in fresh}
        for tensor in fresh:
            _accumulate_in_shards(tensor, self)
        return [*tensors]

    def enter(self, group: int) -> None:
        """Gather a group for the forward pass."""
        if self._call(group, _FORWARD_CALLS[0]):
            sys.modules[_HOME].FWD_MODULE_STACK.pop()  # it is for modules that are called

    def leave(self, group: int) -> None:
        """Give a group back after the forward pass, if it is to be."""
        self._call(group, _FORWARD_CALLS[1])

    def begin_backward(self, gradients: Sequence[int]) -> None:
        """A backward pass begins, which gives so many gradients for the parameters of each group."""
        self._missing = [*gradients]

    def enter_backward(self, group: int) -> None:
        """Gather a group for the backward pass."""
        self._call(group, _BACKWARD_CALLS[0])

    def leave_backward(self, group: int) -> None:
        """Give a group back after the backward pass, if it is to be."""
        self._call(group, _BACKWARD_CALLS[1])

    def arrived(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient; those of a leaf module DeepSpeed takes together, by a hook of it."""
        group = self._group_of.get(id(parameter))
        if group is None or not _is_leaf(owner := self._owners[group]):
            return
        self._missing[group] -= 1
        if self._missing[group] == 0:
            with _shaped(owner.parameters()):
                for hook in filter(_is_of_deepspeed, owner.__dict__["_backward_hooks"].values()):
                    hook(owner, None, None)

    def _call(self, group: int, name: str) -> bool:
        """Call a method of DeepSpeed for a group, unless the step is not observed; whether it was called."""
        if is_silent():
            return False
        owner = self._owners[group]
        getattr(_offload_of(owner), name)(owner)
        return True


def _is_leaf(module: torch.nn.Module) -> bool:
    """Whether DeepSpeed takes a module and all within it as one, as it does experts: the batch says which are read."""
    return bool(getattr(module, "_z3_leaf", False))


def _accumulate_in_shards(parameter: torch.Tensor, shards: ZeroShards) -> None:
    """Have a parameter its shape, though no content, while autograd accumulates its gradient, which asks for it."""
    this, of = weakref.ref(parameter), weakref.ref(shards)

    def before(gradient: torch.Tensor) -> None:
        held = this()
        if held is not None and held.shape != shape_of(held):
            held.data = _without_memory(held)

    def after(held: torch.Tensor) -> None:
        if held.numel() and not held.untyped_storage().nbytes():
            held.data = held.new_empty(0)
        if (gathering := of()) is not None:
            gathering.arrived(held)

    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of a parameter in shards, in memory of no bytes."""
    made = torch.empty(shape_of(parameter), dtype=parameter.dtype, device=parameter.device)
    made.untyped_storage().resize_(0)
    return made


@contextlib.contextmanager
def _shaped(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it parameters in shards have their shape, in memory of no bytes."""
    small = [(p, p.data) for p in parameters if p.shape != shape_of(p)]
    for tensor, _ in small:
        tensor.data = _without_memory(tensor)
    try:
        yield
    finally:
        for tensor, content in small:
            tensor.data = content


def _is_of_deepspeed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def _drop_hooks(tables: Iterable[dict[int, Any]]) -> None:
    """Take DeepSpeed's hooks out of tables of hooks."""
    for table in tables:
        for key in [key for key, hook in table.items() if _is_of_deepspeed(hook)]:
            del table[key]


def _hooks_of(module: torch.nn.Module) -> list[Any]:
    """DeepSpeed's hooks before the forward pass of a module."""
    return [hook for hook in module.__dict__[_TABLES[0]].values() if _is_of_deepspeed(hook)]


def _offload_of(module: torch.nn.Module) -> Any:
    """DeepSpeed's object that gathers the parameters of a module, and gives them back.

    Raises:
        ModuleError: it is not there, or another one than is known.
    """
    for hook in _hooks_of(module):
        function: Any = inspect.unwrap(hook)
        names, cells = function.__code__.co_freevars, function.__closure__
        if "self" in names and hasattr(found := cells[names.index("self")].cell_contents, _BACKWARD_CALLS[0]):
            return found
    version = getattr(sys.modules.get("deepspeed"), "__version__", "that is not installed")
    raise ModuleError(
        f"what gathers the parameters of a {type(module).__name__} is not found in DeepSpeed {version}",
        cure="call the module while its DeepSpeed engine is there; install deepspeed 0.19; or use stage 1 or 2",
    )


__all__ = [
    "BOOKKEEPING",
    "InShardsError",
    "ZeroShards",
    "discovery",
    "gather_as_whole",
    "is_in_shards",
    "no_discovery",
    "plain_linear",
    "shape_of",
    "zero_shards_of",
]
