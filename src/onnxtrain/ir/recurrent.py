"""RNN, LSTM and GRU written out: one Scan for each direction over ONNX's formulas (Operators.md, equations there).

The gradient of a recurrent operator is that of its expansion. Shapes, with ``layout`` 0: X (length, batch, width),
W (directions, gates * hidden, width), R (directions, gates * hidden, hidden), B (directions, 2 * gates * hidden),
sequence_lens (batch), initial_h and initial_c (directions, batch, hidden), P (directions, 3 * hidden);
Y (length, directions, batch, hidden), Y_h and Y_c as the initial states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, describe, source_of

Value = ir.Value
RECURRENT = {"RNN": 1, "GRU": 3, "LSTM": 4}  # gates of each operator
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_ALPHA = {"LeakyRelu": 0.01, "ThresholdedRelu": 1.0, "HardSigmoid": 0.2, "Elu": 1.0, "Affine": 1.0, "ScaledTanh": 1.0}
_BETA = {"HardSigmoid": 0.5, "Affine": 0.0, "ScaledTanh": 1.0}


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function by name, with its parameters (0 where it has none)."""

    name: str
    alpha: float
    beta: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """The attributes of a recurrent node.

    Args:
        kind: RNN, LSTM or GRU.
        directions: for each direction, whether it reads from the last element to the first.
        activations: for each direction, the functions of its gates.
        clip: bound of what enters the functions; 0 where there is none.
        layout: 1 where the batch comes first.
        input_forget: LSTM's forget gate is 1 - the input gate.
        linear_before_reset: GRU resets after the product with R.
    """

    kind: str
    directions: tuple[bool, ...]
    activations: tuple[tuple[Activation, ...], ...]
    clip: float
    layout: int
    input_forget: int
    linear_before_reset: int

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the functions, where they are the same in all directions."""
        found = {tuple(a.name for a in functions) for functions in self.activations}
        return found.pop() if len(found) == 1 else None

    @property
    def plain(self) -> bool:
        """Whether the functions are ONNX's defaults (or Relu for RNN), with no bounds and no shared gates."""
        usual = self.names == _DEFAULTS[self.kind] or (self.kind == "RNN" and self.names == ("Relu",))
        return usual and not self.clip and not self.input_forget


def setting(kind: str, attributes: dict[str, Any]) -> Setting:
    """The attributes of a node of that kind, defaults filled in."""
    direction = attributes.get("direction", "forward")
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    names = list(attributes.get("activations") or _DEFAULTS[kind] * len(directions))
    alphas: list[float] = list(attributes.get("activation_alpha") or ())
    betas: list[float] = list(attributes.get("activation_beta") or ())
    made = [_activation(n, alphas, betas) for n in names]
    count = len(_DEFAULTS[kind])
    return Setting(
        kind,
        directions,
        tuple(tuple(made[i * count : (i + 1) * count]) for i in range(len(directions))),
        float(attributes.get("clip") or 0.0),
        int(attributes.get("layout", 0)),
        int(attributes.get("input_forget", 0)),
        int(attributes.get("linear_before_reset", 0)),
    )


def _activation(name: str, alphas: list[float], betas: list[float]) -> Activation:
    """Parameters are consumed in order by the functions that have them; names may be in any case, as in onnxruntime."""
    known = {n.lower(): n for n in (*_ALPHA, "Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")}
    name = known.get(name.lower(), name)
    alpha = (alphas.pop(0) if alphas else _ALPHA[name]) if name in _ALPHA else 0.0
    beta = (betas.pop(0) if betas else _BETA[name]) if name in _BETA else 0.0
    return Activation(name, alpha, beta)


