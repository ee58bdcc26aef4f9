"""Falling back to eager PyTorch: only where it was asked for by name, and announced."""

from __future__ import annotations

import logging

from onnxtrain.errors import (
    BackendError,
    CaptureError,
    DeviceError,
    GradientError,
    GraphError,
    ModuleError,
    OnnxTrainError,
    ShapeError,
    UnsupportedDataError,
)
from onnxtrain.options import Fallback, Options

_LOG = logging.getLogger(__name__)
_GRAPH = (CaptureError, GradientError, ShapeError, GraphError, BackendError)
_ANY = (*_GRAPH, DeviceError, UnsupportedDataError, ModuleError)
_CAUGHT: dict[Fallback, tuple[type[OnnxTrainError], ...]] = {
    Fallback.FALLBACK_FORCE_TORCH_FORWARD: _ANY,
    Fallback.FALLBACK_FORCE_TORCH_BACKWARD: _ANY,
    Fallback.FALLBACK_UNSUPPORTED_DEVICE: (DeviceError,),
    Fallback.FALLBACK_UNSUPPORTED_DATA: (UnsupportedDataError,),
    Fallback.FALLBACK_UNSUPPORTED_TORCH_MODEL: (ModuleError,),
    Fallback.FALLBACK_UNSUPPORTED_ONNX_MODEL: _GRAPH,
    Fallback.FALLBACK_BAD_INITIALIZATION: (),
}


# The names of onnxruntime-training: the error where a module cannot be wrapped, and any that a policy may catch.
ORTModuleInitException = ModuleError
ORTModuleFallbackException = OnnxTrainError


class FallbackState:
    """Whether a module runs in eager PyTorch, and why.

    Attributes:
        reason: the failure that a policy caught; None while the graph is used.
    """

    def __init__(self, options: Options) -> None:
        self._policy, self._retry = options.policy, options.fallback_retry
        self._announced: set[str] = set()
        self.reason: OnnxTrainError | None = None

    @property
    def is_eager(self) -> bool:
        """Whether calls go to eager PyTorch without trying the graph."""
        return self.reason is not None and not self._retry

    def catches(self, error: OnnxTrainError, *, at_wrapping: bool = False) -> bool:
        """Whether a policy in force covers a failure; announces it the first time."""
        kinds: tuple[type[OnnxTrainError], ...] = ()
        for policy in self._policy:
            kinds += _CAUGHT.get(policy, ())
        if at_wrapping and Fallback.FALLBACK_BAD_INITIALIZATION in self._policy:
            kinds += (ModuleError,)
        if not isinstance(error, kinds):
            return False
        self.reason = error
        if str(error) not in self._announced:
            self._announced.add(str(error))
            until = "this step" if self._retry else "from now on"
            _LOG.warning("falls back to eager PyTorch %s: %s", until, error, exc_info=_LOG.isEnabledFor(logging.DEBUG))
        return True
