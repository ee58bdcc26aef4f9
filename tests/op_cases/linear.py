"""Linear algebra."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, x


def _linear() -> list[Case]:
    sizes = {
        "matrix": ((3, 4), (4, 5)), "batch": ((2, 3, 4), (2, 4, 5)), "weight": ((2, 3, 4), (4, 5)),
        "broadcast": ((6, 2, 3, 4), (2, 4, 5)), "row": ((4,), (4, 5)), "column": ((2, 3, 4), (4,)), "dot": ((4,), (4,)),
    }  # fmt: skip
    rows = [Case("MatMul", (x(*a), x(*b)), torch.matmul, label=n) for n, (a, b) in sizes.items()]
    rows += [
        Case("Gemm", (x(3, 4), x(4, 5), x(5)), lambda a, b, c: a @ b + c),
        Case("Gemm", (x(3, 4), x(4, 5)), torch.matmul, label="no-bias"),
        Case(
            "Gemm", (x(4, 3), x(5, 4), x(3, 1)), lambda a, b, c: 0.5 * a.T @ b.T + 2 * c,
            {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, label="transposed",
        ),
        Case("Gemm", (x(3, 4), x(5, 4), x(3, 5)), lambda a, b, c: a @ b.T + c, {"transB": 1}, label="b-transposed"),
        Case("Linear", (x(2, 3, 4), x(5, 4), x(5)), F.linear, domain=DOMAIN),
        Case("Linear", (x(4), x(5, 4), x(5)), F.linear, domain=DOMAIN, label="vector"),
        Case("LinearWithoutBias", (x(2, 3, 4), x(5, 4)), F.linear, domain=DOMAIN),
        Case("LinearWithoutBias", (x(4), x(5, 4)), F.linear, domain=DOMAIN, label="vector"),
    ]  # fmt: skip
    return rows


CASES = [*_linear()]
