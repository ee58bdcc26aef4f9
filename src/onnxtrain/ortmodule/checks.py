"""What cannot be trained through a graph, refused with the reason and the cure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onnxtrain.capture import is_librarys
from onnxtrain.errors import DeviceError, ModuleError, OptionError
from onnxtrain.options import Options
from onnxtrain.ortmodule.debug import DebugOptions
from onnxtrain.ortmodule.fsdp_shards import gathered_later
from onnxtrain.ortmodule.tensor_hooks import is_of_tensors_only
from onnxtrain.ortmodule.zero_shards import is_in_shards

TRACEABLE = "onnxtrain_traceable"  # attribute of a hook that may become part of the graph
_FORWARD = (("_forward_hooks", "forward hook"), ("_forward_pre_hooks", "forward pre-hook"))
_BACKWARD = (("_backward_hooks", "backward hook"), ("_backward_pre_hooks", "backward pre-hook"))


def check_module(module: Any) -> None:
    """Refuse what has no Python forward pass of its own to capture.

    Raises:
        ModuleError: it is not a module, or one of such a kind.
    """
    if not isinstance(module, torch.nn.Module):
        raise ModuleError(
            f"ORTModule wraps a torch.nn.Module, not a {type(module).__name__}",
            cure="put the function into the forward method of a torch.nn.Module",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModuleError("ORTModule cannot capture a ScriptModule", cure="wrap the original Python module")
    if isinstance(module, torch.nn.DataParallel):
        raise ModuleError("ORTModule cannot wrap DataParallel", cure="use DistributedDataParallel around ORTModule")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ModuleError(
            "ORTModule cannot wrap DistributedDataParallel, whose forward communicates",
            cure="the other way round: DistributedDataParallel(ORTModule(module))",
        )
    check_sharding(module, is_called=False)


def check_options(debug_options: Any, options: Any) -> None:
    """Refuse as options what are none.

    Raises:
        OptionError: the one is no DebugOptions, or the other no Options.
    """
    for name, given, kind in (("debug_options", debug_options, DebugOptions), ("options", options, Options)):
        if given is not None and not isinstance(given, kind):
            raise OptionError(
                f"ORTModule's {name} are a {type(given).__name__}, not {kind.__name__}",
                cure="ORTModule(module, options=onnxtrain.Options(...))",
            )


def check_sharding(module: torch.nn.Module, is_called: bool = True) -> None:
    """Refuse parameters in shards: raise the first of ``sharding_errors``."""
    for error in sharding_errors(module, is_called):
        raise error


def sharding_errors(module: torch.nn.Module, is_called: bool = True) -> Iterator[ModuleError]:
    """Parameters in shards that nothing gathers, and those that are views of FSDP1's: one error for each.

    Args:
        module: to be captured.
        is_called: whether it is being called, so that FSDP2 has gathered what it will.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it, nothing is sharded
    for path, inner in module.named_modules() if fsdp else ():
        if isinstance(inner, fsdp.FullyShardedDataParallel):
            yield ModuleError(
                f"{f'submodule {path}' if path else type(module).__name__} is sharded by FullyShardedDataParallel "
                "inside of the ORTModule, whose graph never calls what gathers its parameters",
                cure="use FSDP2: torch.distributed.fsdp.fully_shard",
            )
        if _is_flattened(inner):
            yield ModuleError(
                f"FullyShardedDataParallel has replaced the parameters of {path or type(module).__name__} by views of "
                "a flat one, which a graph cannot take as its weights",
                cure="use FSDP2: torch.distributed.fsdp.fully_shard(ORTModule(module))",
            )
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    waiting = set() if is_called else gathered_later(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensors else ():
        if isinstance(tensor, tensors.DTensor) and id(tensor) not in waiting:
            yield ModuleError(
                f"parameter {name} is a DTensor: this process has a shard of it, and the graph needs the whole",
                cure="call the module itself, model(...), not model.forward(...): its hooks gather what fully_shard "
                "sharded; tensor parallelism is not supported",
            )


def _is_flattened(module: torch.nn.Module) -> bool:
    """Whether FSDP1 manages the module: it says so, or has put plain tensors in the place of parameters."""
    flat = sys.modules["torch.distributed.fsdp"].FlatParameter  # type: ignore[attr-defined]
    views = any(p is not None and isinstance(p._base, flat) for p in module._parameters.values())
    return views or not getattr(module, "_fsdp_use_orig_params", True)


def is_gathered(module: torch.nn.Module) -> bool:
    """Whether parameters are gathered for a step: content then changes without a version, at the same place even."""
    managed = any(getattr(m, "_is_fsdp_managed_module", False) for m in module.modules())
    return managed or any(map(is_in_shards, module.parameters()))


def check_hooks(module: torch.nn.Module, policy: str) -> None:
    """Refuse hooks of submodules: raise the first of ``hook_errors``."""
    for error in hook_errors(module, policy):
        raise error


def hook_errors(module: torch.nn.Module, policy: str) -> Iterator[ModuleError]:
    """Hooks of submodules, one error for each: they would run once, while the module is captured, and never again.

    The module's own hooks run at every call, and so do hooks of parameters. Forward hooks that only compute on tensors
    become part of the graph: with the policy ``"auto"``, where their code says so, and those that the module's own
    library registers; with ``"trace"``, all; with any,
    hooks of ``torch.nn.utils`` (weight normalization), and those whose function has a true attribute
    ``onnxtrain_traceable``.
    """
    for path, inner in module.named_modules():
        if path:
            for kind, hook in _hooks(inner, _BACKWARD):
                yield ModuleError(
                    f"submodule {path} has a {kind} ({_name(hook)}), which a graph of the whole module never calls",
                    cure="use hooks of parameters, of the wrapped module itself, or onnxtrain.utils.hooks",
                )
            for kind, hook in _hooks(inner, _FORWARD):
                if not _is_traceable(hook, inner, policy):
                    yield ModuleError(
                        f"submodule {path} has a {kind} ({_name(hook)}), which would run once, during capture, only",
                        cure="remove it; if it only computes on tensors, Options(hooks='trace') makes it part of the "
                        "graph; to look at activations use onnxtrain.utils.hooks",
                    )


def _hooks(module: torch.nn.Module, tables: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    for table, kind in tables:
        for hook in module.__dict__.get(table, {}).values():
            yield kind, hook


def _is_traceable(hook: Any, module: torch.nn.Module, policy: str) -> bool:
    """Whether a forward hook of a submodule may become part of the graph."""
    function = getattr(hook, "__func__", hook)
    if policy == "trace" or (policy == "auto" and (is_of_tensors_only(hook, module) or _is_own(function, module))):
        return True
    if getattr(function, TRACEABLE, False) or getattr(hook, TRACEABLE, False):
        return True
    return str(getattr(function, "__module__", type(hook).__module__)).startswith("torch.nn.utils") or str(
        type(hook).__module__
    ).startswith("torch.nn.utils")


def _is_own(function: Any, module: torch.nn.Module) -> bool:
    """Whether a hook is of the library that the module is of, whose code registers it (``output_hidden_states``)."""
    home, kind = str(getattr(function, "__module__", "")), type(module).__module__
    package = home.partition(".")[0]
    return package == kind.partition(".")[0] != "torch" and is_librarys(home)


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def check_devices(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """All tensors of a step on one device: raise the first of ``device_errors``."""
    for error in device_errors(module, tensors):
        raise error


def device_errors(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[DeviceError]:
    """Each further device of the module's tensors, each input elsewhere; tensors without dimensions may stay on CPU."""
    owned = {t.device: name for name, t in [*module.named_parameters(), *module.named_buffers()] if t.dim()}
    (first, a), *others = list(owned.items()) or [(None, "")]
    for other, b in others:
        yield DeviceError(
            f"ORTModule supports one device per model; {a} is on {first}, {b} on {other}",
            cure=f"move it as a whole: model.to('{first}')",
        )
    for position, tensor in enumerate(tensors):
        device = tensor.device if first is None else first
        if tensor.dim() and tensor.device != device:
            yield DeviceError(
                f"input {position} is on {tensor.device}, the model on {device}",
                cure=f"move the batch: tensor.to('{device}')",
            )
