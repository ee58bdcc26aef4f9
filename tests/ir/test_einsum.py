"""Equations of Einsum as letters without ellipses."""

from __future__ import annotations

import pytest

from onnxtrain.ir.einsum import parse


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        ("ij,jk->ik", (2, 2), "ij,jk->ik"),
        (" ij , jk ", (2, 2), "ij,jk->ik"),
        ("ba", (2,), "ba->ab"),
        ("bA", (2,), "bA->Ab"),
        ("ii", (2,), "ii->"),
        ("...ij,...jk->...ik", (4, 3), "abij,bjk->abik"),
        ("...ij,jk", (3, 2), "aij,jk->aik"),
        ("a...->...", (3,), "abc->bc"),
        ("...,...", (0, 2), ",ab->ab"),
    ],
)
def test_parse(equation: str, ranks: tuple[int, ...], expected: str) -> None:
    assert str(parse(equation, ranks)) == expected


@pytest.mark.parametrize(("equation", "ranks"), [("ij", (3,)), ("ij,jk->ik", (2,)), ("...ijk->i", (2,))])
def test_letters_that_do_not_fit_are_an_error(equation: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="equation"):
        parse(equation, ranks)
