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
def test_losses_are_eagers_in_two_processes(launcher: str, command: str) -> None:
    if "deepspeed" in command:
        pytest.importorskip("deepspeed")
    script, *arguments = command.split()
    program, *options = LAUNCHERS[launcher]
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    started = [str(PROGRAMS / program), *options, str(EXAMPLES / script), *arguments]
    done = subprocess.run(started, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("SAME") == 1 and "DIFFERENT" not in done.stdout
