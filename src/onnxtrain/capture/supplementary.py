"""What a class of ``torch.autograd.Function`` says of its outputs itself: their shapes, and whose memory they reuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx_ir import tensor_adapters
from torch.distributions.dirichlet import _Dirichlet

from onnxtrain.errors import CaptureError
from onnxtrain.ir.python_calls import PYTHON_OP, Place, PythonCall

_SUPPLEMENTED: weakref.WeakSet[type] = weakref.WeakSet()


def _as_given(node: onnx.NodeProto, shapes: list[Any], dtypes: list[int]) -> tuple[list[Any], list[int]]:
    return shapes[:1], dtypes[:1]


# classes of torch whose forward pass has an operator that does not run on tensors without content
_OF_TORCH = {_Dirichlet: {"infer_shape": _as_given}}


def register_custom_function_schema_supplementary(cls: type) -> type:
    """State that a ``torch.autograd.Function`` says itself what its outputs look like; usable as a decorator.

    The class has one or both of these static methods:

    * ``infer_shape(node, input_shapes, input_dtypes) -> (output_shapes, output_dtypes)``: ``forward`` does not run
      while a module is captured. ``node`` is a ``NodeProto``; shapes are lists of sizes (a number, or a symbol that
      computes like one), element types are ``TensorProto.DataType`` numbers; there is one entry for each tensor.
    * ``alias_input(node_text) -> (forward_map, backward_map)``, given the serialized ``NodeProto``: for each output
      of ``forward`` the position among the arguments of ``apply`` whose memory it reuses; for each argument the
      position of the output whose gradient's memory its own gradient reuses; -1 for none.

    Raises:
        TypeError: it is no subclass of ``torch.autograd.Function``, or has neither method.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
        raise TypeError(f"{cls!r} is not a subclass of torch.autograd.Function")
    if not (hasattr(cls, "infer_shape") or hasattr(cls, "alias_input")):
        raise TypeError(f"{cls.__qualname__} has neither infer_shape nor alias_input")
    _SUPPLEMENTED.add(cls)
    return cls


def _supplement(cls: type, name: str) -> Callable[..., Any] | None:
    if cls in _SUPPLEMENTED:
        return getattr(cls, name, None)
    return _OF_TORCH.get(cls, {}).get(name)


def declares_shapes(cls: type) -> bool:
    """Whether a class says itself what shapes its outputs have."""
    return _supplement(cls, "infer_shape") is not None


def declared_results(call: PythonCall, given: Sequence[torch.Tensor]) -> Any:
    """What ``infer_shape`` says a call returns: one tensor, or a tuple of them.

    Args:
        call: a call of a class that declares its shapes.
        given: tensors without content in place of the call's own; their mode is active.
    """
    infer: Any = _supplement(call.function, "infer_shape")
    codes = [int(tensor_adapters.from_torch_dtype(t.dtype)) for t in given]
    shapes, types = infer(_proto(call, len(given), 0), [list(t.shape) for t in given], codes)
    device = next((t.device for t in given), torch.device("cpu"))
    dtypes = [tensor_adapters.to_torch_dtype(code) for code in types]
    gradient = any(t.requires_grad for t in given)
    made = [
        torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=gradient and dtype.is_floating_point)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _proto(call: PythonCall, inputs: int, outputs: int) -> onnx.NodeProto:
    """The node as the class's own static methods see it: tensors alone are inputs, the context is the first output."""
    names = ["context", *(f"output_{i}" for i in range(outputs))]
    return onnx.helper.make_node(PYTHON_OP, [f"input_{i}" for i in range(inputs)], names, func_name=call.name)


def declared_reuse(
    call: PythonCall, inputs: int, outputs: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """What ``alias_input`` says, between tensors: for each output an input, for each input an output's gradient.

    Raises:
        CaptureError: the maps do not fit the call.
    """
    alias = _supplement(call.function, "alias_input")
    if alias is None:
        return None, None
    arguments = call.structure.unflatten(list(call.leaves))
    forward, backward = (list(m) for m in alias(_proto(call, inputs, outputs).SerializeToString()))
    if len(forward) != outputs or len(backward) != len(arguments):
        raise CaptureError(
            f"alias_input of {call.name} returned {len(forward)} and {len(backward)} entries",
            cure=f"return one for each of the {outputs} outputs and one for each of the {len(arguments)} arguments",
        )
    position = {p: a.index for p, a in enumerate(arguments) if isinstance(a, Place) and a.kind == "tensor"}
    for argument in forward:
        if argument != -1 and argument not in position:
            raise CaptureError(f"alias_input of {call.name}: argument {argument} is not a tensor", cure="return -1")
    for output in backward:
        if not -1 <= output < outputs:
            raise CaptureError(f"alias_input of {call.name}: there is no output {output}", cure="return -1")
    by_input = {position[p]: output for p, output in enumerate(backward) if p in position}
    return (
        tuple(-1 if p == -1 else position[p] for p in forward),
        tuple(by_input.get(i, -1) for i in range(inputs)),
    )
