"""accelerate around ORTModule: losses, mixed precision, saved states and unwrapping, against eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_scripts import load_example

from onnxtrain import ORTModule

pytestmark = pytest.mark.slow
example = load_example("accelerate_loop")
STEPS = 6


@pytest.mark.parametrize(("precision", "close"), [("no", 1e-4), ("bf16", 2e-3)])
def test_losses_are_eagers(precision: str, close: float) -> None:
    eager = example.Run(lambda model: model, precision).train(STEPS)
    ours = example.Run(ORTModule, precision).train(STEPS)
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(eager.losses, rel=close)
    assert ("bf16" in ours.model.graph("captured")) == (precision == "bf16")
    assert sum(len(s) for s in ours.model.__dict__["_sessions"].values()) == 1
    batch = next(iter(ours.loader))
    assert ours.model(**batch).logits.dtype == torch.float32


def test_a_saved_state_is_the_plain_models_and_continues_exactly(tmp_path: Path) -> None:
    whole = example.Run(ORTModule).train(STEPS)
    first = example.Run(ORTModule).train(STEPS - 2).save(tmp_path)
    second = example.Run(ORTModule).load(tmp_path).train(2, skip=STEPS - 2)
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-6)
    eager = example.Run(lambda model: model).load(tmp_path).train(2, skip=STEPS - 2)
    assert eager.losses == pytest.approx(second.losses, rel=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("keep", [True, False])
def test_unwrapped_is_the_plain_model(precision: str, keep: bool) -> None:
    ours = example.Run(ORTModule, precision).train(2)
    unwrapped = ours.accelerator.unwrap_model(ours.model, keep_fp32_wrapper=keep)
    plain = example.build_model(seed=1)
    assert isinstance(unwrapped, type(plain)) and list(unwrapped.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(unwrapped.state_dict())
    batch = next(iter(ours.loader))
    with torch.no_grad():
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "no" else {"rtol": 5e-2, "atol": 5e-2}
        torch.testing.assert_close(unwrapped.eval()(**batch).logits, plain.eval()(**batch).logits, **tolerance)


def test_attributes_set_after_prepare_keep_autocast() -> None:
    ours = example.Run(ORTModule, "bf16")
    ours.model.note = "set by a callback"
    ours.train(1)
    assert "bf16" in ours.model.graph("captured")
