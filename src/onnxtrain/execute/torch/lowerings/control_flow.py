"""Branches and loops: a body arrives as a function of its inputs that gives a tuple of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
Body = Callable[..., tuple[Tensor, ...]]


@lowering("If", domain=DOMAIN, view=True)
def if_(condition: Tensor, *operands: Tensor, then_branch: Body, else_branch: Body, outputs: int = 1) -> Any:
    """One of two functions of the same operands."""
    made = then_branch(*operands) if condition else else_branch(*operands)
    return made[0] if outputs == 1 else made


@lowering("Scan", domain=DOMAIN, view=True)
def scan(
    *operands: Tensor,
    body: Body,
    states: int,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] = (),
    scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (),
    outputs: int = 1,
) -> Any:
    """One call for each slice of the scanned operands, states handed on."""
    last = states + num_scan_inputs
    axes = scan_input_axes or (0,) * num_scan_inputs
    backwards = scan_input_directions or (0,) * num_scan_inputs
    parts = [x.unbind(axis) for x, axis in zip(operands[states:last], axes, strict=True)]
    parts = [p[::-1] if back else p for p, back in zip(parts, backwards, strict=True)]
    carried, constants, rows = operands[:states], operands[last:], []
    for slices in zip(*parts, strict=True):
        made = body(*carried, *slices, *constants)
        carried = made[:states]
        rows.append(made[states:])
    if not rows and outputs > states:
        pairs = zip(operands[states:last], axes, strict=True)
        slices = [torch.zeros_like(x.sum(axis)) for x, axis in pairs]
        return _result(carried, _empty(body(*carried, *slices, *constants)[states:], scan_output_axes), outputs)
    return _result(carried, _stack(rows, scan_output_axes, scan_output_directions), outputs)


@lowering("Loop", domain=DOMAIN, view=True)
def loop(
    count: Tensor | None, condition: Tensor | None, *operands: Tensor, body: Body, states: int, outputs: int = 1
) -> Any:
    """Until the condition is false, or the count is reached."""
    carried, constants, rows = operands[:states], operands[states:], []
    device = next((x.device for x in operands), None)
    most = None if count is None else int(count)
    going = torch.tensor(True, device=device) if condition is None else condition
    while going and (most is None or len(rows) < most):
        going, *made = body(torch.tensor(len(rows), device=device), going, *carried, *constants)
        carried = tuple(made[:states])
        rows.append(made[states:])
    if not rows and outputs > states:
        _, *made = body(torch.tensor(0, device=device), torch.tensor(True, device=device), *carried, *constants)
        return _result(carried, _empty(made[states:], ()), outputs)
    return _result(carried, _stack(rows, (), ()), outputs)


def _result(carried: Sequence[Tensor], stacked: Sequence[Tensor], outputs: int) -> Any:
    made = (*carried, *stacked)
    return made[0] if outputs == 1 else made


def _stack(rows: Sequence[Sequence[Tensor]], axes: Sequence[int], backwards: Sequence[int]) -> list[Tensor]:
    columns = [list(c) for c in zip(*rows, strict=True)]
    axes, backwards = axes or (0,) * len(columns), backwards or (0,) * len(columns)
    return [torch.stack(c[::-1] if b else c, a) for c, a, b in zip(columns, axes, backwards, strict=True)]


def _empty(slices: Sequence[Tensor], axes: Sequence[int]) -> list[Tensor]:
    """What no iteration gives: the body is run once for the shapes alone."""
    axes = axes or (0,) * len(slices)
    return [y.unsqueeze(a).narrow(a, 0, 0) for y, a in zip(slices, axes, strict=True)]
