"""RNN, LSTM and GRU by ATen's kernels, in the settings that these know; a plan's others are written out before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.recurrent import Setting, setting

Tensor = torch.Tensor
_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}  # torch's order in terms of ONNX's
_LENGTHS, _PEEPHOLES = 4, 7
_LAYERS: dict[tuple[str, bool], Any] = {  # by kind, and whether its activation is Relu
    ("RNN", False): torch.rnn_tanh,
    ("RNN", True): torch.rnn_relu,
    ("GRU", False): torch.gru,
    ("LSTM", False): torch.lstm,
}


def is_fused(node: ir.Node) -> bool:
    """Whether ATen's kernels can do what a recurrent node, or its gradient, asks for."""
    kind = node.op_type.removesuffix("Grad")
    if kind not in _GATES:
        return False
    chosen = setting(kind, {name: a.value for name, a in node.attributes.items()})
    has_lengths, has_peepholes = (i < len(node.inputs) and node.inputs[i] is not None for i in (_LENGTHS, _PEEPHOLES))
    is_backwards = chosen.directions == (True,)
    if has_peepholes or (has_lengths and is_backwards):
        return False
    return chosen.plain and (kind != "GRU" or bool(chosen.linear_before_reset))


@dataclasses.dataclass(frozen=True)
class _Record:
    """A call that autograd has recorded: its operands as leaves, and its results."""

    leaves: Sequence[Tensor | None]
    made: Sequence[Tensor]


def _register(kind: str) -> None:
    @lowering(kind)
    def forward(*inputs: Tensor | None, outputs: int = 1, kept: list[_Record] | None = None, **attributes: Any) -> Any:
        """Outputs of all elements, and the last states."""
        given = [*inputs, *[None] * (8 - len(inputs))]
        if kept is None:
            made = _run(setting(kind, attributes), given, training=False)
        else:
            kept.append(_recorded(setting(kind, attributes), given, [x is not None for x in given]))
            made = tuple(y.detach() for y in kept[0].made)
        return made[0] if outputs == 1 else made[:outputs]

    @lowering(f"{kind}Grad", domain=DOMAIN)
    def backward(
        *operands: Tensor | None,
        wanted: Sequence[int],
        outputs: int = 1,
        kept: list[_Record] | None = None,
        **attributes: Any,
    ) -> Any:
        """The vector-Jacobian product by autograd, of the forward pass or of the operator run again."""
        record = kept.pop() if kept else _recorded(setting(kind, attributes), operands[:8], wanted)
        asked = [x for x, w in zip(record.leaves, wanted, strict=True) if w and x is not None]
        pairs = [(y, dy) for y, dy in zip(record.made, operands[8:], strict=False) if dy is not None]
        found = torch.autograd.grad([y for y, _ in pairs], asked, [dy for _, dy in pairs])
        return found[0] if outputs == 1 else found


for _kind in _GATES:
    _register(_kind)


def _recorded(chosen: Setting, inputs: Sequence[Tensor | None], wanted: Sequence[int]) -> _Record:
    with torch.enable_grad():
        leaves = [
            x if x is None else x.detach().requires_grad_(bool(w) and x.is_floating_point())
            for x, w in zip(inputs, wanted, strict=True)
        ]
        return _Record(leaves, _run(chosen, leaves, training=True))


def _run(chosen: Setting, inputs: Sequence[Tensor | None], training: bool) -> tuple[Tensor, ...]:
    x, w, r, b, lengths, h, c, _ = inputs
    assert x is not None and w is not None and r is not None
    if chosen.layout:
        x, h, c = (None if v is None else v.transpose(0, 1) for v in (x, h, c))
        assert x is not None
    alone = chosen.directions == (True,)
    x = x.flip(0) if alone else x
    count, hidden = len(chosen.directions), r.shape[-1]
    weights = [v for i in range(count) for v in _parameters(chosen.kind, i, w, r, b)]
    rest = (weights, b is not None, 1, 0.0, training, count == 2)
    begins = [
        x.new_zeros(count, x.shape[1], hidden) if s is None else s.contiguous()  # as cuDNN asks
        for s in ((h, c) if chosen.kind == "LSTM" else (h,))
    ]
    state: Any = tuple(begins) if chosen.kind == "LSTM" else begins[0]
    layer = _LAYERS[chosen.kind, chosen.names == ("Relu",)]
    y, *states = layer(x, state, *rest, False) if lengths is None else _run_packed(layer, x, lengths, state, rest)
    y = y.view(*y.shape[:2], count, hidden)
    y = y.flip(0) if alone else y
    if chosen.layout:
        return y.transpose(0, 1), *(s.transpose(0, 1) for s in states)
    return y.transpose(1, 2), *states


def _run_packed(layer: Any, x: Tensor, lengths: Tensor, state: Any, rest: Sequence[Any]) -> tuple[Tensor, ...]:
    """A layer on the elements that are no padding; a sequence without any keeps its state."""
    packed = pack_padded_sequence(x, lengths.cpu().clamp(min=1), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    given = state[:, order] if isinstance(state, Tensor) else tuple(s[:, order] for s in state)
    data, *ends = layer(packed.data, packed.batch_sizes, given, *rest)
    y, _ = pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
    some = (lengths > 0)[:, None]
    before = [state] if isinstance(state, Tensor) else state
    return torch.where(some, y, 0), *(torch.where(some, end[:, back], s) for end, s in zip(ends, before, strict=True))


def _parameters(kind: str, index: int, w: Tensor, r: Tensor, b: Tensor | None) -> list[Tensor]:
    """One direction's weights in torch's order of gates."""
    order, made = _GATES[kind], [w[index], r[index]]
    if b is not None:
        made += b[index].chunk(2)
    if len(order) == 1:
        return made
    chunks = [m.chunk(len(order)) for m in made]
    return [torch.cat([c[g] for g in order]) for c in chunks]
