"""Which rows others depend on, through any number of attentions."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


@function(like=(0,))
def ReachableRows(start, seen):
    """Rows of a set, those that they see, those that these see, and so on.

    start (batch, tokens) bool; seen (batch, tokens, tokens) bool, true where the row of its second axis sees that of
    its third.
    """
    rows = op.Cast(start, to=1)
    edges = op.Cast(seen, to=1)
    grows = op.Cast(op.Constant(value_int=1), to=9)
    while grows:
        reached = op.Squeeze(op.MatMul(op.Unsqueeze(rows, [1]), edges), [1])
        wider = op.Cast(op.Or(op.Cast(rows, to=9), op.Cast(reached, to=9)), to=1)
        grows = op.Greater(op.ReduceSum(wider - rows, keepdims=0), op.Constant(value_float=0.0))
        rows = op.Identity(wider)
    return op.Cast(rows, to=9)
