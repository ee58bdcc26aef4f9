"""What a plan for many ranks tells is what they take; a model that no machine at hand holds is planned in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peaks_at_ranks
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onnxtrain import Cluster, Options, ORTModule
from onnxtrain.engine.ranks_report import ClusterReport
from onnxtrain.errors import OptionError

HELD = ("parameters", "optimizer", "buffers")


def planned(shape: tuple[int, int], **stated: object) -> ClusterReport:
    model = ORTModule(peaks_at_ranks.model())
    return model.plan(Cluster(bucket=peaks_at_ranks.BUCKET, **stated), peaks_at_ranks.batch(shape))


@pytest.mark.usefixtures("deepspeed_extensions")
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_peaks_are_those_of_the_engines(ranks: int) -> None:
    """Within 5 % of what DeepSpeed, FSDP2 and DDP have torch allocate at a rank, where a step is most and gradients."""
    environment = {**os.environ, "ORTMODULE_LOG_LEVEL": "ERROR"}
    command = [sys.executable, peaks_at_ranks.__file__, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    real = {(strategy, batch): peak for strategy, batch, peak in json.loads(done.stdout.splitlines()[-1])}
    plans = {batch: planned(shape, ranks=[ranks]).plans for batch, shape in peaks_at_ranks.BATCHES.items()}
    told = {(p.strategy, batch): p.peak for batch, found in plans.items() for p in found}
    wrong = {key: told[key] / peak for key, peak in real.items() if abs(told[key] / peak - 1) > 0.05}
    assert not wrong and len(real) == 12


def test_shares_and_what_is_sent() -> None:
    """As in the papers: of 16 bytes for an element 4 + 12 / n remain at stage 1 or 2, 16 / n at stage 3.

    So few parameters DeepSpeed keeps until the backward pass, so that stage 3 sends no more than the others.
    """
    report = planned((1, 8), ranks=[4], link="1GB")
    found, size = {p.strategy: p for p in report.plans}, report.step.weights
    elements = report.step.elements
    assert elements == sum(p.numel() for p in peaks_at_ranks.model().parameters()) and size == 4 * elements
    for stage in ("zero1", "zero2"):
        assert found[stage].parameters + found[stage].optimizer == pytest.approx(elements * (4 + 12 / 4), rel=1e-3)
    kept = found["zero3"].parameters + found["zero3"].optimizer
    assert kept == pytest.approx(elements * 16 / 4, rel=1e-3)
    sent = {name: plan.sent / (size * 3 / 4) for name, plan in found.items()}
    expected = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp2": 2, "fsdp2-layers": 3 - report.step.root / size}
    assert sent == pytest.approx(expected, rel=1e-3)
    assert all(0 < p.waiting <= p.sent / 1e9 * (1 + 1e-9) for p in report.plans)  # some is hidden, or none


def test_one_rank_sends_nothing_and_waits_for_nothing() -> None:
    report = planned((1, 8), ranks=[1], link="1GB", strategies=["ddp", "zero3"])
    assert [(p.sent, p.waiting, p.fits) for p in report.plans] == [(0, 0.0, None)] * 2
    assert [p.seconds for p in report.plans] == [p.computing for p in report.plans]


def test_what_fits_and_what_a_budget_makes_of_it() -> None:
    free = planned((4, 128), ranks=[8], strategies=["zero1"]).plans[0]
    within = free.peak - free.passing // 4
    model = ORTModule(peaks_at_ranks.model(), options=Options(memory_budget=0.5))
    cluster = Cluster(ranks=[8], strategies=["zero1"], memory=within, bucket=peaks_at_ranks.BUCKET)
    assert planned((4, 128), ranks=[8], strategies=["zero1"], memory=within).plans[0].fits is False
    assert model.plan(cluster, peaks_at_ranks.batch((4, 128))).plans[0].fits is True


def test_a_model_that_no_machine_here_holds() -> None:
    """A Llama of 7 billion parameters: 13 GiB in bfloat16, of which none is allocated."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16)
    ids = torch.zeros(1, 512, dtype=torch.long)
    cluster = Cluster(ranks=(8, 64, 1024), memory="80GB", link="50GB", speed="400T", bandwidth="3TB")
    report = ORTModule(model).plan(cluster, input_ids=ids, labels=ids)
    assert report.step.elements == sum(p.numel() for p in model.parameters()) == 6_738_415_616
    assert len(report.plans) == 18 and model.lm_head.weight.is_meta
    by = {(p.strategy, p.ranks): p for p in report.plans}
    for strategy in ("zero1", "zero2", "zero3", "fsdp2", "fsdp2-layers"):
        assert by[strategy, 1024].peak < by[strategy, 64].peak < by[strategy, 8].peak < by["ddp", 8].peak
    assert by["ddp", 8].optimizer == 2 * report.step.weights  # torch's optimizers keep it in the parameters' type
    forward, _ = report.step.seconds
    assert forward > 2 * 6.6e9 * 512 / 400e12  # two operations for a parameter and a token, at least
    assert ORTModule(model).memory_report(input_ids=ids, labels=ids).weights == report.step.all


def test_text_page_and_numbers(tmp_path: Path) -> None:
    report = planned((1, 8), ranks=[2, 4], strategies=["zero2", "fsdp2"], memory="1GiB")
    lines = str(report).splitlines()
    assert lines[0].startswith("GPT2LMHeadModel: ") and "1.0 GiB" in lines[1]
    assert [line.split()[:2] for line in lines[4:]] == [[n, s] for n in "24" for s in ("zero2", "fsdp2")]
    page = report.save(tmp_path / "ranks.html").read_text()
    assert page.count("<tr>") == 5 and page.count("<h1>") == 1
    assert report._repr_html_().startswith("<iframe")
    told = json.loads(json.dumps(report.as_dict()))
    assert [p["peak"] for p in told["plans"]] == [p.peak for p in report.plans]
    assert told["cluster"]["memory"] == 2**30 and set(HELD) < told["plans"][0].keys()


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"ranks": ()}, "no numbers of ranks"),
        ({"ranks": (0,)}, "no numbers of ranks"),
        ({"ranks": (2,), "strategies": ("zero4",)}, "no strategy 'zero4'"),
        ({"ranks": (2,), "optimizer": "adams"}, "no optimizer 'adams'"),
        ({"ranks": (2,), "memory": "80"}, None),
        ({"ranks": (2,), "memory": "much"}, "memory='much' is no number of bytes"),
        ({"ranks": (2,), "speed": "fast"}, "speed='fast' are no operations"),
        ({"ranks": (2,), "speed": -1}, "speed=-1 are no operations"),
        ({"ranks": (2,), "bucket": 0.5}, "no number of elements"),
    ],
)
def test_what_can_be_stated(stated: dict[str, object], said: str | None) -> None:
    if said is None:
        assert Cluster(**stated).memory == 80
        return
    with pytest.raises(OptionError, match=said):
        Cluster(**stated)
