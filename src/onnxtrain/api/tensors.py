"""Tensors that stay where they are: memory that sessions read and write in place, on the CPU or on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxtrain.checkpoint import Form
from onnxtrain.errors import BackendError

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Place:
    """Where tensors are, and which provider of onnxruntime computes there.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or the name of any provider of onnxruntime, whose tensors are then
            handed over in the memory of the CPU.

    Raises:
        BackendError: this onnxruntime has no such provider.
    """

    def __init__(self, device: str) -> None:
        kind, _, index = str(device).partition(":")
        if index and not index.isdecimal():
            raise BackendError(f"the device {device} has no number after its colon", cure="give cpu, cuda or cuda:1")
        self.kind = kind if kind in PROVIDERS else "cpu"
        self.index = int(index or 0)
        self.provider = PROVIDERS.get(kind, kind)
        available = ort.get_available_providers()
        if self.provider not in available:
            raise BackendError(
                f"onnxruntime has no {self.provider} here, only {', '.join(available)}",
                cure="choose another device, or install the onnxruntime package of that provider",
            )
        options = {"device_id": str(self.index)} if self.kind == "cuda" else {}
        self.providers: list[Any] = [] if self.provider == PROVIDERS["cpu"] else [(self.provider, options)]
        self.providers.append(PROVIDERS["cpu"])

    def tensor(self, array: np.ndarray) -> Tensor:
        """A copy of an array in a place of its own."""
        return Tensor(np.array(array, order="C", copy=True), self)

    def value(self, array: np.ndarray) -> ort.OrtValue:
        """An array as onnxruntime sees it; on the CPU the memory is the array's."""
        if array.dtype.isbuiltin == 1 or self.kind != "cpu":
            return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)  # bfloat16 and the like, which are not numpy's own
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)


class Tensor:
    """One tensor in a fixed place, as onnxruntime sees it.

    Args:
        array: its content, which on the CPU is the tensor itself.
        place: where it is.

    Attributes:
        value: what sessions bind as input and as output.
    """

    def __init__(self, array: np.ndarray, place: Place) -> None:
        self.form = Form.of(array)
        self._array = array if place.kind == "cpu" else None
        self.value = place.value(array)

    def numpy(self) -> np.ndarray:
        """A copy of the content."""
        return np.array(self.view(), copy=True)

    def view(self) -> np.ndarray:
        """The content, without a copy where it is in the CPU's memory; only to be read."""
        return self.value.numpy() if self._array is None else self._array

    def assign(self, content: Any) -> None:
        """Replace the content by an array or number of the same form."""
        if self._array is None:
            self.value.update_inplace(np.ascontiguousarray(content, self.form.dtype).reshape(self.form.shape))
        else:
            np.copyto(self._array, content)
