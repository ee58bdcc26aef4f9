"""What a step frees of the host's memory, and what the next one finds of it."""

import os
import subprocess
import sys

import pytest
import torch

import onnxtrain.execute.torch
from onnxtrain import Options, ORTModule
from onnxtrain.execute.torch.heap import _CHOSEN, _is_glibc

ROUNDS = """
import resource, torch
from onnxtrain.execute.torch.heap import keep_freed

is_kept = keep_freed()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**22) for _ in range(16)]  # of 16 MiB each
    del held
print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(**environment: str) -> tuple[str, int]:
    """Whether what is freed is kept, and how many pages the last of four rounds faulted in."""
    ambient = {name: text for name, text in os.environ.items() if name not in (*_CHOSEN, "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", ROUNDS]
    done = subprocess.run(command, env=ambient | environment, capture_output=True, text=True, check=True)
    is_kept, faults = done.stdout.split()
    return is_kept, int(faults)


@pytest.mark.skipif(not _is_glibc(), reason="another C library")
def test_what_is_freed_is_there_for_the_next_round() -> None:
    is_kept, kept = run()
    assert is_kept == "True"
    _, given_back = run(MALLOC_MMAP_THRESHOLD_=str(2**20))  # which tensors are above: each has pages of its own
    assert kept < 0.1 * given_back, (kept, given_back)


def test_thresholds_that_the_environment_chose_stay() -> None:
    assert run(MALLOC_TRIM_THRESHOLD_=str(2**20))[0] == "False"
    assert run(GLIBC_TUNABLES="glibc.malloc.trim_threshold=1048576")[0] == "False"


@pytest.mark.parametrize(("options", "is_kept"), [(Options(), True), (Options(keep_freed=False), False)])
def test_training_keeps_it_if_it_may(options: Options, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(onnxtrain.execute.torch, "keep_freed", lambda: calls.append(None))
    model = ORTModule(torch.nn.Linear(2, 2), options=options)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert not calls, "inference frees all that it takes"
    model(torch.ones(1, 2)).sum().backward()
    assert bool(calls) == is_kept