def expand_node(op: Builder, node: ir.Node) -> list[Value]:
    """The outputs of a recurrent node by simpler operators."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    return expand(op, setting(node.op_type, attributes), node.inputs, hidden_size(node))


def hidden_size(node: ir.Node) -> int:
    """The number of elements of a state (ShapeError where it is not known)."""
    stated = shapes.attribute(node, "hidden_size") or shapes.known_dims(node.inputs[2])[-1]  # type: ignore[arg-type]
    if not isinstance(stated, int):
        raise ShapeError(f"the hidden_size of {node.op_type} is not known", node=describe(node), source=source_of(node))
    return stated


def expand(op: Builder, chosen: Setting, inputs: Sequence[Value | None], hidden: int) -> list[Value]:
    """Y, Y_h and, for LSTM, Y_c as nodes of simpler operators.

    Args:
        op: adds the nodes.
        chosen: the node's attributes.
        inputs: X, W, R, B, sequence_lens, initial_h, initial_c, P; None where missing.
        hidden: the number of elements of a state.
    """
    with op.arithmetic():
        x, *weights, lengths, h, c, p = (*inputs, *[None] * (8 - len(inputs)))
        if chosen.layout:
            x, h, c = (None if v is None else op.Transpose(v, perm=[1, 0, 2]) for v in (x, h, c))
        assert x is not None
        valid = None if lengths is None else _valid(op, x, lengths)
        parts = []
        for index in range(len(chosen.directions)):
            at = op.constant(index)
            own = [None if v is None else op.Gather(v, at, axis=0) for v in (*weights, h, c, p)]
            parts.append(_direction(op, chosen, index, x, own, valid, hidden))
        joined = [[op.Unsqueeze(v, op.ints(-3)) for v in column] for column in zip(*parts, strict=True)]
        made = [c[0] if len(c) == 1 else op.Concat(*c, axis=-3) for c in joined]
        if chosen.layout:
            made = [op.Transpose(v, perm=[2, 0, 1, 3] if i == 0 else [1, 0, 2]) for i, v in enumerate(made)]
        return made


def _valid(op: Builder, x: Value, lengths: Value) -> Value:
    """For each element whether it is in its sequence: (length, batch, 1)."""
    steps = op.Range(op.constant(0), op.Squeeze(op.size(x, 0), op.ints(0)), op.constant(1))
    inside = op.Less(op.Unsqueeze(steps, op.ints(1)), op.Unsqueeze(op.cast(lengths, ir.DataType.INT64), op.ints(0)))
    return op.Unsqueeze(inside, op.ints(2))


def _direction(
    op: Builder, chosen: Setting, index: int, x: Value, own: Sequence[Any], valid: Value | None, hidden: int
) -> list[Value]:
    """Outputs (length, batch, hidden) and last states (batch, hidden) of one direction."""
    w, r, b, h, c, p = own
    gates, states = RECURRENT[chosen.kind], 2 if chosen.kind == "LSTM" else 1
    product, recurrent_bias = op.MatMul(x, op.transpose(w)), None
    if b is not None:
        input_bias, recurrent_bias = op.Split(b, op.ints(gates * hidden, gates * hidden), axis=0, outputs=2)
        product = product + input_bias
    size = op.Concat(op.size(x, 1), op.ints(hidden), axis=0)
    zeros = op.Expand(op.like(0.0, x), size)  # the states' sizes are said in terms of X, so that steps keep them
    initial = [zeros if v is None else op.Reshape(v, size) for v in (h, c)[:states]]
    constants = {"r": op.transpose(r), "b": recurrent_bias, "p": p}
    given = {name: v for name, v in constants.items() if v is not None}
    slices = [product] if valid is None else [product, valid]
    body = _body(chosen, index, [*initial, *slices, *given.values()], states, list(given), valid is not None, hidden)
    back = int(chosen.directions[index])
    made = op.node(
        "Scan",
        [*initial, *slices, *given.values()],
        {
            "body": body,
            "states": states,
            "num_scan_inputs": len(slices),
            "scan_input_directions": [back] * len(slices),
            "scan_output_directions": [back],
        },
        domain=DOMAIN,
        outputs=states + 1,
    ).outputs
    return [made[-1], *made[:-1]]


def _body(
    chosen: Setting, index: int, actual: Sequence[Value], states: int, names: Sequence[str], masked: bool, hidden: int
) -> ir.Graph:
    """One step: states, then the products with W (and whether they are in the sequence), then constants."""
    count = states + 1 + masked
    formals = []
    for place, value in enumerate(actual):
        dims = shapes.known_dims(value)
        dims = dims[1:] if states <= place < count else dims
        formals.append(ir.Value(name=f"step_{place}", type=value.type, shape=ir.Shape(dims)))
    graph = ir.Graph(formals, [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="step")
    op = Builder(graph)
    with op.arithmetic():
        before, product = formals[:states], formals[states]
        constants = dict(zip(names, formals[count:], strict=True))
        new = _STEPS[chosen.kind](op, _Cell(op, chosen, index, hidden), before, product, constants)
        y = new[0]
        if masked:
            valid = formals[states + 1]
            y = op.Where(valid, y, op.like(0.0, y))
            new = [op.Where(valid, a, b) for a, b in zip(new, before, strict=True)]
    graph.outputs.extend([*new, y])
    return graph


class _Cell:
    """What the steps share: splitting into gates, bounds and functions."""

    def __init__(self, op: Builder, chosen: Setting, index: int, hidden: int) -> None:
        self.op, self.chosen, self.hidden = op, chosen, hidden
        self.functions = chosen.activations[index]

    def split(self, value: Value, axis: int = -1) -> Sequence[Value]:
        """The gates of a value along an axis; three for peepholes."""
        size = shapes.known_dims(value)[axis]
        count = size // self.hidden if isinstance(size, int) else RECURRENT[self.chosen.kind]
        if count == 1:
            return (value,)
        return self.op.Split(value, self.op.ints(*[self.hidden] * count), axis=axis, outputs=count)

    def activate(self, which: int, value: Value, *, bounded: bool = True) -> Value:
        """A function of its argument, which ``clip`` bounds but for that of LSTM's output."""
        op, function, clip = self.op, self.functions[which], self.chosen.clip
        if clip and bounded:
            value = op.Clip(value, op.like(-clip, value), op.like(clip, value))
        if function.name == "Affine":
            return value * function.alpha + function.beta
        if function.name == "ScaledTanh":
            return op.Tanh(value * function.beta) * function.alpha
        given = {"alpha": function.alpha} if function.name in _ALPHA else {}
        given |= {"beta": function.beta} if function.name in _BETA else {}
        return getattr(op, function.name)(value, **given)


