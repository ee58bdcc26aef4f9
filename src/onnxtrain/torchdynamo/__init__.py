"""The backend of ``torch.compile``, and the predecessor's interface to it."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from torch._dynamo.backends import registry

from onnxtrain.torchdynamo.accelerate_name import allow_in_accelerate
from onnxtrain.torchdynamo.backend import onnxtrain
from onnxtrain.torchdynamo.custom_operators import register_custom_op
from onnxtrain.torchdynamo.ort_backend import OrtBackend, OrtBackendOptions, is_onnxrt_backend_supported, onnxrt
from onnxtrain.torchdynamo.piece import Piece, pieces
from onnxtrain.torchdynamo.piece import explain_pieces as explain
from onnxtrain.torchdynamo.untraced import keep_untraced

GROUP = "torch_dynamo_backends"
for _name in ("onnxtrain", "onnxrt"):  # as they are found where the package is installed; here it may be a source tree
    registry._BACKENDS.setdefault(_name, EntryPoint(_name, f"onnxtrain.torchdynamo:{_name}", GROUP))
keep_untraced()

__all__ = [
    "OrtBackend",
    "OrtBackendOptions",
    "Piece",
    "allow_in_accelerate",
    "explain",
    "is_onnxrt_backend_supported",
    "onnxrt",
    "onnxtrain",
    "pieces",
    "register_custom_op",
]
