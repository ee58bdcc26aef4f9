"""What wants a CUDA device, in under nine minutes: ``python -m benchmarks.gpu``, or ``make gpu``.

First the tests marked ``gpu``, then the runs of the preset ``gpu`` beside eager PyTorch and ``torch.compile`` in
bfloat16, as many as there is time for. Both are in ``out/gpu.json``, what the tests printed in ``out/gpu-tests.txt``:
written after each part, so that a machine that is taken away has told what it found so far.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, run
from benchmarks.workloads import PRESETS

ROOT = Path(__file__).parents[1]
_FOR_TESTS = 0.6  # of the time at most
_TO_STOP = 15.0  # seconds
_PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background was told to ignore it
sys.exit(pytest.main(sys.argv[1:]))
"""
_NONE_THERE = 5  # pytest's exit code where no test is left: there is no device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and the benchmarks; 0 where all passed and agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=520.0, help="for all; no run of a benchmark begins later")
    parser.add_argument("--device", default="cuda", help="where the benchmarks train; default cuda")
    parser.add_argument("--jobs", type=int, default=8, help="processes that test")
    parser.add_argument("--only", choices=("tests", "steps"), help="one part")
    parser.add_argument(
        "--runs", nargs="+", choices=tuple(PRESETS["gpu"]), metavar="RUN", help="these benchmarks alone"
    )
    parser.add_argument("--json", type=Path, default=Path("out/gpu.json"))
    options, sizes = parser.parse_known_args(arguments)
    begun, failed = time.monotonic(), 0
    found: dict[str, Any] = {"facts": report.facts(options.device)}
    if options.only != "steps":
        found["tests"] = tested(options.jobs, options.seconds * _FOR_TESTS, options.json.with_name("gpu-tests.txt"))
        failed = int(not found["tests"]["passed"])
        report.write(options.json, found)
        print("\n".join([*found["tests"]["failed"], found["tests"]["summary"]]), flush=True)
    if options.only != "tests":
        kept = options.json.with_name("gpu-steps.json")
        left = options.seconds - (time.monotonic() - begun)
        stated = ["--preset", "gpu", "--device", options.device, "--within", str(left), "--json", str(kept)]
        failed |= run.main([*(options.runs or ()), *stated, *sizes])
        report.write(options.json, found | {"steps": json.loads(kept.read_text()) if kept.exists() else []})
    return failed


def tested(jobs: int, limit: float, log: Path) -> dict[str, Any]:
    """Run the tests that are marked; whether all passed, which failed, and pytest's last line.

    Args:
        jobs: processes.
        limit: seconds after which they are stopped.
        log: where all that they print goes.
    """
    files = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
    side_by_side = ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-c", _PYTEST, "-m", "gpu", "-rfE", *side_by_side, *map(str, files)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it tells what it has found
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_STOP)
            process.kill()
    lines = [line.strip("= ") for line in log.read_text().splitlines()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    passed = process.returncode in (0, _NONE_THERE)
    return {"passed": passed, "failed": failed, "summary": next(filter(None, reversed(lines)), "")}


if __name__ == "__main__":
    sys.exit(main())
