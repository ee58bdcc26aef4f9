"""Which rows others depend on, where nobody asks after each step."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.lowerings import reachability


def test_few_steps_find_the_rows_of_a_mask_and_take_all_where_they_do_not_suffice() -> None:
    tokens = 12
    start = torch.zeros(1, tokens, dtype=torch.bool)
    start[0, 5] = True
    causal = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
    chain = torch.eye(tokens, dtype=torch.bool).roll(-1, 1)[None]  # each row sees the one before it
    assert torch.equal(reachability._in_few_steps(start, causal.float()), reachability.reachable_rows(start, causal))
    assert reachability._in_few_steps(start, chain.float()).all()
