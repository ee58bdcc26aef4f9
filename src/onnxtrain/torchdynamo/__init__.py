"""The backend of ``torch.compile`` and its predecessor's interface."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from torch._dynamo.backends import registry

from onnxtrain.torchdynamo.backend import onnxtrain
from onnxtrain.torchdynamo.piece import Piece, pieces
from onnxtrain.torchdynamo.piece import explain_pieces as explain

GROUP = "torch_dynamo_backends"
for _name in ("onnxtrain", "onnxrt"):  # as an installed package is found, also where the source tree is used as it is
    registry._BACKENDS.setdefault(_name, EntryPoint(_name, "onnxtrain.torchdynamo:onnxtrain", GROUP))

__all__ = ["Piece", "explain", "onnxtrain", "pieces"]
