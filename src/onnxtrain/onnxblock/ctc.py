"""Connectionist temporal classification: the probability of a label sequence over all its alignments.

The forward algorithm of Graves et al. 2006 (equations 5 to 8), in logarithms, one Scan over time. Labels are
interleaved with blanks: position s of 2·length + 1 is a blank where s is even. What cannot be has the logarithm −1e30,
which is finite, so that no difference of infinities arises in the gradient.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN

Value = ir.Value
NEVER = -1e30  # logarithm of the probability of what cannot be


def ctc_losses(
    op: Builder, log_probs: Value, targets: Value, input_lengths: Value, target_lengths: Value, blank: int
) -> Value:
    """``-log p(targets)`` of each sequence, shape (batch,); −``NEVER`` and more where no alignment is possible.

    Args:
        op: adds the nodes.
        log_probs: logarithms of probabilities, float or double, shape (time, batch, classes).
        targets: labels, int64, shape (batch, longest); what lies behind a sequence's length is not read.
        input_lengths: int64, shape (batch,).
        target_lengths: int64, shape (batch,).
        blank: the class that stands for no label.
    """
    with op.arithmetic():
        steps = op.Squeeze(op.size(log_probs, 0))
        lengths = _at_most(op, input_lengths, steps)
        ends = _at_most(op, target_lengths, op.Squeeze(op.size(targets, 1)))
        labels = _interleaved(op, _inside(op, log_probs, targets, ends, blank), blank)
        first = op.Gather(log_probs, op.constant(0), axis=0)
        index = op.Expand(op.Unsqueeze(labels, op.ints(0)), op.Concat(op.size(log_probs, 0), op.Shape(labels), axis=0))
        emitted = op.Clip(op.GatherElements(log_probs, index, axis=2), op.like(NEVER, log_probs))
        going = op.Less(
            op.Unsqueeze(op.Range(op.constant(0), steps, op.constant(1)), op.ints(1, 2)),
            op.Unsqueeze(lengths, op.ints(0, 2)),
        )
        start = _start(op, labels, first)
        made = op.node(
            "Scan",
            [start, emitted, going, _skips(op, labels, blank, first)],
            {"body": _step(start, emitted, going), "states": 1, "num_scan_inputs": 2},
            domain=DOMAIN,
            outputs=1,
        ).outputs[0]
        return _last(op, made, ends)


def _at_most(op: Builder, lengths: Value, most: Value) -> Value:
    """The lengths themselves; a kernel refuses those that are larger than there is data."""
    known = op.Range(op.constant(0), most + op.constant(1), op.constant(1))
    return op.Gather(known, lengths, axis=0)


def _inside(op: Builder, log_probs: Value, targets: Value, ends: Value, blank: int) -> Value:
    """Targets with blanks behind their ends; those below 0 made a class that kernels refuse."""
    places = op.Range(op.constant(0), op.Squeeze(op.size(targets, 1)), op.constant(1))
    read = op.Less(op.Unsqueeze(places, op.ints(0)), op.Unsqueeze(ends, op.ints(1)))
    beyond = op.Squeeze(op.size(log_probs, 2))
    checked = op.Where(op.Less(targets, op.constant(0)), beyond, targets)
    return op.Where(read, checked, op.constant(blank))


def _interleaved(op: Builder, targets: Value, blank: int) -> Value:
    """A blank before each label and after the last: (batch, 2·longest + 1)."""
    labels = op.Unsqueeze(targets, op.ints(2))
    blanks = op.Expand(op.constant(blank), op.Shape(labels))
    pairs = op.Reshape(op.Concat(blanks, labels, axis=2), op.Concat(op.size(targets, 0), op.ints(-1), axis=0))
    return op.Pad(pairs, op.ints(0, 0, 0, 1), op.constant(blank))


def _skips(op: Builder, labels: Value, blank: int, like: Value) -> Value:
    """0 where a label may follow another without a blank, else ``NEVER``: for blanks and repeated labels."""
    earlier = op.Slice(op.Pad(labels, op.ints(0, 2, 0, 0), op.constant(blank)), op.ints(0), op.ints(-2), op.ints(1))
    kept = op.Or(op.Equal(labels, op.constant(blank)), op.Equal(labels, earlier))
    return op.Where(kept, op.like(NEVER, like), op.like(0.0, like))


def _start(op: Builder, labels: Value, like: Value) -> Value:
    """The state before the first step: at position 0, from which a step leads to 0 and to the first label."""
    none = op.Expand(op.like(NEVER, like), op.Shape(op.Slice(labels, op.ints(1), op.ints(2**31), op.ints(1))))
    return op.Pad(none, op.ints(0, 1, 0, 0), op.like(0.0, like))


def _step(state: Value, emitted: Value, going: Value) -> ir.Graph:
    """One step: the state, what is emitted, whether the sequence goes on; and the skips, which do not change."""
    dims = shapes.known_dims(state)
    formals = [
        ir.Value(name="state", type=state.type, shape=ir.Shape(dims)),
        ir.Value(name="emitted", type=emitted.type, shape=ir.Shape(dims)),
        ir.Value(name="going", type=going.type, shape=ir.Shape(shapes.known_dims(going)[1:])),
        ir.Value(name="skips", type=state.type, shape=ir.Shape(dims)),
    ]
    graph = ir.Graph(formals, [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="step")
    op = Builder(graph)
    with op.arithmetic():
        before, now, valid, skips = formals
        padded = op.Pad(before, op.ints(0, 2, 0, 0), op.like(NEVER, before))
        one = op.Slice(padded, op.ints(1), op.ints(-1), op.ints(1))
        two = op.Slice(padded, op.ints(0), op.ints(-2), op.ints(1)) + skips
        graph.outputs.append(op.Where(valid, log_sum(op, before, one, two) + now, before))
    return graph


def log_sum(op: Builder, *terms: Value) -> Value:
    """``log Σ exp`` of each element; the largest is taken out, and is a constant to the gradient."""
    largest = op.Detach(op.Max(*terms))
    return largest + op.Log(op.Sum(*(op.Exp(t - largest) for t in terms)))


def _last(op: Builder, state: Value, ends: Value) -> Value:
    """Sequences end with the last label or the blank behind it; without labels there is the blank alone."""
    place = op.Unsqueeze(ends * op.constant(2), op.ints(1))
    blank = op.GatherElements(state, place, axis=1)
    label = op.GatherElements(state, op.Max(place - op.constant(1), op.constant(0)), axis=1)
    label = op.Where(op.Equal(place, op.constant(0)), op.like(NEVER, label), label)
    return -op.Squeeze(log_sum(op, blank, label), op.ints(1))
