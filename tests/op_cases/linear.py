"""Linear algebra."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, at, exactly, x


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


def _products() -> list[Case]:
    sizes = {"four": ((2, 1, 3, 4), (5, 4, 6)), "vector-batch": ((4,), (2, 3, 4, 5)), "ones": ((1, 3, 4), (2, 4, 5))}
    rows = [Case("MatMul", (x(*a), x(*b)), torch.matmul, label=n) for n, (a, b) in sizes.items()]
    for label, shape in {"scalar": (), "one": (1,), "column": (3, 1), "row": (1, 5)}.items():
        rows.append(
            Case("Gemm", (x(3, 4), x(4, 5), x(*shape)), lambda a, b, c: a @ b - 0.5 * c, {"beta": -0.5}, label=label)
        )
    return [
        *rows,
        Case(
            "Gemm", (x(3, 4), x(4, 5), np.zeros(5)), lambda a, b: 2 * a @ b, {"beta": 0.0, "alpha": 2.0}, label="beta0"
        ),
        Case("Gemm", (x(4, 3), x(4, 5)), lambda a, b: 1.5 * a.T @ b, {"alpha": 1.5, "transA": 1}, label="a-transposed"),
    ]


def _einsums() -> list[Case]:
    equations = {
        "ij,jk->ik": ((3, 4), (4, 5)), "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)), "ij->ji": ((3, 4),), "ij->": ((3, 4),),
        "ij->j": ((3, 4),), "ij,ij->": ((3, 4), (3, 4)), "i,j->ij": ((3,), (4,)), "ij,jk": ((3, 4), (4, 5)), "ba": ((3, 4),),
        "ii->i": ((4, 4),), "ii->": ((4, 4),), "ii": ((4, 4),), "iji->j": ((3, 4, 3),), "iij,jk->ik": ((3, 3, 4), (4, 5)),
        "...ij,...jk->...ik": ((2, 3, 4), (2, 4, 5)), "...ij,jk->...ik": ((2, 6, 3, 4), (4, 5)), "...ij,...jk": ((6, 2, 3, 4), (6, 2, 4, 5)),
        "i...->...": ((3, 4, 5),), "i...j->j...": ((3, 4, 5),), "...,...->...": ((2, 1, 4), (1, 3, 1)), "ij,ik->": ((3, 4), (3, 5)),
        "ij,jk,kl->il": ((2, 3), (3, 4), (4, 5)), "bij,bjk,ik->b": ((2, 3, 4), (2, 4, 5), (3, 5)), "i,j,k,l->lkji": ((2,), (3,), (4,), (5,)),
        " a B , B c -> c a ": ((2, 3), (3, 4)), "ij,kl->ik": ((2, 3), (4, 5)), "ii,ij->j": ((3, 3), (3, 4)), "i,i->i": ((4,), (4,)),
        "ij,jk->k": ((1, 4), (4, 5)), "bi,bi->b": ((1, 4), (3, 4)), "iiii->i": ((3, 3, 3, 3),),
        "a,->a": ((3,), ()), ",ij->j": ((), (3, 4)), "ij,,jk->ki": ((2, 3), (), (3, 4)),
    }  # fmt: skip
    return [
        Case(
            "Einsum",
            tuple(x(*s) for s in sizes),
            lambda *a, e=e: torch.einsum(e, *a),
            {"equation": e},
            label=e.replace(" ", "_"),
        )
        for e, sizes in equations.items()
    ]


def _determinants() -> list[Case]:
    singular = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.5, -1.0, 2.0]])
    return [
        Case("Det", (x(3, 3),), torch.linalg.det),
        Case("Det", (x(2, 3, 4, 4),), torch.linalg.det, label="batch"),
        Case("Det", (x(2, 1, 1),), torch.linalg.det, label="one"),
        Case("Det", (x(2, 2, 2),), torch.linalg.det, label="two"),
        Case("Det", (exactly(singular),), _leibniz, label="singular", cancels=8.0),
        Case("Det", (at([[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]),),
             lambda a: a[:, 0, 0] * a[:, 1, 1] - a[:, 0, 1] * a[:, 1, 0], label="singular-batch"),
    ]  # fmt: skip


def _leibniz(a: torch.Tensor) -> torch.Tensor:
    """The determinant of a 3 x 3 matrix written out."""
    return (a[0] * torch.linalg.cross(a[1], a[2])).sum()


CASES = [*_linear(), *_products(), *_einsums(), *_determinants()]
