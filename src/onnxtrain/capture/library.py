"""Translations by operator: ours, then torch.onnx's, each made when a call first asks for it."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from onnx_ir.schemas import OpSignature
from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry

from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.translations import TRANSLATIONS


class Library(ONNXRegistry):
    """The registry that torch.onnx asks for translations.

    Args:
        opset: ONNX opset of the graph.
    """

    def __init__(self, opset: int) -> None:
        super().__init__()
        self._opset_version = opset

    def get_decomps(self, target: Any) -> list[OnnxDecompMeta]:
        """All translations of an operator; those that come first are taken."""
        name = target.name() if isinstance(target, torch._ops.OpOverload) else target
        if name not in self.functions:
            self.functions[name] = _translations(target, self._opset_version)
        return self.functions[name]

    def add(self, target: Any, function: Any) -> None:
        """Register what records one very call."""
        given = {"onnx_function": function, "fx_target": target, "signature": None, "is_custom": True}
        for is_complex in (False, True):
            self._register(target, OnnxDecompMeta(**given, is_complex=is_complex, skip_signature_inference=True))


@contextlib.contextmanager
def signatures_made_once() -> Iterator[None]:
    """Within it the signature of an ONNX operator is made once; onnxscript would make it for every node."""
    make, made = OpSignature.from_op_schema, dict[tuple[str, str, int], OpSignature]()

    def once(schema: Any) -> OpSignature:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in made:
            made[key] = make(schema)
        return made[key]

    with replaced((OpSignature, "from_op_schema", once)):
        yield


@functools.cache
def _translations(target: Any, opset: int) -> list[OnnxDecompMeta]:
    ours = TRANSLATIONS.get(target)
    if ours is not None:
        return [OnnxDecompMeta(onnx_function=ours, fx_target=target, signature=None, is_custom=True)]
    made = [*_of_torch().get(target, ()), *_of_onnxscript(target)]
    able = [m for m in made if m.opset_introduced <= opset]
    newest = max((m.opset_introduced for m in able), default=0)
    return [m for m in able if m.opset_introduced == newest]


@functools.cache
def _of_torch() -> Mapping[Any, Sequence[OnnxDecompMeta]]:
    """The translations that are part of torch."""
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import get_torchlib_ops

    found: dict[Any, list[OnnxDecompMeta]] = defaultdict(list)
    for meta in get_torchlib_ops():
        found[meta.fx_target].append(meta)
    return found


def _of_onnxscript(target: Any) -> list[OnnxDecompMeta]:
    """The translations that are part of onnxscript; its own list of them would make the signatures of all."""
    from onnxscript.function_libs.torch_lib import ops, registration  # noqa: F401  (importing them registers them)

    name = _qualified(target)
    if name not in registration.default_registry:
        return []
    functions = registration.default_registry[name]
    both = [(f, False) for f in functions.overloads] + [(f, True) for f in functions.complex]
    made = []
    for function, is_complex in both:
        with contextlib.suppress(ValueError, TypeError, NotImplementedError):  # as torch.onnx leaves it out
            given = {"onnx_function": function, "fx_target": target, "signature": None}
            made.append(OnnxDecompMeta(**given, is_complex=is_complex))
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
