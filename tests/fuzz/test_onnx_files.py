"""A fixed share of the random files: no wrong gradient, no exception that is not ours; `make fuzz` runs more."""

from __future__ import annotations

import pytest

from fuzz.kinds import outcome
from fuzz.onnx_files import generate
from fuzz.oracle import check
from fuzz.outcomes import FAULT, PASS, REFUSED
from fuzz.run import report

SEEDS = [*range(8), 20, 167, 168, 183]  # those at the end have shown faults


def test_random_files_train() -> None:
    done = {str(seed): outcome(seed) for seed in SEEDS}
    kinds = [found["kind"] for found in done.values()]
    assert FAULT not in kinds, report(done)
    assert kinds.count(REFUSED) <= 2 and kinds.count(PASS) >= len(SEEDS) - 4, report(done)


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.gradient.registry import RULES

    file = next(f for f in map(generate, range(200)) if f.loss == "mse" and "Tanh" in _top(f) and check(f).kind == PASS)
    monkeypatch.setitem(RULES, ("", "Add"), lambda ctx, dy, a, b: (dy * 2.0, dy * 2.0))
    assert check(file).reason == "a gradient is wrong"


def _top(file) -> set[str]:
    return {n.op_type for n in file.model.graph.node}
