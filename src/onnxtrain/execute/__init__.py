"""Plan → Executable: run a plan on a backend that already exists."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from onnxtrain.errors import BackendError
from onnxtrain.execute.base import Backend, Executable, Footprint, Timing, Use

_BACKENDS = {
    "torch": ("onnxtrain.execute.torch", "TorchBackend"),
    "onnxruntime": ("onnxtrain.execute.onnxruntime", "OnnxRuntimeBackend"),
    "reference": ("onnxtrain.execute.reference", "ReferenceBackend"),
}


def backend(name: str) -> Backend:
    """The backend of that name; ``"auto"`` is torch where it is installed, else onnxruntime.

    Raises:
        BackendError: the backend's package is not installed.
    """
    if name == "auto":
        name = "torch" if importlib.util.find_spec("torch") else "onnxruntime"
    module, class_name = _BACKENDS[name]
    package = "onnx" if name == "reference" else name
    if importlib.util.find_spec(package) is None:
        raise BackendError(f"the {name} backend needs the package {package}", cure=f"pip install onnxtrain[{package}]")
    return _made(module, class_name)


@functools.cache
def _made(module: str, class_name: str) -> Backend:
    """The one backend of a class: what it keeps, all plans share."""
    return getattr(importlib.import_module(module), class_name)()


__all__ = ["Backend", "Executable", "Footprint", "Timing", "Use", "backend"]
