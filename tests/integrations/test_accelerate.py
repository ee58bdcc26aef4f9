"""accelerate around ORTModule: losses, mixed precision, saved states and unwrapping, against eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_scripts import load_example
from parity import captures

from onnxtrain import ORTModule

pytestmark = pytest.mark.slow
example = load_example("accelerate_loop")
STEPS = 6


@pytest.mark.parametrize(("precision", "close"), [("no", 1e-4), ("bf16", 2e-3)])
def test_losses_are_eagers_and_unwrapped_is_the_plain_model(precision: str, close: float) -> None:
    eager = example.Run(lambda model: model, precision).train(STEPS)
    ours = example.Run(ORTModule, precision)
    ours.model.note = "set by a callback"  # after prepare, whose autocast stays
    ours.train(STEPS)
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(eager.losses, rel=close)
    assert ("bf16" in ours.model.graph("captured")) == (precision == "bf16")
    assert captures(ours.model) == 1
    batch = next(iter(ours.loader))
    assert ours.model(**batch).logits.dtype == torch.float32
    for keep in (True, False):
        same_as_plain(ours.accelerator.unwrap_model(ours.model, keep_fp32_wrapper=keep), batch, precision)


def same_as_plain(unwrapped: torch.nn.Module, batch: dict[str, torch.Tensor], precision: str) -> None:
    """A plain model that loads what was unwrapped computes the same."""
    plain = example.build_model(seed=1)
    assert isinstance(unwrapped, type(plain)) and list(unwrapped.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(unwrapped.state_dict())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "no" else {"rtol": 5e-2, "atol": 5e-2}
    with torch.no_grad():
        torch.testing.assert_close(unwrapped.eval()(**batch).logits, plain.eval()(**batch).logits, **tolerance)


def test_a_saved_state_is_the_plain_models_and_continues_exactly(tmp_path: Path) -> None:
    half = STEPS - 2
    whole = example.Run(ORTModule).train(half).save(tmp_path).train(2, skip=half)
    resumed = example.Run(ORTModule).load(tmp_path).train(2, skip=half)
    assert resumed.losses == pytest.approx(whole.losses[half:], rel=1e-6)
    eager = example.Run(lambda model: model).load(tmp_path).train(2, skip=half)
    assert eager.losses == pytest.approx(resumed.losses, rel=1e-4)
