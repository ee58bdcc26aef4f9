"""What a call is given: expressions of the batch ``B`` and the length ``L``."""

from __future__ import annotations

FIRST = (
    "B, L, 4", "B, L, 6", "B, 4", "L, B, 4", "B, 3, L", "B, 2, 4, L", "B, 3, 4, 4", "B, L", "B, L, L", "B, 2, L, 4",
)  # fmt: skip
OTHERS = (
    "torch.randn(B, 4, dtype=REAL)", "torch.randn(L, 4, dtype=REAL)", "torch.randn(B, L, dtype=REAL)",
    "torch.randn(4, dtype=REAL)", "torch.randn((), dtype=REAL)", "torch.randn(L, dtype=REAL)",
    "torch.randn(1, L, 4, dtype=REAL)", "torch.randn(B, 1, dtype=REAL)",
    "torch.randn(L, B, 4, dtype=REAL).transpose(0, 1)", "torch.randn(B, L + 1, 4, dtype=REAL)[:, 1:]",
    "torch.randn(B, 1, 4, dtype=REAL).expand(B, L, 4)", "torch.randn(B, L, 4)", "torch.randn(B, 3, 4, 4, dtype=REAL)",
    "torch.randn(B, L, 8, dtype=REAL)[..., ::2]", "torch.randn(B, L, 4, dtype=REAL)",
)  # fmt: skip
INTEGERS = (
    "torch.randint(0, 5, (B, L))", "torch.randint(-1, 3, (B,))", "torch.randint(0, 4, (B, L, 4))",
    "torch.randint(0, 9, (L,))", "torch.randint(0, 7, (B, L + 1))[:, :-1]", "torch.randint(1, 4, ())",
    "torch.randint(0, 3, (B, L), dtype=torch.int32)", "torch.arange(B)",
)  # fmt: skip
MASKS = (
    "torch.rand(B, L) > 0.4", "torch.arange(L)[None] < torch.randint(1, L + 2, (B, 1))", "torch.rand(B) > 0.5",
    "torch.ones(B, L, dtype=torch.bool)", "torch.rand(B, L, 4) > 0.5", "torch.rand(L, L) > 0.3",
)  # fmt: skip
NUMBERS = ("L - 2", "B % 3", "L // 2", "2", "B + L", "[3, 1, 2][L % 3]")
OPTIONAL = (
    "torch.randn(B, dtype=REAL) if L % 2 else None", "None", "torch.randn(B, 4, dtype=REAL).requires_grad_() if B > 2 else None",
)  # fmt: skip
