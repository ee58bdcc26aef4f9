"""ORTModule: a module that runs forward and backward from an optimized ONNX graph."""

from __future__ import annotations

import functools
from collections import UserDict
from typing import Any

import torch

from onnxtrain.errors import ModuleError
from onnxtrain.ir.printer import to_text
from onnxtrain.options import Options, from_environment
from onnxtrain.ortmodule.debug import DebugOptions
from onnxtrain.ortmodule.guards import Inspector
from onnxtrain.ortmodule.session import Session
from onnxtrain.ortmodule.step import run
from onnxtrain.ortmodule.verification import Report

_OWN = frozenset(("_wrapped", "_options", "_debug_options", "_sessions", "_inspector", "_last", "forward"))
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ORTModule(torch.nn.Module):
    """Wraps a module; the training loop stays as it is.

    The first call in each mode captures the forward pass as an ONNX graph, differentiates and compiles it; the graph
    then serves every batch size and length. Parameters and buffers are the user's own objects under their own names.

    Args:
        module: the module to train.
        debug_options: log level and ONNX dumps, as in ``onnxruntime.training``.
        options: backend and checks; environment variables override them.

    Raises:
        ModuleError: ``module`` is not an ``nn.Module`` that can be captured.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        _check(module)
        super().__init__()
        chosen = options or Options()
        if debug_options is not None:
            chosen = debug_options.apply_to(chosen)
        own = self.__dict__
        own["_wrapped"], own["_options"], own["_debug_options"] = module, from_environment(chosen), debug_options
        self._attach()

    def _attach(self) -> None:
        """Share the wrapped module's tables of tensors and submodules; forget all graphs."""
        own = self.__dict__
        for name in _SHARED:
            own[name] = own["_wrapped"].__dict__[name]
        own["_sessions"], own["_inspector"], own["_last"] = {}, None, None
        if "forward" not in own:  # accelerate puts autocast around it: that stays when attributes are set afterwards
            own["forward"] = functools.wraps(own["_wrapped"].forward)(functools.partial(ORTModule._run, self))

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self.__dict__["_wrapped"]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The wrapped module's class: frameworks choose by it (how to save, which labels and shifts a loss has)."""
        wrapped = self.__dict__.get("_wrapped")
        return ORTModule if wrapped is None else wrapped.__class__

    @property
    def options(self) -> Options:
        """The options in force."""
        return self.__dict__["_options"]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The wrapped module's mode."""
        wrapped = self.__dict__.get("_wrapped")
        return True if wrapped is None else wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_wrapped" in self.__dict__:
            self.__dict__["_wrapped"].training = mode

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the wrapped module from its graph.

        Raises:
            UnsupportedDataError: an input or output has a type that a graph cannot take.
            CaptureError: the module cannot be captured; names the source line.
            GradientError: an operator has no gradient.
        """
        own = self.__dict__
        if own["_inspector"] is None:
            own["_inspector"] = Inspector(self.module)
        args = tuple(dict(a) if isinstance(a, UserDict) else a for a in args)  # transformers.BatchEncoding
        call = own["_inspector"].call(args, kwargs)
        sessions: list[Session] = own["_sessions"].setdefault(call.key, [])
        session = next((s for s in sessions if s.fits(call.tensors)), None)
        if session is None:
            session = Session(self.module, args, dict(sorted(kwargs.items())), self.options)
            sessions.append(session)
        own["_last"] = session
        return session.restore(run(session, call.tensors))

    def graph(self, stage: str = "training") -> str:
        """The graph of the last call as text.

        Args:
            stage: ``"captured"`` (the optimized forward), ``"training"``, ``"forward"`` or ``"backward"``.

        Raises:
            ModuleError: the module was not called yet, or has no graph of that stage.
        """
        compiled = self._session().latest
        saved = compiled.plan.saved
        if stage == "captured":
            return to_text(compiled.forward.model, title="forward")
        if stage == "training" and compiled.training is not None:
            return to_text(compiled.training.model, title="training graph", saved=saved)
        models = {"forward": compiled.plan.forward, "backward": compiled.plan.backward}
        model = models.get(stage)
        if model is None:
            raise ModuleError(
                f"there is no {stage!r} graph of the last call", cure="train first; or ask for 'captured'"
            )
        return to_text(model, title=stage, saved=saved)

    def source(self, part: str = "forward") -> str:
        """The program that the backend runs for ``"forward"`` or ``"backward"`` of the last call, as text."""
        return self._session().latest.executable.source(part)

    def summary(self) -> str:
        """What was built for the last call: nodes, saved values, gradients, and the time of each stage."""
        session = self._session()
        compiled, report = session.latest, session.report
        rows = [
            f"forward graph    {len(compiled.forward.model.graph)} nodes, {len(session.signature.parameters)} weights"
        ]
        if compiled.training is not None:
            counts = f"{len(compiled.plan.saved)} saved values, {len(compiled.plan.gradients)} gradients"
            rows.append(f"training graph   {len(compiled.training.model.graph)} nodes, {counts}")
        removed: dict[str, int] = {}
        for record in report.passes:
            removed[record.name] = removed.get(record.name, 0) + record.nodes_before - record.nodes_after
        changed = [f"{name} -{count}" for name, count in removed.items() if count]
        rows.append(f"passes           {', '.join(changed) or 'nothing to do'}")
        rows.append(
            "build time       " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.seconds.items())
        )
        rows.append(f"backend          {type(compiled.executable).__name__}")
        return "\n".join(rows)

    @property
    def verification(self) -> Report | None:
        """What ``Options(verify=True)`` compared on the last graph's first step; None where it was not asked for."""
        return None if self.__dict__["_last"] is None else self.__dict__["_last"].verification

    def _session(self) -> Session:
        if self.__dict__["_last"] is None:
            raise ModuleError("the module was not called yet, so there is no graph", cure="run one batch first")
        return self.__dict__["_last"]

    def train(self, mode: bool = True) -> ORTModule:
        """Set the wrapped module's mode."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state, without any prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> ORTModule:
        """Move or convert the wrapped module (``to``, ``half``, ``cuda``); graphs are built again."""
        self.module._apply(*args, **kwargs)
        self._attach()
        return self

    def _replicate_for_data_parallel(self) -> Any:
        raise ModuleError("ORTModule cannot be replicated by DataParallel", cure="use DistributedDataParallel")

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Not supported: add it to the wrapped module before wrapping."""
        raise ModuleError("add_module is not supported on ORTModule", cure="add it to the module before wrapping it")

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            raise AttributeError(name)
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "_wrapped" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)
            if name != "training":
                self._attach()

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)
        self._attach()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __reduce_ex__(self, protocol: int) -> Any:
        return object.__new__, (ORTModule,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_wrapped", "_options", "_debug_options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(state)
        self._attach()


def _check(module: Any) -> None:
    """Refuse what cannot be captured.

    Raises:
        ModuleError: it is not a module, or one of a kind that has no Python forward pass to capture.
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
    if isinstance(module, ORTModule):
        raise ModuleError("the module is an ORTModule already", cure="use it as it is")
