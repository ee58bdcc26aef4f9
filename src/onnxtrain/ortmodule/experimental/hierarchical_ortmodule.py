"""HierarchicalORTModule: the largest submodules that can be captured run as graphs, the rest stays in eager PyTorch."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from onnxtrain.capture.rehearsal import untouched
from onnxtrain.capture.schema import flatten
from onnxtrain.engine import randomness
from onnxtrain.errors import OnnxTrainError
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import check_module
from onnxtrain.ortmodule.debug import DebugOptions
from onnxtrain.ortmodule.module import ORTModule

_LOG = logging.getLogger(__name__)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one submodule.

    Args:
        path: its name; empty for the whole module.
        kind: its class.
        wrapped: whether it runs as a graph.
        reason: why it does not; empty where it does.
    """

    path: str
    kind: str
    wrapped: bool
    reason: str = ""

    def __str__(self) -> str:
        state = "graph" if self.wrapped else f"eager, because {self.reason}"
        return f"{self.path or '(the module)'}: {self.kind}: {state}"


class HierarchicalORTModule(torch.nn.Module):
    """Wraps a module of which some parts cannot be captured.

    At the first call the inputs of every submodule are noted, without gradients; then, from the top down, the largest
    submodules that can be captured are wrapped, in place. A submodule that is called several times is one ORTModule,
    whose graphs are found by what each call looks like. Items of a ModuleList are looked at one by one. A submodule
    that is never called stays as it is.

    Args:
        module: the module to train; its parameters are used in place, under their own names.
        debug_options: log level and ONNX dumps; file names get the submodule's name.
        options: backend and checks of every part.

    Raises:
        ModuleError: ``module`` is not an ``nn.Module``.
    """

    def __init__(
        self, module: torch.nn.Module, debug_options: DebugOptions | None = None, *, options: Options | None = None
    ) -> None:
        check_module(module)
        super().__init__()
        chosen = options or Options()
        own = self.__dict__
        own["_ort_chosen"] = debug_options.apply_to(chosen) if debug_options is not None else chosen
        own["_original"], own["_root"], own["verdicts"] = module, None, []
        for name in ("_parameters", "_buffers", "_modules"):
            own[name] = getattr(module, name)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module; after the first call its captured parts are ORTModules."""
        return self.__dict__["_original"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, its parts from their graphs; the first call decides which parts these are."""
        own = self.__dict__
        if own["_root"] is None:
            calls = _calls(self.module, args, kwargs)
            own["_root"] = self._decide(self.module, "", calls)
            _LOG.warning("%s", self.report())
        return own["_root"](*args, **kwargs)

    def report(self) -> str:
        """One line for each part: whether it runs as a graph, and if not, why."""
        if not self.verdicts:
            return "not split yet: the module was not called"
        count = sum(v.wrapped for v in self.verdicts)
        return "\n".join([f"{count} parts run as graphs", *(f"  {v}" for v in self.verdicts)])

    def train(self, mode: bool = True) -> HierarchicalORTModule:
        """Set the mode of the module and its parts."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, without any prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")
        if original is None:
            raise AttributeError(name)
        return getattr(original, name)

    def _decide(self, module: torch.nn.Module, path: str, calls: dict[str, list[Any]]) -> torch.nn.Module:
        kind, reason = type(module).__name__, ""
        if isinstance(module, _CONTAINERS):
            reason = "its items are looked at one by one"
        elif path not in calls:
            reason = "it was not called"
        else:
            wrapped, reason = self._try(module, path, calls[path])
            if wrapped is not None:
                self.verdicts.append(Verdict(path, kind, True))
                return wrapped
        children = list(module.named_children())
        if not isinstance(module, _CONTAINERS) or not children:
            self.verdicts.append(Verdict(path, kind, False, reason))
        if path in calls or isinstance(module, _CONTAINERS):
            for name, child in children:
                module._modules[name] = self._decide(child, f"{path}.{name}".lstrip("."), calls)
        return module

    def _try(self, module: torch.nn.Module, path: str, inputs: list[Any]) -> tuple[ORTModule | None, str]:
        """The submodule wrapped, if all of its calls can be captured; else why not."""
        if next(module.parameters(), None) is None:
            return None, "it has no parameters"
        wrapped = ORTModule(module, options=self._named(path))
        try:
            for args, kwargs in inputs:
                with randomness.replayed(randomness.state()):
                    _probe(wrapped, args, kwargs)
        except OnnxTrainError as error:
            return None, str(error).splitlines()[0] + (f" ({error.source})" if error.source else "")
        return wrapped, ""

    def _named(self, path: str) -> Options:
        chosen: Options = self.__dict__["_ort_chosen"]
        prefix = "_".join(filter(None, (chosen.onnx_prefix, path.replace(".", "_"))))
        return dataclasses.replace(chosen, fallback="error", onnx_prefix=prefix, summary=False)


def _probe(wrapped: ORTModule, args: Any, kwargs: Any) -> None:
    """One call that leaves no trace in the module's buffers; gradients are built but not run."""
    buffers = {name: b.clone() for name, b in wrapped.named_buffers()}
    with torch.enable_grad():
        wrapped(*args, **kwargs)
    with torch.no_grad():
        for name, b in wrapped.named_buffers():
            b.copy_(buffers[name])


def _calls(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, list[Any]]:
    """The arguments of every call of every submodule in one call of the module, by the submodule's name."""
    found: dict[str, list[Any]] = {}
    handles = []
    for path, inner in module.named_modules():

        def note(_: Any, given: Any, named: Any, path: str = path) -> None:
            found.setdefault(path, []).append(_detached((given, named)))

        handles.append(inner.register_forward_pre_hook(note, with_kwargs=True))
    tensors, _ = flatten((args, kwargs))
    try:
        with torch.no_grad(), randomness.replayed(randomness.state()), untouched(module, tensors, ()):
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _detached(data: Any) -> Any:
    """Copies of the tensors; those that may receive a gradient in training ask for one."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point())

    return torch.utils._pytree.tree_map_only(torch.Tensor, copied, data)
