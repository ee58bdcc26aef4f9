"""All of torch's elementwise functions (its own table of operators) at numbers where formulas lose digits or overflow.

Values and gradients are eager's. At numbers that are none only values are compared: there a gradient says nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parity import Calls, pair
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

Tensor = torch.Tensor
SIZES = (0.0, 1e-20, 1e-7, 1e-3, 0.5, 1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 50.0, 88.0, 104.0, 1e3, 1e5, 1e10, 1e20, 3e38)
ENDS = torch.tensor([*SIZES, *(-s for s in SIZES), torch.inf, -torch.inf, torch.nan])
LEFT = {
    "nn.functional.rrelu": "draws random numbers, in another order",
    "chalf": "half precision complex numbers are refused",
    "atan2": "gradients beside infinite sides, and beyond float32",
    "fmod": "the gradient of a divisor beside an infinite number",
    "__rdiv__": "the gradient of a quotient of a divisor beyond float32",
    "logit": "the gradient at the zero that has a sign",
}


def _functions() -> list[Any]:
    kinds = (UnaryUfuncInfo, BinaryUfuncInfo)
    found = [o for o in op_db if isinstance(o, kinds) and torch.float32 in o.dtypes and "jiterator" not in o.name]
    return [pytest.param(o, id=f"{o.name}.{o.variant_test_name}".rstrip("."), marks=_left(o.name)) for o in found]


def _left(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=LEFT[name], strict=True)] if name in LEFT else []


def _step(run: Any, operands: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    given = [x.clone().requires_grad_() for x in operands]
    result = pytree.tree_leaves(run(*given))[0]
    if not result.requires_grad:
        return result, [None for _ in given]
    return result.detach(), list(torch.autograd.grad(result, given, torch.ones_like(result), allow_unused=True))


@pytest.mark.parametrize("info", _functions())
def test_extreme_numbers(info: OpInfo) -> None:
    if isinstance(info, UnaryUfuncInfo):
        sample = next(iter(info.sample_inputs("cpu", torch.float32)))
        operands, rest = [ENDS], (sample.args, sample.kwargs)
    else:
        pairs = torch.tensor(list(itertools.product(ENDS[::2].tolist(), ENDS[1::2].tolist())))
        operands, rest = [*pairs.T.contiguous()], ((), {})
    wrapped, eager = pair(Calls(lambda *given: info.op(*given, *rest[0], **rest[1])))
    try:
        expected, slopes = _step(eager, operands)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"eager PyTorch: {error}")
    found, found_slopes = _step(wrapped, operands)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-37, equal_nan=True)
    is_number = ~torch.stack(operands).isnan().any(0)
    for ours, theirs in zip(found_slopes, slopes, strict=True):
        if theirs is not None and (ours is not None or theirs[is_number].any()):
            assert ours is not None
            torch.testing.assert_close(ours[is_number], theirs[is_number], rtol=2e-4, atol=1e-37, equal_nan=True)
