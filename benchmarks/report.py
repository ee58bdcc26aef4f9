"""Results as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result


def table(title: str, results: Sequence[Result]) -> Table:
    """One row for each variant; speed is relative to eager on naively padded batches."""
    made = Table(title=title)
    for name in ("variant", "step", "spread (IQR)", "speed", "first step", "peak memory", ""):
        made.add_column(name, justify="left" if name in ("variant", "") else "right")
    base = next((r for r in results if r.name == "eager" and not r.error), results[0])
    for r in results:
        if r.error:
            made.add_row(r.name, "failed", "", "", "", "", r.error[:60])
            continue
        peak = "n/a" if r.peak is None else f"{r.peak / 2**20:.0f} MiB"
        row = [
            f"{1e3 * r.median:.1f} ms",
            f"{1e3 * r.spread:.1f} ms",
            f"{r.speed(base):.3f}x",
            f"{r.first:.1f} s",
            peak,
        ]
        made.add_row(r.name, *row, "")
    return made


def facts() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    import onnxruntime

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def as_json(workload: str, settings: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Everything that was measured."""
    base = next((r for r in results if r.name == "eager" and not r.error), results[0])
    rows = []
    for r in results:
        derived = {"median": r.median, "spread": r.spread, "speed": r.speed(base)}
        rows.append(dataclasses.asdict(r) | derived)
    return {"workload": workload, "settings": settings, "facts": facts(), "results": rows}


def write(path: Path, content: Any) -> None:
    """JSON, written to a temporary name and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def show(console: Console, title: str, results: Sequence[Result]) -> None:
    """Print the table."""
    console.print(table(title, results))
