"""Linear layers with quantized weights, one operator each.

Of bitsandbytes: the weight of 4 or 8 bits is never there in floats as a whole. Of torchao, and whatever else is made of
tensors (``made_of_parts``): eager PyTorch makes the weight of its parts again, and computes and differentiates as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.capture.autocast import Autocast
from onnxtrain.capture.library_layers import forward_of
from onnxtrain.capture.made_of_parts import Made, is_made_of_others, parts, reads_parts
from onnxtrain.capture.owned_tensors import owned_by
from onnxtrain.capture.substitutes import substitute
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
TYPES = ("fp4", "nf4")
_SCHEMA = "(Tensor x, Tensor packed, Tensor absmax, int[] shape, int block_size, int quant_type) -> Tensor"


@torch.library.custom_op("onnxtrain::matmul_4bit", mutates_args=(), schema=_SCHEMA)
def _matmul_4bit(x: Tensor, packed: Tensor, absmax: Tensor, shape: Sequence[int], size: int, quant_type: int) -> Tensor:
    form = (packed, absmax, size, TYPES[quant_type], shape, x.dtype)
    return F.linear(x, torch.ops.bitsandbytes.dequantize_4bit(*form))


@_matmul_4bit.register_fake
def _(x: Tensor, packed: Tensor, absmax: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[0])


def _begin_4bit(layer: Any) -> None:
    """What the codes mean is kept on the weight, which a trace has another one for, and on the layer.

    As its first call does, the bias gets the type that is computed in.
    """
    if layer.quant_state is None:
        layer.quant_state = getattr(layer.weight, "quant_state", None)
    if layer.bias is not None and layer.compute_type_is_set and layer.compute_dtype is not None:
        layer.bias.data = layer.bias.data.to(layer.compute_dtype)


@forward_of("bitsandbytes.nn.modules", "Linear4bit", _begin_4bit)
def linear_4bit(self: Any, x: Tensor) -> Tensor:
    """What ``Linear4bit.forward`` computes, in the type that it computes in; nothing is set on the layer.

    Raises:
        CaptureError: the weight is not in codes yet, is transposed, or is in the order of a kernel for inference.
    """
    state = self.quant_state
    if state is None:
        raise CaptureError("the weight of a Linear4bit is not quantized yet", cure="move the layer to its device first")
    if getattr(state, "packing_format_for_cpu", False):
        cure = "train before anything runs in eval mode, or take the model's state_dict, which puts it back"
        raise CaptureError("the weight of a Linear4bit is packed for inference", cure=cure)
    if x.shape[-1] != state.shape[1]:
        raise CaptureError("the weight of a Linear4bit is transposed", cure="quantize it as (out, in)")
    dtype = self.compute_dtype
    if not self.compute_type_is_set and x.dtype in (torch.float32, torch.bfloat16):
        dtype = x.dtype
    given = x if dtype is None else x.to(dtype)
    packed = self.weight if self.weight.dtype == torch.uint8 else self.weight.view(torch.uint8)
    form = [*state.shape], state.blocksize, TYPES.index(state.quant_type)
    made = torch.ops.onnxtrain.matmul_4bit(given, packed, _scales(state), *form)
    return (made if self.bias is None else made + self.bias.to(made.dtype)).to(x.dtype)


def _scales(state: Any) -> Tensor:
    """The scale of each block, which may be in codes of 8 bits itself."""
    if not state.nested:
        return state.absmax.to(torch.float32)
    outer = state.state2
    codes = outer.code[state.absmax.long()]
    return codes * outer.absmax.repeat_interleave(outer.blocksize)[: codes.shape[0]] + state.offset


_INT8_SCHEMA = "(Tensor x, Tensor weight, Tensor scale) -> Tensor"


@torch.library.custom_op("onnxtrain::matmul_int8_weight", mutates_args=(), schema=_INT8_SCHEMA)
def _matmul_int8_weight(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


@_matmul_int8_weight.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _begin_8bit(layer: Any) -> None:
    """As its first call does: integers and scales go from the weight to the layer's state."""
    if getattr(layer.weight, "CB", None) is not None:
        layer.init_8bit_state()


@forward_of("bitsandbytes.nn.modules", "Linear8bitLt", _begin_8bit)
def linear_8bit(self: Any, x: Tensor) -> Tensor:
    """What ``Linear8bitLt.forward`` computes where it trains without kernels for integers, as on the CPU.

    Raises:
        CaptureError: it computes with integers, of which bitsandbytes alone knows how, or is not quantized yet.
    """
    state = self.state
    if state.has_fp16_weights or state.SCB is None:
        raise CaptureError("the weight of a Linear8bitLt is not quantized", cure="has_fp16_weights=False, and move it")
    if not self.training or x.device.type not in ("cpu", "xpu"):
        cure = "quantize to 4 bits, or run the module in eager PyTorch: Options(fallback='eager')"
        raise CaptureError("a Linear8bitLt multiplies integers here, which no graph does", cure=cure)
    made = torch.ops.onnxtrain.matmul_int8_weight(x, self.weight, state.SCB.to(torch.float32) / 127.0)
    return made if self.bias is None else made + self.bias.to(made.dtype)


_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
_LIBRARY.define("linear_of_parts(Tensor x, Tensor? bias, Tensor[] parts, str weight, str autocast) -> Tensor")
_MADE: dict[str, Made] = {}  # operators can take only a text


def _linear_of_parts(x: Tensor, bias: Tensor | None, parts: Sequence[Tensor], weight: str, autocast: str) -> Tensor:
    """``linear`` of eager PyTorch.

    Args:
        x: ``(..., in)``.
        bias: ``(out,)``.
        parts: of the weight, which is ``(out, in)``.
        weight: how it is made of them.
        autocast: the type that autocast computes in here; empty without.

    Raises:
        CaptureError: it gives what is made of others itself.
    """
    dtype, made = getattr(torch, autocast) if autocast else None, _MADE[weight]
    with torch.autocast(x.device.type, dtype=dtype, enabled=bool(autocast)):
        y = F.linear(x, made.whole(iter(parts)), bias)
    if is_made_of_others(y):
        raise CaptureError(
            f"a linear layer with a {made.kind.__name__} gives a {type(y).__name__}, a tensor made of others, which a "
            "graph cannot take",
            cure="let HierarchicalORTModule leave this layer in eager PyTorch",
        )
    return y


for _key in ("CompositeExplicitAutograd", "Autograd"):  # under autograd as well, which differentiates what it calls
    _LIBRARY.impl("linear_of_parts", _linear_of_parts, _key)


def _know(weight: Tensor) -> str:
    """How a weight is made, as operators name it from now on."""
    made = Made.of(weight)
    _MADE[str(made)] = made
    return str(made)


def known_in(module: torch.nn.Module) -> list[str]:
    """How the parameters and buffers of a module that are made of others are made; known from now on."""
    return [f"{name}: {_know(t)}" for name, t in owned_by(module).items() if is_made_of_others(t)]


@substitute(F.linear)
@reads_parts(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A product with a weight that is made of others."""
    if not is_made_of_others(weight):
        return NotImplemented
    autocast = Autocast.current(input.device.type)
    dtype = str(autocast.dtype).removeprefix("torch.") if autocast.enabled else ""
    return torch.ops.onnxtrain.linear_of_parts(input, bias, parts(weight), _know(weight), dtype)
