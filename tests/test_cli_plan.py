"""``onnxtrain plan``: what a step needs, of a module and of a file, as text, JSON and a page."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from test_cli import run
from torch import Tensor, nn

from onnxtrain import ORTModule

MODULE = """
import test_cli_plan


def step():
    return test_cli_plan.Deep(), test_cli_plan.batch()


def with_optimizer():
    made = test_cli_plan.Deep()
    return made, {"x": test_cli_plan.batch()}, test_cli_plan.torch.optim.AdamW(made.parameters())


def named():
    return test_cli_plan.Deep(), {"x": test_cli_plan.batch()}


def nothing():
    return None
"""


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [16, *[64] * 5]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(nn.functional.gelu(layer(x)))
        return x.square().sum()


def batch() -> Tensor:
    return torch.ones(256, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of Python, and the model as a file."""
    made = tmp_path_factory.mktemp("plan")
    (made / "planned.py").write_text(MODULE)
    torch.onnx.export(
        Deep().eval(), (batch(),), made / "model.onnx", input_names=["x"], dynamic_shapes=({0: "rows"},), verbose=False
    )
    return made


def told(folder: Path, *arguments: str) -> dict:
    status, text, error = run(folder, "plan", *arguments, "--json")
    assert status == 0, error
    return json.loads(text)


def test_a_module_and_its_file_need_the_same(folder: Path) -> None:
    expected = ORTModule(Deep()).memory_report(batch())
    module, file = told(folder, "planned:step"), told(folder, "model.onnx", "--sizes", "x=256,16")
    assert module["peak"] == expected.peak == max(line["most"] for line in module["timeline"])
    assert file["peak"] == pytest.approx(expected.peak, rel=0.01)
    assert module["weights"] == file["weights"] == sum(p.nbytes for p in Deep().parameters())
    assert told(folder, "planned:named")["peak"] == expected.peak
    assert told(folder, "model.onnx", "--sizes", "x=512,16")["peak"] > 1.8 * file["peak"]


@pytest.mark.parametrize("what", [["planned:step"], ["model.onnx", "--sizes", "x=256,16"]])
def test_a_budget_is_kept_and_what_runs_again_is_named(folder: Path, what: list[str]) -> None:
    free = told(folder, *what)
    found = told(folder, *what, "--budget", str(free["peak"] * 3 // 4))
    assert not free["computed_again"] and free["largest_batch"] is None
    assert found["peak"] <= free["peak"] * 3 // 4 < found["without_budget"] == free["peak"]
    assert any("Gelu" in again["operators"] for again in found["computed_again"])
    assert found["largest_batch"] >= 256
    assert sum(holder["bytes"] for holder in found["at_the_peak"]) == found["peak"]


@pytest.mark.parametrize("what", [["planned:step"], ["model.onnx", "--sizes", "x=256,16"]])
def test_saved_values_may_wait_in_a_folder(folder: Path, what: list[str]) -> None:
    least = told(folder, *what, "--budget", "min")
    found = told(folder, *what, "--budget", "min", "--offload", str(folder))
    assert found["elsewhere"] and not least["elsewhere"]
    assert found["peak"] < least["peak"]


def test_a_text_and_a_page(folder: Path) -> None:
    status, text, error = run(folder, "plan", "planned:step", "--budget", "0.75", "--html", "memory.html")
    assert (status, error) == (0, "")
    for part in ("a step needs", "the budget", "what is in use at the peak", "what is computed again"):
        assert part in text, part
    assert (folder / "memory.html").read_text().count("<svg") == 1


def test_a_part_of_the_weights_needs_less(folder: Path) -> None:
    whole = told(folder, "model.onnx", "--sizes", "x=256,16")
    part = told(folder, "model.onnx", "--sizes", "x=256,16", "--train", "layers.4.*")
    assert part["peak"] < whole["peak"]
    assert 0 < part["gradients"] < whole["gradients"]


def test_many_ranks(folder: Path) -> None:
    stated = ["--ranks", "2", "16", "--strategies", "zero1", "fsdp2", "--memory", "1GiB", "--link", "10GB"]
    found = told(folder, "planned:step", *stated, "--speed", "1T", "--bandwidth", "100GB", "--optimizer", "momentum")
    assert [(p["ranks"], p["strategy"]) for p in found["plans"]] == [
        (ranks, strategy) for ranks in (2, 16) for strategy in ("zero1", "fsdp2")
    ]
    assert all(p["fits"] is False or p["peak"] < 2**30 for p in found["plans"])
    assert found["cluster"]["optimizer"] == "momentum" and found["plans"][0]["waiting"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["planned:step", "--budget", "1KiB"], "a step needs at least"),
        (["planned:nothing"], "returns a NoneType"),
        (["planned:absent"], "planned has no function absent"),
        (["absent:step"], "absent cannot be imported"),
        (["absent.onnx"], "cannot be read"),
        (["model.onnx"], "the sizes of x=rows,16 are not known"),
        (["model.onnx", "--sizes", "x=4,17"], "x is rows,16, not 4,17"),
        (["model.onnx", "--sizes", "y=4,16"], "there is no input y"),
        (["planned:step", "--sizes", "x=4,16"], "--sizes says nothing about planned:step"),
        (["model.onnx", "--worst-case", "x=4,16"], "--worst-case says nothing about model.onnx"),
        (["model.onnx", "--sizes", "x=4,16", "--ranks", "2"], "--ranks says nothing about model.onnx"),
        (["planned:step", "--memory", "80GB"], "--memory says nothing about planned:step"),
        (["planned:step", "--ranks", "2", "--strategies", "zero4"], "there is no strategy 'zero4'"),
    ],
)
def test_what_cannot_be_planned(folder: Path, arguments: list[str], said: str) -> None:
    status, text, error = run(folder, "plan", *arguments)
    assert (status, text) == (2, "")
    assert said in error and "cure:" in error


@pytest.mark.parametrize("what", ["planned:step", "planned:named", "planned:with_optimizer"])
def test_the_time_of_a_step(folder: Path, what: str) -> None:
    status, text, error = run(folder, "profile", what, "--json", "--html", str(folder / "time.html"))
    assert status == 0, error
    found = json.loads(text)
    assert sum("Gelu" in line["operator"] for line in found["lines"]) == 2 * 5
    assert (found["optimizer"] is not None) == (what == "planned:with_optimizer")
    assert "Time of a step" in (folder / "time.html").read_text()


@pytest.mark.parametrize("what", ["model.onnx", "planned:nothing", "planned:gone"])
def test_what_has_no_time_to_tell(folder: Path, what: str) -> None:
    status, _, error = run(folder, "profile", what)
    assert status == 2 and ("package.module:function" in error or "return a module" in error)
