"""A tenth of PyTorch's operator database: what fails is in the table, and what is in the table fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("opinfo.py")


@pytest.mark.slow
def test_a_tenth_of_the_operators_agrees_with_eager() -> None:
    command = [sys.executable, str(SCRIPT), "--part", "1/10", "--samples", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
