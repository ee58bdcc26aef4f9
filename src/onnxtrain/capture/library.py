"""torch.onnx's translations, for calls that none of ours knows: the one place that knows torch.onnx's inside.

Importing them takes longer than translating most models does, so that happens when a call first asks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import current
from onnxtrain.capture.replaced import replaced
from onnxtrain.ir.traits import Trait, traits_of

_WRONG = frozenset((torch.ops.aten.hamming_window.default,))  # ONNX's window has 25/46 where torch's has 0.54


def has_translation(target: Any, opset: int) -> bool:
    """Whether torch.onnx has a translation of an operator."""
    return _translation(target, opset) is not None


class Library:
    """The translations of one graph that are torch.onnx's.

    Args:
        opset: ONNX opset of the graph.

    Attributes:
        functions: the definitions that nodes call, by what names them.
    """

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self.functions: dict[Any, ir.Function] = {}
        self._was_used = False

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let torch.onnx's translation of an operator add its nodes; returns the values that it makes."""
        import onnxscript
        from torch.onnx._internal.exporter import _building, _core

        translate = _translation(target, self._opset)
        assert translate is not None, f"{target} has no translation"
        self._was_used = True
        tracer = _building.OpRecorder(_core._get_onnxscript_opset(self._opset), {})
        tracer.nodes = current().added
        constants = (_building, "_get_or_create_constant", _constant)
        signatures = (ir.schemas.OpSignature, "from_op_schema", _signature)
        ours = replaced(constants, signatures, (_core, "current_tracer", tracer))
        with ours, onnxscript.evaluator.default_as(tracer):
            made = translate(*args, **kwargs)
        for name, function in tracer.functions.items():
            if name not in self.functions:
                self.functions[name] = function if isinstance(function, ir.Function) else _deserialized(function)
        return made

    def finish(self, model: ir.Model) -> None:
        """Let a model hold what was called, in the operators of its opset: torch.onnx's are older."""
        if not self._was_used and not self.functions:
            model.graph.opset_imports.update({"": self._opset} | {n.domain: 1 for n in model.graph if n.domain})
            return
        from torch.onnx._internal.exporter import _core, _ir_passes

        model.functions.update(self.functions)
        _ir_passes.add_opset_imports(model)
        unread = [n.outputs[0] for n in model.graph if Trait.DRAWN in traits_of(n)]  # which it would take away
        model.graph.outputs.extend(unread)
        _core.onnxscript_apis.convert_version(model, self._opset)
        del model.graph.outputs[len(model.graph.outputs) - len(unread) :]
        for node in model.graph.all_nodes():
            node.version = None  # within branches it is the opset that introduced the operator, not the graph's


def _constant(farm: Any, number: Any, dtype: ir.DataType, opset: Any) -> ir.Value:
    """In place of torch.onnx's own: the numbers of all translations are the same constants."""
    return current().constant([number.real, number.imag] if isinstance(number, complex) else number, dtype)


_SIGNATURE = ir.schemas.OpSignature.from_op_schema


@functools.cache
def _signature_named(domain: str, name: str, version: int) -> Any:
    import onnx

    return _SIGNATURE(onnx.defs.get_schema(name, version, domain))


def _signature(schema: Any) -> Any:
    """The signature of an ONNX operator, made once; onnxscript would make it for every node."""
    return _signature_named(schema.domain, schema.name, schema.since_version)


def _deserialized(function: Any) -> ir.Function:
    return ir.serde.deserialize_function(function.to_function_proto())


@functools.cache
def _translation(target: Any, opset: int) -> Callable[..., Any] | None:
    """The newest of the translations that an opset allows."""
    if target in _WRONG:
        return None
    made = [*_of_torch().get(target, ()), *_of_onnxscript(target)]
    able = [m for m in made if m.opset_introduced <= opset and not m.is_complex]
    newest = max((m.opset_introduced for m in able), default=0)
    return next((m.onnx_function for m in able if m.opset_introduced == newest), None)


@functools.cache
def _of_torch() -> Mapping[Any, Sequence[Any]]:
    """The translations that are part of torch."""
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import get_torchlib_ops

    found: dict[Any, list[Any]] = defaultdict(list)
    for meta in get_torchlib_ops():
        found[meta.fx_target].append(meta)
    return found


def _of_onnxscript(target: Any) -> list[Any]:
    """The translations that are part of onnxscript; its own list of them would make the signatures of all."""
    from onnxscript.function_libs.torch_lib import ops, registration  # noqa: F401  (importing them registers them)
    from torch.onnx._internal.exporter._registration import OnnxDecompMeta

    name = _qualified(target)
    made = []
    if name in registration.default_registry:
        for function in registration.default_registry[name].overloads:
            with contextlib.suppress(ValueError, TypeError, NotImplementedError):  # as torch.onnx leaves it out
                made.append(OnnxDecompMeta(onnx_function=function, fx_target=target, signature=None))
    return made


def _qualified(target: Any) -> str:
    """An operator's name as onnxscript registers it."""
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    name = getattr(target, "__name__", "")
    for namespace, module in (("_operator", operator), ("math", math)):
        if getattr(module, name, None) is target:
            return f"{namespace}::{name}"
    return ""
