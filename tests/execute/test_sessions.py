"""The sessions of the onnxruntime backend: where much is saved there are several, and what one has read is freed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from releases import needs_tensors_over_dlpack
from torch import nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import BackendError
from onnxtrain.execute import onnxruntime as backend


@pytest.fixture(autouse=True)
def _recent() -> None:
    needs_tensors_over_dlpack("onnxruntime")


class Layers(nn.Module):
    """Residual blocks, the first weight of which the last one reads again; a mask and an integer are saved, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x).masked_fill(ids[..., None] == 3, 0.0)
        return (x @ self.words.weight.T).logsumexp(-1).mean()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each session had that ran from now on."""
    found: list[int] = []
    run = backend._Part.run

    def seen(part: Any, values: Any) -> Any:
        found.append(len(part.inputs))
        return run(part, values)

    monkeypatch.setattr(backend._Part, "run", seen)
    return found


def test_the_backward_pass_is_cut_where_much_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Layers()
    whole = ORTModule(copy.deepcopy(model), options=Options(backend="onnxruntime"))
    monkeypatch.setattr(backend, "_SAVED", 2048)
    parted = ORTModule(copy.deepcopy(model), options=Options(backend="onnxruntime"))
    ran = counted(monkeypatch)
    counts = []
    for rows in (1, 12, 12, 2):
        ids = torch.randint(0, 11, (rows, 5))
        for module in (whole, parted):
            module.zero_grad()
            ran.clear()
            module(ids).backward()
        counts.append(len(ran))
        for a, b, plain in zip(whole.parameters(), parted.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            plain.grad = None
        model(ids).backward()
        for a, plain in zip(parted.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, plain.grad)
    assert counts[0] <= 3 and counts[1] == counts[2] == counts[3] > 4, "cut for the largest batch"


def test_sessions_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fewer come of the segments than are wanted."""
    monkeypatch.setattr(backend, "_SAVED", 1)
    monkeypatch.setattr(backend, "merged", lambda segments, most: [[*segments]])
    wrapped = ORTModule(Layers(), options=Options(backend="onnxruntime"))
    ids = torch.randint(0, 11, (2, 5))
    wrapped(ids).backward()
    monkeypatch.setattr(backend, "_Part", None)  # none can be made
    for _ in range(2):
        wrapped(ids).backward()


def test_a_number_of_segments_is_one_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    ids = torch.randint(0, 11, (2, 5))
    found = []
    for segments in (1, 2, "all"):
        wrapped = ORTModule(copy.deepcopy(model), options=Options(backend="onnxruntime", segments=segments))
        ran = counted(monkeypatch)
        wrapped(ids).backward()
        found.append(len(ran) - 1)
    assert found[0] == 1 and found[1] == 2 and found[2] > 3


_MEASURE = """
import gc, sys
from pathlib import Path
import torch
from onnxtrain import Options, ORTModule

def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1024

torch.manual_seed(0)
model = torch.nn.Sequential(*(m for _ in range(10) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())))
if sys.argv[1] == "onnxruntime":
    model = ORTModule(model, options=Options(backend="onnxruntime", summary=False))
def step(rows):
    model(torch.ones(rows, 128)).square().mean().backward()
step(8)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
step(32768)  # 16 MiB a value
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
def test_the_peak_is_no_higher_than_eager_s(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(_MEASURE)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, str(script)]
    ours, eager = (
        float(subprocess.run([*command, name], check=True, capture_output=True, env=environment).stdout)
        for name in ("onnxruntime", "eager")
    )
    assert ours < 1.1 * eager, f"{ours} MiB, and eager {eager} MiB"


def test_an_onnxruntime_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ort.OrtValue, "from_dlpack")
    wrapped = ORTModule(nn.Linear(2, 2), options=Options(backend="onnxruntime"))
    with pytest.raises(BackendError, match=r"takes no tensors over DLPack(.|\n)*onnxruntime>=1\.26"):
        wrapped(torch.ones(1, 2))
