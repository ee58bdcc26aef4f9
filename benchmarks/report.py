"""Results as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result, same_data
from benchmarks.workloads import Composition

COLUMNS = (
    *("variant", "step", "spread (IQR)", "speed", "to compile", "first step"),
    *("peak memory", "predicted", "to eager", ""),
)


def table(title: str, results: Sequence[Result]) -> Table:
    """One row for each variant; ratios are to eager and to compile on the same batches."""
    made = Table(title=title)
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("variant", "") else "right")
    for r in results:
        if r.error:
            made.add_row(r.name, "failed", *[""] * (len(COLUMNS) - 3), r.error[:60])
            continue
        ratios = _ratios(r, results)
        row = [
            f"{1e3 * r.median:.1f} ms",
            "" if math.isnan(r.spread) else f"{1e3 * r.spread:.1f} ms",
            _times(ratios["speed"]),
            _times(ratios["speed_to_compile"]),
            f"{r.first:.1f} s",
            "n/a" if r.peak is None else f"{r.peak / 2**20:.1f} MiB",
            f"{r.predicted / r.peak - 1:+.2%}" if r.peak and r.predicted else "",
            _times(ratios["memory"]),
        ]
        made.add_row(r.name, *row, "")
    return made


def _ratios(result: Result, results: Sequence[Result]) -> dict[str, float | None]:
    """A result's ratios to eager and compile on the same batches; None where there is nothing to compare to."""
    eager, compiled = (same_data(kind, result, results) for kind in ("eager", "compile"))
    found = {
        "speed": None if eager is None else result.speed(eager),
        "speed_to_compile": None if compiled is None else result.speed(compiled),
        "memory": None if eager is None else result.memory(eager),
    }
    return {name: None if value is None or math.isnan(value) else value for name, value in found.items()}


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x"


def data_table(title: str, data: Mapping[str, Composition]) -> Table:
    """What a batch of each kind of data consists of, in the mean."""
    made = Table(title=title)
    for name in ("data", "positions", "tokens", "padding", "labels", "labels / tokens"):
        made.add_column(name, justify="left" if name == "data" else "right")
    for name, c in data.items():
        row = (
            f"{c.positions:.0f}",
            f"{c.tokens:.0f}",
            f"{c.padding:.1%}",
            f"{c.labels:.1f}",
            f"{c.labels / c.tokens:.1%}",
        )
        made.add_row(name, *row)
    return made


def facts(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that a figure belongs to.

    Args:
        device: where is trained.
    """
    import onnxruntime

    return {
        "processor": _processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def _processor() -> str:
    """Its name, and whether it multiplies matrices of bfloat16 by itself."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*: (.*)$", text, re.M)
    units = [name for name in ("amx_bf16", "avx512_bf16") if name in text]
    return f"{found[1] if found else platform.processor()}, {' and '.join(units) or 'no AMX, no AVX512-BF16'}"


def as_json(
    workload: str, settings: dict[str, Any], results: Sequence[Result], data: Mapping[str, Composition] | None = None
) -> dict[str, Any]:
    """Everything that was measured."""
    rows = []
    for r in results:
        derived = {"median": r.median, "spread": r.spread, **_ratios(r, results)}
        rows.append(dataclasses.asdict(r) | derived)
    batches = {name: dataclasses.asdict(c) | {"padding": c.padding} for name, c in (data or {}).items()}
    stated = facts(settings.get("device", "cpu"))
    return {"workload": workload, "settings": settings, "facts": stated, "data": batches, "results": rows}


def write(path: Path, content: Any) -> None:
    """JSON, written to a temporary name and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def show(
    console: Console, title: str, results: Sequence[Result], data: Mapping[str, Composition] | None = None
) -> None:
    """Print what the batches are, and a table for each kind of them: naively padded, and length-grouped."""
    if data:
        console.print(data_table("a batch in the mean", data))
    for name, chosen in (("", [r for r in results if not r.grouped]), (", grouped", [r for r in results if r.grouped])):
        if chosen:
            console.print(table(f"{title}{name}", chosen))
