"""The examples under the commands that start them in two processes, as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_scripts import EXAMPLES

pytestmark = pytest.mark.slow
PROGRAMS = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "accelerate": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
    "deepspeed": ["deepspeed", "--num_accelerators", "2"],
}
FAILS = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from onnxtrain import ORTModule

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, has_labels=True):
        for block in self.blocks:
            x = x + block(x).relu()
        if not has_labels:
            raise ValueError("a batch without labels")
        return x.square().mean()

dist.init_process_group("gloo")
model = ORTModule(Net())
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model)
else:
    for block in model.blocks:
        fully_shard(block)
    model = fully_shard(model)
for step in range(3):
    model(torch.ones(8, 16), has_labels=step < 2 or dist.get_rank() == 0).backward()
print("finished")
"""


def started(launcher: str, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program did in two processes; none may wait for another that is gone."""
    program, *options = LAUNCHERS[launcher]
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    command = [str(PROGRAMS / program), *options, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("torchrun", "several_processes.py --engine ddp --steps 3"),
        ("torchrun", "several_processes.py --engine fsdp2 --steps 3"),
        ("torchrun", "deepspeed_zero.py --stage 3 --steps 3"),
        ("deepspeed", "deepspeed_zero.py --stage 2 --steps 3"),
        ("accelerate", "accelerate_loop.py --steps 8"),
    ],
)
def test_losses_are_eagers_in_two_processes(request: pytest.FixtureRequest, launcher: str, command: str) -> None:
    if "deepspeed" in command:
        request.getfixturevalue("deepspeed_extensions")
    script, *arguments = command.split()
    done = started(launcher, EXAMPLES / script, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("SAME") == 1 and "DIFFERENT" not in done.stdout


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_fails_ends_the_others_with_its_message(engine: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(FAILS)
    done = started("torchrun", program, engine)
    assert done.returncode == 1 and "finished" not in done.stdout
    assert "ValueError: the forward pass cannot be captured: a batch without labels" in done.stderr
    assert "rank: 1 of 2" in done.stderr and "rank: 0 of 2" not in done.stderr
