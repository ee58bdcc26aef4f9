"""RNN, LSTM and GRU: forwards, backwards and both, against a cell written out in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from op_cases.case import Case, Tensor, x

_BATCH, _LENGTH, _WIDTH, _HIDDEN = 2, 5, 3, 4
_NAMES = ("x", "w", "r", "b", "lengths", "h", "c", "p")
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_LENGTHS = np.array([5, 3], np.int32)
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu, "Softsign": F.softsign,
    "HardSigmoid": lambda v: (0.25 * v + 0.4).clamp(0, 1),
}  # fmt: skip


def _reference(kind: str, given: str, attributes: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The operator's equations, one element after the other."""
    names = given.split()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        known: dict[str, Any] = dict(zip([n for n in names if n != "lengths"], tensors, strict=True))
        lengths = torch.tensor(_LENGTHS) if "lengths" in names else torch.tensor([_LENGTH] * _BATCH)
        batch_first = attributes.get("layout", 0)
        data = known["x"].transpose(0, 1) if batch_first else known["x"]
        directions = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[attributes.get("direction", "forward")]
        functions = attributes.get("activations") or _DEFAULTS[kind] * len(directions)
        size, outputs, last = len(_DEFAULTS[kind]), [], []
        for d, back in enumerate(directions):
            own = {n: known[n][:, d] if batch_first and n in "hc" else known[n][d] for n in known if n != "x"}
            chosen = [_FUNCTIONS[f] for f in functions[d * size : (d + 1) * size]]
            y, states = _direction(kind, data, own, chosen, lengths, bool(back), attributes)
            outputs.append(y)
            last.append(states)
        y, states = torch.stack(outputs, 1), [torch.stack(s) for s in zip(*last, strict=True)]
        if batch_first:
            return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in states)
        return y, *states

    return run


def _direction(
    kind: str,
    data: Tensor,
    own: dict[str, Tensor],
    functions: Sequence[Any],
    lengths: Tensor,
    back: bool,
    attributes: dict,
) -> tuple[Tensor, list[Tensor]]:
    zeros = data.new_zeros(_BATCH, _HIDDEN)
    states = [own.get(n, zeros) for n in ("h", "c")[: 2 if kind == "LSTM" else 1]]
    rows: list[Tensor] = [zeros] * _LENGTH
    for t in range(_LENGTH)[:: -1 if back else 1]:
        new = _CELLS[kind](data[t], states, own, functions, attributes)
        inside = (t < lengths)[:, None]
        rows[t] = torch.where(inside, new[0], zeros)
        states = [torch.where(inside, a, b) for a, b in zip(new, states, strict=True)]
    return torch.stack(rows), states


def _bounded(value: Tensor, attributes: dict) -> Tensor:
    clip = attributes.get("clip")
    return value if clip is None else value.clamp(-clip, clip)


