"""Which tensors that others have share memory with what the backward pass reads."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.compiler import Compiled
from onnxtrain.ir.traits import Trait, traits_of


def visible(compiled: Compiled) -> frozenset[str]:
    """Inputs and outputs that share memory with a saved value, through any number of views."""
    graph, signature = compiled.plan.forward.graph, compiled.plan.signature
    named = {str(v.name): v for v in (*graph.inputs, *graph.outputs)}
    roots = {_root(named[name]) for name in compiled.plan.saved}
    return frozenset(n for n in signature.inputs + signature.outputs if n in named and _root(named[n]) in roots)


def _root(value: ir.Value) -> ir.Value:
    """The value whose memory a view shares; itself where it is none."""
    node = value.producer()
    while node is not None and Trait.VIEW in traits_of(node) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value
