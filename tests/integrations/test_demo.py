"""What `make demo` runs, on a few steps."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from example_scripts import load_example
from rich.console import Console

pytestmark = pytest.mark.slow
example = load_example("finetune_minilm")


def test_both_train_and_leave_a_picture_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "curves.png"
    monkeypatch.setattr(sys, "argv", ["demo", "--steps", "5", "--batch", "4", "--out", str(out)])
    example.main()
    said = capsys.readouterr().out
    apart = re.search(r"largest difference between the two losses over 5 steps: (\S+)", said)
    assert apart is not None and float(apart[1]) < 1e-4
    line = re.search(r"step 5/5  loss  eager \S+  ORTModule \S+  speed \S+x   padding \d+%   operations (\d+)%", said)
    assert line is not None and int(line[1]) < 95
    assert out.stat().st_size > 10_000 and "MiniLM" not in said.partition("The graph")[0]
    assert "What was captured" in out.with_suffix(".html").read_text()


def test_a_terminal_shows_one_picture_that_moves() -> None:
    model = example.ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    runs = [example.Run(name, m, 1e-3, 3) for name, m in (("eager", torch.nn.Linear(1, 1)), ("ORTModule", model))]
    for run in runs:
        run.losses, run.seconds = [3.0, 2.0, 1.0], [0.3, 0.2, 0.1]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = example.Display(runs, 3, console)
    display.memory, display.padding, display.computed = 3 * 2**20, [0.5, 0.25], [0.5, 0.4]
    with console.capture() as shown:
        console.print(display.picture())
    text = shown.get()
    assert "█▅▁" in text and "speed 1.00x   padding 38%   operations 45% of eager's   memory 3 MiB, predicted" in text
    assert max(map(len, text.splitlines())) <= 84


def test_many_losses_are_drawn_as_means_of_neighbours() -> None:
    assert example.sparkline([4.0, 4.0, 0.0, 0.0], 2) == "█▁"
    assert example.sparkline([1.0], 10) == "▁" and len(example.sparkline([*map(float, range(100))], 40)) == 40