def _rnn(op: Builder, cell: _Cell, before: Sequence[Value], product: Value, constants: dict[str, Value]) -> list[Value]:
    """h' = f(x W + h R + b)."""
    return [cell.activate(0, _with_bias(product + op.MatMul(before[0], constants["r"]), constants))]


def _gru(op: Builder, cell: _Cell, before: Sequence[Value], product: Value, constants: dict[str, Value]) -> list[Value]:
    """h' = (1 - z) n + z h; the reset gate applies to h, or to its product with R and its bias."""
    h, hidden = before[0], cell.hidden
    xs = cell.split(product)
    rs = op.Split(constants["r"], op.ints(2 * hidden, hidden), axis=1, outputs=2)
    bs = op.Split(constants["b"], op.ints(2 * hidden, hidden), axis=0, outputs=2) if "b" in constants else None
    first = op.MatMul(h, rs[0]) if bs is None else op.MatMul(h, rs[0]) + bs[0]
    hz, hr = op.Split(first, op.ints(hidden, hidden), axis=-1, outputs=2)
    z, reset = cell.activate(0, xs[0] + hz), cell.activate(0, xs[1] + hr)
    late = cell.chosen.linear_before_reset
    hn = op.MatMul(h if late else reset * h, rs[1])
    hn = hn if bs is None else hn + bs[1]
    n = cell.activate(1, xs[2] + (reset * hn if late else hn))
    return [n - z * n + z * h]


def _lstm(
    op: Builder, cell: _Cell, before: Sequence[Value], product: Value, constants: dict[str, Value]
) -> list[Value]:
    """c' = f c + i g, h' = o h(c'); peepholes add p c to the gates, of which o sees the new c."""
    h, c = before
    i, o, f, g = cell.split(_with_bias(product + op.MatMul(h, constants["r"]), constants))
    if "p" in constants:
        pi, po, pf = op.Split(constants["p"], op.ints(*[cell.hidden] * 3), axis=0, outputs=3)
        i, f = i + pi * c, f + pf * c
    enter = cell.activate(0, i)
    forget = 1.0 - enter if cell.chosen.input_forget else cell.activate(0, f)
    new = forget * c + enter * cell.activate(1, g)
    if "p" in constants:
        o = o + po * new
    return [cell.activate(0, o) * cell.activate(2, new, bounded=False), new]


def _with_bias(value: Value, constants: dict[str, Value]) -> Value:
    return value + constants["b"] if "b" in constants else value


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
