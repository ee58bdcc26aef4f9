"""Whether two nodes do the same with what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.graphs import notes_of
from onnxtrain.ir.python_calls import is_call


def are_alike(a: ir.Node, b: ir.Node) -> bool:
    """Whether two nodes do the same with what they are given."""
    if (a.domain, a.op_type, len(a.inputs), len(a.outputs)) != (b.domain, b.op_type, len(b.inputs), len(b.outputs)):
        return False
    if is_call(a) or bodies_of(a) or bodies_of(b) or a.attributes.keys() != b.attributes.keys():
        return False
    if notes_of(a) != notes_of(b) or any((x is None) != (y is None) for x, y in zip(a.inputs, b.inputs, strict=True)):
        return False
    return all(are_equal(x.value, b.attributes[name].value) for name, x in a.attributes.items())


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values of attributes or constants are the same, tensors to the last bit."""
    if isinstance(one, ir.TensorProtocol) and isinstance(other, ir.TensorProtocol):
        x, y = one.numpy(), other.numpy()
        return one.dtype == other.dtype and np.array_equal(x, y) and x.tobytes() == y.tobytes()
    return type(one) is type(other) and one == other