def _biases(kind: str, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    zero = own["w"].new_zeros(_GATES[kind] * _HIDDEN)
    wb, rb = own["b"].chunk(2) if "b" in own else (zero, zero)
    return wb, rb


def _rnn(row: Tensor, states: list[Tensor], own: dict, f: Sequence[Any], attributes: dict) -> list[Tensor]:
    wb, rb = _biases("RNN", own)
    return [f[0](_bounded(row @ own["w"].T + wb + states[0] @ own["r"].T + rb, attributes))]


def _gru(row: Tensor, states: list[Tensor], own: dict, f: Sequence[Any], attributes: dict) -> list[Tensor]:
    h = states[0]
    w, r = own["w"].chunk(3), own["r"].chunk(3)
    wb, rb = (b.chunk(3) for b in _biases("GRU", own))
    z, reset = (f[0](_bounded(row @ w[i].T + wb[i] + h @ r[i].T + rb[i], attributes)) for i in (0, 1))
    if attributes.get("linear_before_reset"):
        n = f[1](_bounded(row @ w[2].T + wb[2] + reset * (h @ r[2].T + rb[2]), attributes))
    else:
        n = f[1](_bounded(row @ w[2].T + wb[2] + (reset * h) @ r[2].T + rb[2], attributes))
    return [(1 - z) * n + z * h]


def _lstm(row: Tensor, states: list[Tensor], own: dict, f: Sequence[Any], attributes: dict) -> list[Tensor]:
    h, c = states
    w, r = own["w"].chunk(4), own["r"].chunk(4)
    wb, rb = (b.chunk(4) for b in _biases("LSTM", own))
    pi, po, pf = own["p"].chunk(3) if "p" in own else (c.new_zeros(_HIDDEN),) * 3
    i, o, forget, g = (row @ w[k].T + wb[k] + h @ r[k].T + rb[k] for k in range(4))
    i = f[0](_bounded(i + pi * c, attributes))
    forget = 1 - i if attributes.get("input_forget") else f[0](_bounded(forget + pf * c, attributes))
    new = forget * c + i * f[1](_bounded(g, attributes))
    return [f[0](_bounded(o + po * new, attributes)) * f[2](new), new]


_CELLS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


def _case(kind: str, given: str, label: str, **attributes: Any) -> Case:
    d, gates = 2 if attributes.get("direction") == "bidirectional" else 1, _GATES[kind]
    state = (_BATCH, d, _HIDDEN) if attributes.get("layout") else (d, _BATCH, _HIDDEN)
    made = {
        "x": x(_BATCH, _LENGTH, _WIDTH) if attributes.get("layout") else x(_LENGTH, _BATCH, _WIDTH),
        "w": x(d, gates * _HIDDEN, _WIDTH), "r": x(d, gates * _HIDDEN, _HIDDEN), "b": x(d, 2 * gates * _HIDDEN),
        "lengths": _LENGTHS, "h": x(*state), "c": x(*state), "p": x(d, 3 * _HIDDEN),
    }  # fmt: skip
    inputs = tuple(made[n] if n in given.split() else None for n in _NAMES)
    while inputs[-1] is None:
        inputs = inputs[:-1]
    attributes["hidden_size"] = _HIDDEN
    return Case(
        kind, inputs, _reference(kind, given, attributes), attributes, outputs=3 if kind == "LSTM" else 2, label=label,
        static=(1, 2, 3, 7),
    )  # fmt: skip


def _cases(kind: str, state: str) -> list[Case]:
    late = {"linear_before_reset": 1} if kind == "GRU" else {}
    both = {"direction": "bidirectional"}
    usual = {"RNN": ["Softsign"], "GRU": ["HardSigmoid", "Softsign"], "LSTM": ["HardSigmoid", "Softsign", "Relu"]}[kind]
    hard = {"activation_alpha": [0.25], "activation_beta": [0.4]} if kind != "RNN" else {}
    return [
        _case(kind, "x w r", "plain", **late),
        _case(kind, f"x w r b {state}", "states", **late),
        _case(kind, f"x w r b {state}", "reverse", direction="reverse", **late),
        _case(kind, f"x w r b {state}", "both", **both, **late),
        _case(kind, f"x w r b {state}", "batch-first", layout=1, **both, **late),
        _case(kind, f"x w r b lengths {state}", "lengths", **both, **late),
        _case(kind, f"x w r b {state}", "functions", activations=usual, **hard, **late),
        _case(kind, f"x w r b {state}", "clip", clip=0.7, **late),
    ]


CASES = [
    *_cases("RNN", "h"),
    _case("RNN", "x w r b h", "relu", activations=["Relu"]),
    *_cases("GRU", "h"),
    _case("GRU", "x w r b h", "reset-first", direction="bidirectional"),
    *_cases("LSTM", "h c"),
    _case("LSTM", "x w r b h c p", "peepholes", direction="bidirectional"),
    _case("LSTM", "x w r b lengths h c p", "peepholes-lengths", direction="reverse"),
    _case("LSTM", "x w r b h c", "input-forget", input_forget=1),
]
