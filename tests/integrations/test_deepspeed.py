"""DeepSpeed's ZeRO around ORTModule, two processes: losses, parameters and checkpoints are those of its own engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed_training
import pytest
import torch
from ranks import Ranks

from onnxtrain import Options
from onnxtrain.optim import FP16_Optimizer

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(deepspeed_extensions: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "stage3_max_reuse_distance": 0}
    return {"zero_optimization": zero | more.pop("zero", {}), **more}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped and accumulated": {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": {"enabled": True}},
    "optimizer on the CPU": {
        "zero": {"offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_parameters_are_those_of_deepspeed_alone(ranks: Ranks, stage: int, setting: str) -> None:
    run = functools.partial(ranks, deepspeed_training.train, config=config(stage, **SETTINGS[setting]))
    wanted = run("eager")
    for kind in ("whole", "blocks"):
        close(run(kind), wanted, 3e-2 if setting == "bfloat16" else 1e-4)


def test_scripts_of_the_predecessor_go_on(ranks: Ranks, tmp_path: Path) -> None:
    close(
        ranks(deepspeed_training.ported, config(3), tmp_path),
        ranks(deepspeed_training.train, "eager", config(3), last=3),
        1e-4,
    )
    for rank in "01":
        assert len((tmp_path / rank / "step_2" / "order.txt").read_text().splitlines()) > 3, "one line for each tensor"


@pytest.mark.parametrize("setting", ["clipped and accumulated", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_norms_by_some_kernels(ranks: Ranks, stage: int, setting: str) -> None:
    settings = config(stage, **SETTINGS[setting] | {"gradient_clipping": 0.5})
    run = functools.partial(ranks, deepspeed_training.train, config=settings, last=8)
    close(run("eager", by_some_kernels=True), run("eager"), 1e-5)


@pytest.mark.parametrize(("value", "is_none"), [(3.0, False), (float("inf"), True), (float("nan"), True)])
def test_overflows_by_some_kernels(ranks: Ranks, value: float, is_none: bool) -> None:
    for found in ranks(deepspeed_training.overflows, value):
        assert found == [(is_none, is_none, is_none)] * 2


def test_an_optimizer_that_is_not_known_is_left_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.warns(UserWarning, match=r"torch\.optim\.sgd\.SGD is not known: it is left as it is"):
        assert FP16_Optimizer(optimizer) is optimizer


@pytest.mark.parametrize("first", ["eager", "whole"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_goes_both_ways(ranks: Ranks, tmp_path: Path, stage: int, first: str) -> None:
    second = "whole" if first == "eager" else "eager"
    run = functools.partial(ranks, deepspeed_training.train, config=config(stage))
    wanted = run("eager", last=10)
    run(first, last=5, save=tmp_path)
    losses = [[row[5:], state] for row, state in wanted]
    close(run(second, first=5, last=10, load=tmp_path), losses, 1e-4)


@pytest.mark.parametrize("kind", ["whole", "blocks"])
def test_layers_are_gathered_one_at_a_time(ranks: Ranks, kind: str) -> None:
    """Within one graph, too: what is outside of all blocks, and of these one at most."""
    live = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    settings = config(3, zero=live)
    (most, every, block), _ = ranks(deepspeed_training.most_gathered, kind, settings)
    assert most <= every - 2 * block


@pytest.mark.parametrize("kind", ["whole", "blocks"])
def test_a_model_may_be_in_shards_from_the_start(ranks: Ranks, kind: str) -> None:
    """``deepspeed.zero.Init``."""
    (losses, _), (eager, _) = (ranks(deepspeed_training.from_shards, k)[0] for k in (kind, "eager"))
    torch.testing.assert_close(losses, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "looking"])
def test_models_as_people_have_them_one_layer_at_a_time(ranks: Ranks, kind: str, budget: str | None) -> None:
    """Experts that are taken as one, a forward pass that depends on the batch, a budget, passes without gradients."""
    got = ranks(deepspeed_training.losses_of, kind, wraps=True, options=Options(memory_budget=budget))
    torch.testing.assert_close(got, ranks(deepspeed_training.losses_of, kind, wraps=False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_may_skip_other_rows(ranks: Ranks, stage: int) -> None:
    """Their graphs are not the same then; the order in which they gather parameters and send gradients is."""
    got = ranks(deepspeed_training.padded, stage, wraps=True)
    torch.testing.assert_close(got, ranks(deepspeed_training.padded, stage, wraps=False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_be_on_other_paths(ranks: Ranks, stage: int) -> None:
    run = functools.partial(ranks, deepspeed_training.losses_of, "looking", stage=stage)
    torch.testing.assert_close(run(wraps=True), run(wraps=False), rtol=1e-4, atol=1e-4)


def test_ranks_that_gather_in_different_orders_are_told(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process has ended"):
        ranks(deepspeed_training.in_other_orders, tmp_path / "report")
    told = (tmp_path / "report").read_text()
    assert "different orders in the forward pass: blocks." in told and "rank: " in told


def close(got: list[Any], wanted: list[Any], tolerance: float) -> None:
    for (losses, state), (expected, final) in zip(got, wanted, strict=True):
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state, final, rtol=10 * tolerance, atol=10 * tolerance)
        assert losses[-1] < losses[0] or len(losses) < 10
