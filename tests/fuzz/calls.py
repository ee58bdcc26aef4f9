"""Operator calls to sample from: the rows of ``op_cases`` and the node tests that ship in the onnx package."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases
from op_cases import CASES, Case, Given

from onnxtrain.operators import NONE, operators

LARGEST = 2000  # elements of an input
_TYPES = "fil?Bbhq"
_SKIPPED = {  # of the node tests: what structure.py makes, strings of training, and what is random in a way of its own
    "If", "Loop", "Scan", "SequenceMap", "ImageDecoder", "Constant", "Dropout", "Bernoulli", "Optional",
    "OptionalGetElement", "OptionalHasElement", "RandomUniformLike", "RandomNormalLike",
}  # fmt: skip
SETTINGS = {  # floating inputs that are constants of their node
    "Resize": (1, 2), "Upsample": (1,), "QuantizeLinear": (1, 2), "DynamicQuantizeLinear": (), "RoiAlign": (1,),
    "BatchNormalization": (3, 4), "Range": (0, 1, 2), "NonMaxSuppression": (0, 1, 3, 4), "QLinearConv": (1, 4, 6),
    "QLinearMatMul": (1, 4, 6), "MelWeightMatrix": (3, 4), "DequantizeLinear": (), "Dropout": (1,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One operator with valid attributes and inputs.

    Args:
        op: the operator.
        inputs: an array for each input; None is one that is missing.
        fixed: positions of inputs that are constants.
        attributes: the node's.
        outputs: how many it has.
    """

    op: str
    inputs: tuple[np.ndarray | None, ...]
    fixed: frozenset[int]
    attributes: tuple[onnx.AttributeProto, ...]
    outputs: int


@functools.cache
def calls() -> dict[str, list[Call]]:
    """All calls, by operator; only operators that are trained through, written out, or stop the gradient."""
    known = {o.name for o in operators() if not o.domain and o.gradient != NONE}
    found: dict[str, list[Call]] = collections.defaultdict(list)
    for call in (*_from_rows(), *_from_tests()):
        if call.op in known and all(a is None or a.size <= LARGEST for a in call.inputs):
            found[call.op].append(call)
    return dict(sorted(found.items()))


def _from_rows() -> Iterator[Call]:
    for case in CASES:
        if not case.domain and not any(isinstance(i, Given) and 0 in i.shape for i in case.inputs):
            yield _from_row(case)


def _from_row(case: Case) -> Call:
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    made = [i.make(rng) if isinstance(i, Given) else i for i in case.inputs]
    arrays = [a if a is None or a.dtype != np.float64 else a.astype(np.float32) for a in made]
    fixed = {p for p, i in enumerate(case.inputs) if isinstance(i, np.ndarray)} | _fixed(case.op, arrays)
    attributes = tuple(onnx.helper.make_attribute(k, _plain(v)) for k, v in case.attributes.items())
    return Call(case.op, tuple(arrays), frozenset(fixed), attributes, case.outputs)


def _plain(value: Any) -> Any:
    """An attribute as ``make_attribute`` takes it."""
    return onnx.numpy_helper.from_array(value.numpy()) if hasattr(value, "numpy") else value


def _from_tests() -> Iterator[Call]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = collect_testcases(None)
    for test in tests:
        graph = test.model.graph
        node = graph.node[-1]
        if len(graph.node) != 1 or node.domain or node.op_type in _SKIPPED or "_expanded" in test.name:
            continue
        names = dict(zip((v.name for v in graph.input), test.data_sets[0][0], strict=False))
        arrays = [names.get(n) for n in node.input]
        if all(a is None or (isinstance(a, np.ndarray) and a.dtype.char in _TYPES and a.size) for a in arrays):
            attributes = tuple(node.attribute)
            yield Call(node.op_type, tuple(arrays), _fixed(node.op_type, arrays), attributes, len(node.output))


def _fixed(op: str, arrays: list[np.ndarray | None]) -> frozenset[int]:
    """Positions of what is no floating tensor, or floating and a setting."""
    settings = SETTINGS.get(op, ())
    return frozenset(p for p, a in enumerate(arrays) if a is not None and (a.dtype != np.float32 or p in settings))
