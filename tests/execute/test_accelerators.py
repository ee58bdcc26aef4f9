"""Programs for an accelerator, run without one: nothing lies elsewhere, and the host waits for nothing but sizes."""

from __future__ import annotations

import json
import subprocess
import sys

import accelerator
import pytest
import torch
from torch.torch_version import TorchVersion

BY_CONTENT = {  # operators whose content decides how large something is, or what runs
    *("Cofactors", "Compress", "If", "Loop", "NonZero", "RoiAlign", "RoiAlignGrad"),
}
NO_SIZE = ("DynamicOutputShapeException", "DataDependentOutputException")  # the same, of which torch has no fake kernel
# rows of the table whose operands are numbers that nobody knows before
AT_RUN_TIME = ("-run-time", "Window", "ConstantOfShape", "MelWeightMatrix", "STFT", "PadAndUnflatten-input")
OTHERS = {
    "Pad-learned-value": "the value that is filled in is a number of the device",
    "GatherND-one-tuple": "one index of all axes is a number for torch",
}
if TorchVersion(torch.__version__) < (2, 15):
    OTHERS["LSTM-plain"] = "torch's fake kernel takes no cell without bias"
    for kind in ("plain", "states", "reverse", "both", "batch-first"):
        OTHERS[f"GRU-{kind}"] = "torch has no fake kernel of the fused cell"


def found(*what: str) -> dict[str, dict[str, int] | str]:
    """What the tool prints, for each line its name."""
    made = subprocess.run([sys.executable, accelerator.__file__, *what], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    return dict(map(json.loads, made.stdout.splitlines()))


def test_operators_wait_for_nothing_but_sizes() -> None:
    rows = found("operators")
    assert len(rows) > 800
    wrong = {name: seen for name, seen in rows.items() if seen and not _is_known(name, seen)}
    assert not wrong
    assert {name for name in OTHERS if not rows[name]} == set(), "these wait no longer: take them out of the list"


def _is_known(name: str, seen: dict[str, int] | str) -> bool:
    if name in OTHERS or any(part in name for part in AT_RUN_TIME):
        return True
    if isinstance(seen, str):
        return seen.startswith(NO_SIZE)
    return all(place.split()[1] in BY_CONTENT for place in seen)


@pytest.mark.slow
def test_steps_wait_for_nothing() -> None:
    assert found(*accelerator.ARCHITECTURES) == {name: {} for name in accelerator.ARCHITECTURES}
