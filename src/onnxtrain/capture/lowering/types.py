"""Casts that torch makes out of sight: those of autocast, and those by which operands get one type."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from onnxtrain.capture.lowering.writer import Writer, values

_ops = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SCALAR = _ops.scalar_tensor.default
_WIDE = torch.float64  # which autocast leaves alone
_BITS: dict[Any, Any] = {_ops.__and__: _ops.bitwise_and, _ops.__or__: _ops.bitwise_or, _ops.__xor__: _ops.bitwise_xor}
_LIKE = {  # torch lists no rule of their own
    _ops.stack.default: _ops.cat,
    _ops.pow.Tensor_Tensor: _ops.mul,
    **{getattr(packet, form): _ops.bitwise_and for packet in _BITS for form in ("Tensor", "Scalar")},
}
_MIXED = frozenset((_ops.einsum,))  # nor of these, whose operands may have several where nothing is summed
_TYPED = frozenset((_ops.clamp.default, _ops.clamp_min.default, _ops.clamp_max.default))  # by their translations
_IN_PLACES = (_ops.select_scatter.default, _ops.slice_scatter.default, _ops.diagonal_scatter.default)
_KINDS = (
    (bool | torch.SymBool, torch.bool),
    (int | torch.SymInt, torch.int64),
    (float | torch.SymFloat, torch.float32),
)


@dataclasses.dataclass(frozen=True)
class Region:
    """What was in force where calls were recorded.

    Args:
        gradients: whether they are differentiated.
        autocast: device type, type and whether it is on, as ``torch.autocast`` takes them; None where nothing is said.
    """

    gradients: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None

    @property
    def key(self) -> str:
        """Autocast's place among torch's dispatch keys; empty where it is off."""
        if self.autocast is None or not self.autocast[2]:
            return ""
        return {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}.get(self.autocast[0], "AutocastPrivateUse1")

    def enter(self) -> Any:
        """The context in which torch does the same."""
        device, dtype, enabled = self.autocast or ("cpu", torch.bfloat16, False)
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


@functools.cache
def is_cast_by_autocast(name: str, key: str) -> bool:
    """Whether autocast looks at an operator."""
    return bool(key) and bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def cast_for_autocast(writer: Writer, args: Any, kwargs: Any, made: Any) -> tuple[Any, Any]:
    """Arguments of a call that autocast looks at, in the type that it computes in: that of its result."""
    results = [t.dtype for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    wanted = next((d for d in results if d.is_floating_point), None)
    if wanted is None:
        return args, kwargs

    def cast(node: Node) -> Node:
        value = node.meta["val"]
        can_be = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != _WIDE
        return cast_to(writer, node, wanted) if can_be else node

    return torch.fx.map_arg((args, kwargs), cast)


def stated(writer: Writer, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> Mapping[str, Any]:
    """Keyword arguments of a call that makes a tensor, with its type: where none is said, translations take float32.

    Args:
        writer: knows what calls return.
        target: the operator.
        args: positional arguments.
        kwargs: keyword arguments.
        made: what it returns for tensors without content, where that is known.
    """
    if torch.get_default_dtype() == torch.float32 or not _makes_by_type(target) or kwargs.get("dtype") is not None:
        return kwargs
    result = writer.result(target, args, kwargs) if made is None else made
    return {**kwargs, "dtype": result.dtype} if result.is_floating_point() else kwargs


@functools.cache
def _makes_by_type(target: Any) -> bool:
    """Whether an operator makes a tensor of no other, and is told its type."""
    arguments = {a.name: str(a.type) for a in target._schema.arguments}
    made = [str(result.type) for result in target._schema.returns]
    return made == ["Tensor"] and "dtype" in arguments and not any("Tensor" in kind for kind in arguments.values())


def of_default_type(writer: Writer, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> Any:
    """Arguments of a call that makes floats of integers: these in the default type, where that is no float32.

    Args:
        writer: where casts are written to.
        target: the operator.
        args: positional arguments.
        kwargs: keyword arguments.
        made: what it returns for tensors without content, where that is known.
    """
    default = torch.get_default_dtype()
    if default == torch.float32 or torch.Tag.pointwise not in target.tags or target.overloadpacket is _ops.where:
        return args, kwargs
    given = [x for x in pytree.tree_leaves(values((args, dict(kwargs)))) if isinstance(x, torch.Tensor)]
    if not given or any(x.is_floating_point() or x.is_complex() for x in given):
        return args, kwargs
    result = writer.result(target, args, kwargs) if made is None else made
    if not isinstance(result, torch.Tensor) or result.dtype != default:
        return args, kwargs

    def cast(node: Node) -> Node:
        return cast_to(writer, node, default) if isinstance(node.meta["val"], torch.Tensor) else node

    return torch.fx.map_arg((args, kwargs), cast)


def promoted(
    writer: Writer, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, torch.dtype] | None:
    """A call whose operands torch brings to one type, which ONNX does not; None where they have one.

    The rules are torch's, as torch.onnx lists them.

    Returns:
        The operator, its arguments and the type of its result.
    """
    if target.overloadpacket in _MIXED:
        return _of_one_type(writer, target, args)
    if target in _IN_PLACES:
        return _of_first_type(writer, target, args, kwargs)
    rule = _rules().get_rule(_LIKE.get(target, target.overloadpacket))
    if rule is None:
        return None
    given, named = values((tuple(args), dict(kwargs)))
    tensors = [x for x in pytree.tree_leaves((given, named)) if isinstance(x, torch.Tensor)]
    if not tensors or any(x.is_complex() for x in tensors):
        return None
    found: Any = rule.preview_type_promotion(given, named)
    stays = _is_number if target in _TYPED else (lambda _: False)
    wider = tuple(a if stays(a) else _promote(writer, a, found.args_dtypes.get(i)) for i, a in enumerate(args))
    others = {k: v if stays(v) else _promote(writer, v, found.kwargs_dtypes.get(k)) for k, v in kwargs.items()}
    if wider == tuple(args) and others == dict(kwargs):
        return None
    overload = _overload_for(writer, target, wider, others)
    if overload is None or (overload is not target and any(isinstance(a, Node) and _is_number(a) for a in wider)):
        # some numbers are tensors now, and there is no form of both; forms of numbers take constants alone
        wider = tuple(_as_tensor(writer, a, found.args_dtypes.get(i)) for i, a in enumerate(wider))
        overload = _overload_for(writer, target, wider, others)
    return overload or target, wider, others, found.out_dtype


def _of_one_type(writer: Writer, target: Any, args: Sequence[Any]) -> tuple[Any, Any, Any, torch.dtype] | None:
    dtype = writer.result(target, args, {}).dtype
    if dtype.is_complex:
        return None  # which no node of ONNX casts to
    wider = tuple(_promote(writer, a, dtype) if isinstance(a, list | tuple) else a for a in args)
    return None if wider == tuple(args) else (target, wider, {}, dtype)


def _of_first_type(
    writer: Writer, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, torch.dtype] | None:
    """What is put in places of the first operand, in the type of that one."""
    first, second, *rest = args
    dtype = first.meta["val"].dtype
    if dtype.is_complex or second.meta["val"].dtype == dtype or second.meta["val"].is_complex():
        return None
    return target, (first, cast_to(writer, second, dtype), *rest), kwargs, dtype


def _is_number(argument: Any) -> bool:
    return _kind(argument.meta["val"] if isinstance(argument, Node) else argument) is not None


def _overload_for(writer: Writer, target: Any, args: Any, kwargs: Any) -> Any:
    """The form of an operator that takes these arguments; None where there is none."""
    from torch.onnx._internal.fx.passes.type_promotion import find_compatible_op_overload

    shown, by_name = values((args, kwargs))
    try:
        with writer.symbolic():
            packet = _BITS.get(target.overloadpacket, target.overloadpacket)  # which torch 2.11 makes of it itself
            return find_compatible_op_overload(packet, shown, by_name)
    except AssertionError:  # a composite, of which torch 2.11 names the first part
        return target
    except RuntimeError:
        return None


def _as_tensor(writer: Writer, argument: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not _is_number(argument):
        return argument
    return writer.call(_SCALAR, (argument,), {"dtype": dtype})


def _promote(writer: Writer, argument: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return argument
    if isinstance(argument, list | tuple):
        return type(argument)(_promote(writer, a, dtype) for a in argument)
    if isinstance(argument, Node):
        value = argument.meta["val"]
        if isinstance(value, torch.Tensor):
            return cast_to(writer, argument, dtype)
        return argument if _kind(value) == dtype else writer.call(_SCALAR, (argument,), {"dtype": dtype})
    if dtype.is_floating_point and isinstance(argument, int):
        argument = float(argument)
    if argument is None or _kind(argument) in (None, dtype):
        return argument
    return writer.call(_SCALAR, (argument,), {"dtype": dtype})


def _kind(number: Any) -> torch.dtype | None:
    """The type of tensors that torch takes a number for."""
    return next((dtype for kinds, dtype in _KINDS if isinstance(number, kinds)), None)


def cast_to(writer: Writer, node: Any, dtype: torch.dtype) -> Any:
    """A tensor, or each of several, in a type."""
    several = node if isinstance(node, tuple | list) else node.meta["val"]
    if isinstance(several, tuple | list):
        return tuple(cast_to(writer, writer.part(node, place), dtype) for place in range(len(several)))
    return node if node.meta["val"].dtype == dtype else writer.call(_CAST, (node,), {"dtype": dtype})


@functools.cache
def _rules() -> Any:
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable

    return TypePromotionTable()


def may_have_gradient(value: torch.Tensor) -> bool:
    """Whether tensors of this type may, as complex ones may."""
    return value.is_floating_point() or value.is_complex()


def passes_gradient(content: Any) -> bool:
    """Whether a gradient may pass from a written call to an input of the graph: not where all of it is detached."""
    seen: set[Node] = set()
    waiting = [content] if isinstance(content, Node) else []
    while waiting:
        node = waiting.pop()
        value = node.meta.get("val")
        if node in seen or node.target is torch.ops.aten.detach.default:
            continue
        if isinstance(value, torch.Tensor) and not may_have_gradient(value):
            continue
        if node.op != "call_function":
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False
