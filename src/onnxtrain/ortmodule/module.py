"""ORTModule: a module that runs forward and backward from an optimized ONNX graph."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.engine.summary import first_step, phases
from onnxtrain.errors import ModuleError, OnnxTrainError
from onnxtrain.options import Options, from_environment
from onnxtrain.ortmodule.bypass import BypassWatch
from onnxtrain.ortmodule.checks import check_module, check_options
from onnxtrain.ortmodule.debug import DebugOptions, start_logging
from onnxtrain.ortmodule.fallback import FallbackState
from onnxtrain.ortmodule.forwards import GraphForward, bound_to, is_around
from onnxtrain.ortmodule.session import Session
from onnxtrain.ortmodule.sessions import Sessions
from onnxtrain.ortmodule.shards import no_discovery
from onnxtrain.ortmodule.special_methods import class_for
from onnxtrain.ortmodule.telling import Telling
from onnxtrain.ortmodule.transforms import is_transformed
from onnxtrain.ortmodule.with_loss import ModuleWithLoss
from onnxtrain.ortmodule.zero_shards import BOOKKEEPING, InShardsError, gather_as_whole

_LIBRARIES = ("torch", "transformers")
_LOG = logging.getLogger(__name__)
_OWN = frozenset(  # the class too: fully_shard gives its module another one
    (
        *("_wrapped", "forward", "__class__", "_ort_options", "_ort_chosen", "_ort_debug_options"),
        *("_ort_sessions", "_ort_fallback", "_ort_last", *BOOKKEEPING),
    )
)
_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
    # FSDP2 returns to shards by them: without, a state would hold memory that is freed
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class ORTModule(Telling, torch.nn.Module):
    """Wraps a module; the training loop stays as it is.

    The first call in each mode captures the forward pass as an ONNX graph, differentiates and compiles it; the graph
    then serves every batch size and length. Parameters and buffers are the user's own objects under their own names.

    Args:
        module: the module to train.
        debug_options: log level and ONNX dumps, as in ``onnxruntime.training``; or ``options``.
        options: backend and checks; environment variables override them.

    Raises:
        ModuleError: ``module`` is not an ``nn.Module`` that can be captured.
        OptionError: the options are something else.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        debug_options: DebugOptions | Options | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        if isinstance(debug_options, Options) and options is None:
            debug_options, options = None, debug_options
        check_options(debug_options, options)
        if not isinstance(module, torch.nn.Module):
            check_module(module)
        if isinstance(module, ORTModule):
            raise ModuleError("the module is an ORTModule already", cure="use it as it is")
        super().__init__()
        chosen = options or Options()
        if isinstance(debug_options, DebugOptions):
            chosen = debug_options.apply_to(chosen)
        own = self.__dict__
        own["_wrapped"], own["_ort_chosen"], own["_ort_debug_options"] = module, chosen, debug_options
        self._attach()
        _warn_of_collisions(module)
        try:
            check_module(module)
        except ModuleError as error:
            if not own["_ort_fallback"].catches(error, at_wrapping=True):
                raise
        own["_ort_bypass"] = BypassWatch(self)

    def _attach(self) -> None:
        """Share the wrapped module's tables of tensors, submodules and hooks; read the options; forget all graphs."""
        own = self.__dict__
        if "_ort_graph_forward" not in own:
            object.__dict__["__class__"].__set__(self, class_for(type(self), type(own["_wrapped"])))
        for name in _SHARED:
            own[name] = getattr(own["_wrapped"], name)
        own.pop("_is_full_backward_hook", None)  # the wrapped module's
        own["_ort_options"] = from_environment(own["_ort_chosen"])
        start_logging(own["_ort_options"])
        own["_ort_sessions"], own["_ort_last"], own["_ort_fallback"] = None, None, FallbackState(own["_ort_options"])
        if "forward" not in own:  # accelerate puts autocast around it, which stays
            own["forward"] = own["_ort_graph_forward"] = GraphForward.of(self, ORTModule._run, own["_wrapped"])

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self.__dict__["_wrapped"]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The wrapped module's class: frameworks choose by it (how to save, which labels and shifts a loss has)."""
        wrapped = self.__dict__.get("_wrapped")
        return ORTModule if wrapped is None else wrapped.__class__

    @__class__.setter
    def __class__(self, derived: type) -> None:
        """Take what a framework adds by a class derived from the wrapped module's, as FSDP2's ``fully_shard`` does.

        A lazy module becomes what it stands for.
        """
        if getattr(self.module, "cls_to_become", None) is derived:
            self.module.__class__ = derived
            object.__dict__["__class__"].__set__(self, class_for(type(self).__bases__[0], derived))
            return
        bases = tuple(type(self) if base is self.__class__ else base for base in derived.__bases__)
        if type(self) not in bases:
            raise TypeError(f"an ORTModule cannot become a {derived.__name__}, which is not derived from its class")
        content = {n: v for n, v in vars(derived).items() if n not in ("__dict__", "__weakref__")}
        object.__dict__["__class__"].__set__(self, type(derived.__name__, bases, content))

    def _assign_forward(self, value: Any) -> None:
        """Take an assigned forward: around the graph, back to an earlier one, or in the wrapped module's place."""
        own, module = self.__dict__, self.module
        if isinstance(value, GraphForward) and value.owner is self:
            if value is not own["_ort_graph_forward"]:
                self._replace_forward(value.assigned)
                value.replaced, own["_ort_graph_forward"] = None, value
            own["forward"] = value
        elif is_around(value, self, module):
            own["forward"] = value
        else:
            self._replace_forward(bound_to(module, value, self))
            own["forward"] = own["_ort_graph_forward"] = GraphForward.of(self, ORTModule._run, module)

    def _replace_forward(self, value: Any) -> None:
        """Give the wrapped module another forward, None its class's; graphs of the former one do not serve it."""
        own, module = self.__dict__, self.module
        own["_ort_graph_forward"].replaced = module.forward
        if value is not None:
            module.forward = value
        elif "forward" in vars(module):
            del module.forward
        if own["_ort_sessions"] is not None:
            own["_ort_sessions"].inspector.look_again()

    @property
    def options(self) -> Options:
        """The options in force."""
        return self.__dict__["_ort_options"]

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
            DeviceError: the module and its inputs are on more than one device.
            ModuleError: a submodule has a hook that would be lost.
            CaptureError: the module cannot be captured; names the source line.
            GradientError: an operator has no gradient.
        """
        own = self.__dict__
        fallback: FallbackState = own["_ort_fallback"]
        if fallback.is_eager or is_transformed():
            own["_ort_bypass"].end()
            return own["_wrapped"].forward(*args, **kwargs)
        try:
            with no_discovery(own["_wrapped"]):
                session, result = self._served(args, kwargs)
        except OnnxTrainError as error:
            if not fallback.catches(error):
                raise
            return own["_wrapped"].forward(*args, **kwargs)
        if session is not None and session is not own["_ort_last"]:
            self._use(session)
        return result

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session | None, Any]:
        """What a call returns, and the graph that serves it; None where eager PyTorch does."""
        try:
            return self._graphs().run(args, kwargs)
        except InShardsError:
            _LOG.info("looks into tensors, so its parameters are gathered as a whole: ranks may go different ways")
            gather_as_whole(self)
            self._graphs().calls -= 1
            return self._graphs().run(args, kwargs)

    def _graphs(self) -> Sessions:
        own = self.__dict__
        if own["_ort_sessions"] is None:
            own["_ort_bypass"].end()
            own["_ort_sessions"] = Sessions(own["_wrapped"], own["_ort_options"])
        return own["_ort_sessions"]

    def _use(self, session: Session) -> None:
        """Remember the graph in use; say once for each what it does and what it cost."""
        self.__dict__["_ort_last"] = session
        if session.bound.latest.training is not None and not session.announced:
            first = not any(entry.session.announced for entry in self.__dict__["_ort_sessions"].entries)
            session.announced = True
            level = logging.WARNING if first and self.options.summary else logging.INFO
            _LOG.log(level, "%s", first_step(type(self.module).__name__, session.bound))
            _LOG.info("%s", phases(session.bound))

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
        """Move or convert the wrapped module (``to``, ``half``, ``cuda``)."""
        self.module._apply(*args, **kwargs)
        return self

    def _replicate_for_data_parallel(self) -> Any:
        raise ModuleError("ORTModule cannot be replicated by DataParallel", cure="use DistributedDataParallel")

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            raise AttributeError(name)
        value = getattr(wrapped, name)
        return types.MethodType(value.__func__, self) if _calls_back(value, wrapped) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and "_ort_graph_forward" in self.__dict__:
            self._assign_forward(value)
        elif name in _OWN or "_wrapped" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            if name in _SHARED:  # DeepSpeed puts tables of its own there
                super().__setattr__(name, value)
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        own = self.__dict__
        if name == "forward" and ("forward" in vars(self.module) or own["forward"] is not own["_ort_graph_forward"]):
            if "forward" in vars(self.module):
                self._replace_forward(None)
            del own["forward"]
        else:
            delattr(self.module, name)
        self._attach()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __reduce_ex__(self, protocol: int) -> Any:
        return object.__new__, (ORTModule,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_wrapped", "_ort_chosen", "_ort_debug_options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(state)
        self._attach()
        self.__dict__["_ort_bypass"] = BypassWatch(self)


def reconfigure(module: ORTModule, change: Callable[[Options], Options]) -> None:
    """Go on with other options (the environment still wins); graphs are built again."""
    own = module.__dict__
    own["_ort_chosen"] = change(own["_ort_chosen"])
    module._attach()


def _calls_back(value: Any, wrapped: torch.nn.Module) -> bool:
    """Whether an attribute is a method of the user's own, in which ``self(...)`` shall run the graph.

    Methods that say ``super()`` need an instance of their class, and those of libraries (``generate``,
    ``save_pretrained``) mean the module itself.
    """
    if not isinstance(value, types.MethodType) or value.__self__ is not wrapped:
        return False
    function = value.__func__
    code = getattr(function, "__code__", None)
    if code is None or "__class__" in code.co_freevars:
        return False
    return str(function.__module__).partition(".")[0] not in _LIBRARIES


def _warn_of_collisions(module: torch.nn.Module) -> None:
    ours = {**vars(Telling), **vars(ORTModule)}
    names = [n for n in ours if not n.startswith("_") and not hasattr(torch.nn.Module, n)]
    meant = {"training", "module"} if isinstance(module, ModuleWithLoss) else {"training"}
    for name in names:
        if name not in meant and hasattr(module, name):
            warnings.warn(
                f"the module's attribute {name} collides with ORTModule's attribute name; it is at model.module.{name}",
                stacklevel=3,
            )
