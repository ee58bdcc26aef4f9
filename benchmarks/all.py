"""All that docs/benchmarks.md shows: ``python -m benchmarks.all``, or ``make bench-all``.

Steps of the preset ``page`` and first steps of some models, on a machine that does nothing else, in about an hour. What
was measured is kept as JSON beside the page, so that the page can be written again without measuring (``--page``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import page, report, run, start
from benchmarks.workloads import PRESETS

STARTED = ("bert", "gpt2", "llama", "resnet", "unet")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and write the page; 0 where all ran and agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=tuple(PRESETS["page"]), metavar="RUN", help="steps of these alone")
    parser.add_argument("--starts", nargs="*", default=STARTED, choices=tuple(start.MODELS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of first steps")
    parser.add_argument("--page", action="store_true", help="write the page again from what was measured before")
    options, sizes = parser.parse_known_args(arguments)
    failed = 0
    if not options.page:
        failed, steps = _steps(options, sizes)
        found = {"facts": report.facts(), "steps": steps, "starts": _starts(options.starts, options.repeats)}
        report.write(page.RESULTS, found)
    page.write(json.loads(page.RESULTS.read_text()))
    print(f"written to {page.PAGE}")
    return failed


def _steps(options: argparse.Namespace, sizes: Sequence[str]) -> tuple[int, Any]:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "steps.json"
        chosen = [*(options.runs or ()), "--preset", "page", "--roofline", "--steps", str(options.steps), *sizes]
        failed = run.main([*chosen, "--json", str(kept)])
        return failed, json.loads(kept.read_text())


def _starts(models: Sequence[str], repeats: int) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """What the first step takes of each variant of each model, in processes of their own."""
    found = {}
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [
                {variant: start.measure(name, variant, 0, Path(folder)) for variant in start.VARIANTS}
                for _ in range(repeats)
            ]
        found[name] = {v: start.medians([one[v] for one in rounds]) for v in start.VARIANTS}
        print(start.report(name, found[name]), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
