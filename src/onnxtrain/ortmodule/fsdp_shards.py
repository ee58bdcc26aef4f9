"""Modules inside of the captured one that FSDP2 shards: their parameters are gathered while the graph reads them.

``fully_shard`` puts hooks on a module, which a graph in the place of those around it does not call. So its
programs call what these hooks call: a group of parameters is gathered before the first operator that reads one, and
given back after the last; its gradients are reduced once they are all there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onnxtrain.errors import ModuleError
from onnxtrain.execute.torch.effects import is_silent

_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, FsdpShards] = weakref.WeakKeyDictionary()


def fsdp_shards_of(module: torch.nn.Module) -> FsdpShards | None:
    """What gathers the parameters of modules inside of this one; None where none is sharded on its own."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    states = _states_within(module)
    known = _KNOWN.get(module)
    if not states:
        return None
    if known is None or known.states != states:
        known = _KNOWN[module] = FsdpShards(module, states)
    return known


def gathered_later(module: torch.nn.Module) -> set[int]:
    """The identities of parameters in shards that FSDP2 gathers when the module is called, or a graph in its place."""
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    groups = (group for state in _states(module.modules()) for group in _groups_of(state))
    return {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}


@contextlib.contextmanager
def root_gathered(*modules: torch.nn.Module) -> Iterator[None]:
    """Within it the parameters that FSDP2 shards for a module itself are whole, which its hooks do when it is called.

    Args:
        modules: the module, and what stands for it; one of them at most is sharded.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded: Any = next((m for m in modules if fsdp is not None and issubclass(type(m), fsdp.FSDPModule)), None)
    if sharded is None:
        yield
        return
    sharded._get_fsdp_state()._lazy_init()
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()


class FsdpShards:
    """The groups of parameters that FSDP2 gathers for modules inside of a captured one.

    Args:
        module: the captured one; what shards itself as a whole are hooks around it.
        states: FSDP2's, of modules inside.
    """

    def __init__(self, module: torch.nn.Module, states: Sequence[Any]) -> None:
        self.states = [*states]
        self._groups = [group for state in states for group in _groups_of(state)]
        names = {(id(owner), leaf): name for name, owner, leaf in _places(module)}
        self.groups = [frozenset(_names_of(group, names)) for group in self._groups]
        self._missing = [0] * len(self._groups)  # gradients that a backward pass still has to bring
        self._read = [False] * len(self._groups)  # whether its programs have yet to read them
        self._watched: set[int] = set()

    @property
    def ranks(self) -> list[int]:
        """Those that gather together."""
        return dist.get_process_group_ranks(self._groups[0].mesh_info.shard_process_group)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it modules have their gathered parameters, which need not be there, and no hooks of FSDP2."""
        self._gather_once()
        for parameter in self._parameters():
            parameter._setattr_on_modules(parameter.unsharded_param)
        hooks = [(table, dict(table)) for state in self.states for table in _tables(state)]
        for state in self.states:
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
        try:
            yield
        finally:
            for table, before in hooks:
                table.clear()
                table.update(before)
            for group in self._groups:
                for parameter in group.fsdp_params if group.is_sharded else ():
                    parameter._setattr_on_modules(parameter.sharded_param)

    def gathered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For parameters in shards the gathered ones, which have content while a program has entered their group."""
        known = {id(p.sharded_param): p.unsharded_param for p in self._parameters()}
        return [known.get(id(tensor), tensor) for tensor in tensors]

    def enter(self, group: int) -> None:
        """Gather a group for the forward pass."""
        if not is_silent():
            self._groups[group].pre_forward(None, (), {})

    def leave(self, group: int) -> None:
        """Give a group back after the forward pass, if it is to be."""
        if not is_silent():
            self._groups[group].post_forward(None, None, None)

    def begin_backward(self, gradients: Sequence[int]) -> None:
        """A backward pass begins; what is left over is done at the end of autograd's."""
        self._missing, self._read = [*gradients], [False] * len(self._groups)
        if not is_silent():
            for state in self.states:
                state._register_root_post_backward_final_callback()

    def enter_backward(self, group: int) -> None:
        """Gather a group for the backward pass."""
        self._read[group] = True
        if not is_silent():
            self._groups[group].pre_backward(True)

    def leave_backward(self, group: int) -> None:
        """The backward pass has read a group."""
        self._read[group] = False
        self._settle(group)

    def _arrived(self, group: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient."""
        self._missing[group] -= 1
        self._settle(group)

    def _settle(self, group: int) -> None:
        """Reduce the gradients of a group and give it back, if they are all there and nothing reads it any more."""
        if self._missing[group] == 0 and not self._read[group] and not is_silent():
            self._missing[group] = -1
            self._groups[group].post_backward()

    def _gather_once(self) -> None:
        """Have the tensors that hold gathered parameters, and see when each gets a gradient."""
        for state in self.states:
            state._lazy_init()  # where no module around is sharded, each gathers for itself
        for index, group in enumerate(self._groups):
            if not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
                group.unshard()
                group.wait_for_unshard()
                group.reshard()
            for parameter in group.fsdp_params:
                tensor = parameter.unsharded_param
                if tensor.requires_grad and id(tensor) not in self._watched:
                    self._watched.add(id(tensor))
                    tensor.register_post_accumulate_grad_hook(functools.partial(self._arrived, index))

    def _parameters(self) -> Iterator[Any]:
        return (parameter for group in self._groups for parameter in group.fsdp_params)


def _states_within(module: torch.nn.Module) -> list[Any]:
    """FSDP2's states of the modules inside, in order.

    Raises:
        ModuleError: one is of several modules.
    """
    found = _states(m for m in module.modules() if m is not module)
    if any(len(state._modules) > 1 for state in found):
        what = "several modules inside of the ORTModule are sharded as one"
        raise ModuleError(what, cure="shard each on its own: fully_shard(module)")
    return found


def _states(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """FSDP2's states of modules, in order, each once."""
    from torch.distributed.fsdp import FSDPModule

    states = (m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule))
    return [*{id(state): state for state in states}.values()]


def _groups_of(state: Any) -> list[Any]:
    """The groups of a state: torch 2.11 has one at most."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (several if several is not None else [state._fsdp_param_group]) if g is not None]


def _tables(state: Any) -> list[Any]:
    """The tables of hooks of a state's module."""
    (module,) = state._modules
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    return [getattr(module, name) for name in names]


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Where parameters are: name, module, and name within it."""
    for path, owner in module.named_modules():
        for leaf in owner._parameters:
            yield f"{path}.{leaf}" if path else leaf, owner, leaf


def _names_of(group: Any, names: dict[tuple[int, str], str]) -> Iterator[str]:
    """The names of the parameters of a group, all that each has."""
    for info in (parameter._module_info for parameter in group.fsdp_params):
        owners = [info.module, *info.shared_modules]
        for owner, leaf in zip(owners, [info.param_name, *info.shared_param_names], strict=True):
            if (id(owner), leaf) in names:
                yield names[id(owner), leaf]


__all__ = ["FsdpShards", "fsdp_shards_of", "gathered_later", "root_gathered"]
