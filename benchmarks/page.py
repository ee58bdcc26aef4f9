"""docs/benchmarks.md and its pictures, from what ``benchmarks.all`` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FOLDER = PAGE.with_suffix("")
RESULTS = FOLDER / "results.json"

_OURS = ("torch", "onnxruntime")
_NAMES = {
    "eager": "eager, fused AdamW",
    "eager-default": "eager, default AdamW",
    "compile": "torch.compile",
    "torch": "**onnxtrain**",
    "onnxruntime": "onnxtrain on onnxruntime",
}
_COLOURS = {"eager": "#7a7a7a", "compile": "#c46a1b", "onnxtrain": "#2f5fb3", "cached": "#6f9de8"}
_COLUMNS = "| | step | to eager | to compile | first step | peak memory | of the roofline |"
_HEAD = """# Benchmarks

Written by `make bench-all`; the numbers behind it are in [results.json](benchmarks/results.json). {facts}.

All variants of a run train in one process on the same batches, step by step in turn, whoever begins rotating, from
the same weights. Times are medians of {steps} steps of forward, backward and AdamW; ratios are medians over steps on
the same batch, to eager PyTorch with the fused AdamW and to `torch.compile(dynamic=True)`. Peak memory is what torch
allocates in forward and backward, gradients among it. Of the roofline is the share of the operators' time that this
machine needs at least for their products or bytes. `benchmarks/README.md` says how it is measured.
"""


def write(found: Mapping[str, Any]) -> None:
    """Write the page and its pictures.

    Args:
        found: ``facts`` of the machine; ``steps``, as ``benchmarks.run`` writes them; ``starts``, for each model and
            variant what its first step took.
    """
    FOLDER.mkdir(exist_ok=True)
    draw_ratios(found["steps"], FOLDER / "ratios.svg")
    parts = [_HEAD.format(facts=_facts(found["facts"]), steps=found["steps"][0]["settings"]["steps"])]
    parts += [
        "## At a glance\n",
        "![How many times as fast as eager PyTorch and as torch.compile](benchmarks/ratios.svg)\n",
    ]
    parts += [_losses(found["steps"]), "## Steps\n", *map(_run, found["steps"])]
    if found["starts"]:
        draw_starts(found, FOLDER / "starts.svg")
        parts += ["## First steps\n", _starts(found["starts"])]
        parts += ["![Seconds until step N, start included](benchmarks/starts.svg)\n"]
    PAGE.write_text("\n".join(parts))


def _facts(facts: Mapping[str, Any]) -> str:
    versions = f"torch {facts['torch']}, onnxruntime {facts['onnxruntime']}, Python {facts['python']}"
    return f"Machine: {facts['processor']}, {facts['threads']} threads; {versions}"


def _losses(steps: Sequence[Mapping[str, Any]]) -> str:
    """Where onnxtrain is slower than one of the others, said first."""
    lines = []
    for run in steps:
        for result in _of(run, "torch"):
            data = " on batches grouped by length" if result["name"].endswith("-grouped") else ""
            for other, key in (("eager PyTorch", "speed"), ("torch.compile", "speed_to_compile")):
                if (ratio := result[key]) is not None and ratio < 1:
                    lines.append(f"* {run['workload']}{data}: {ratio:.2f}x of {other}'s speed\n")
    return "".join(["Where onnxtrain is slower:\n\n", *lines]) if lines else "Nowhere is onnxtrain slower.\n"


def _run(run: Mapping[str, Any]) -> str:
    size = run["settings"]
    shape = f"{size['layers']} layers of {size['hidden']}, {size['batch']} rows of {size['length']}"
    rows = [f"### {run['workload']}\n", f"{shape}, {size['dtype']}, dropout {size['dropout']}.\n"]
    rows += [f"Losses disagree: {run['problem']}.\n" if run["problem"] else "Losses agree with eager PyTorch's.\n"]
    for kind, title in (("naive", "As they come"), ("grouped", "Grouped by length")):
        results = [r for r in run["results"] if r["name"].endswith("-grouped") == (kind == "grouped")]
        if not results:
            continue
        batch = run["data"].get(kind)
        if batch is not None:
            kept = f"{batch['tokens'] / batch['positions']:.0%} of the positions are tokens"
            rows.append(f"{title}: {kept}, {batch['labels'] / batch['tokens']:.0%} of these have a label.\n")
        rows += [
            "| | step | to eager | to compile | first step | peak memory | of the roofline |",
            "|---|---|---|---|---|---|---|",
        ]
        rows += [*map(_row, results), ""]
    return "\n".join(rows)


def _row(result: Mapping[str, Any]) -> str:
    name = _NAMES.get(result["name"].removesuffix("-grouped"), result["name"])
    if result["error"]:
        return f"| {name} | failed: {result['error'][:80]} | | | | | |"
    cells = [
        f"{1000 * result['median']:.1f} ms",
        _times(result["speed"]),
        _times(result["speed_to_compile"]),
        f"{result['first']:.1f} s",
        "" if result["peak"] is None else f"{result['peak'] / 2**20:.0f} MiB",
        "" if result["roofline"] is None else f"{result['roofline']:.0%}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _times(ratio: float | None) -> str:
    return "" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}x"


def _starts(starts: Mapping[str, Any]) -> str:
    """What a first step costs beyond eager's, in seconds."""
    rows = ["Each in a process of its own, beyond what the same step takes in eager PyTorch.\n"]
    rows += ["| | eager's | torch.compile | onnxtrain | with a cache |", "|---|---|---|---|---|"]
    for name, found in starts.items():
        beyond = [f"{found[v]['wall'] - found['eager']['wall']:+.2f} s" for v in ("compile", "onnxtrain", "cached")]
        rows.append(f"| {name} | {found['eager']['wall']:.2f} s | {' | '.join(beyond)} |")
    return "\n".join([*rows, ""])


def draw_ratios(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A bar for each run and kind of data: how many times as fast as eager PyTorch and torch.compile.

    Args:
        steps: the runs.
        path: of the picture.
    """
    rows = [
        (f"{run['workload']}{', grouped' if r['name'].endswith('-grouped') else ''}", r)
        for run in steps
        for r in _of(run, "torch")
    ]
    figure, axes = _figure(8, 1 + 0.5 * len(rows))
    for index, (_, result) in enumerate(rows):
        for shift, key, colour in ((-0.2, "speed", "eager"), (0.2, "speed_to_compile", "compile")):
            if (ratio := result[key]) is not None:
                axes.barh(index + shift, ratio, 0.36, color=_COLOURS[colour])
                axes.text(ratio, index + shift, f" {ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as eager PyTorch (grey) and as torch.compile (orange)")
    _save(figure, path)


def draw_starts(found: Mapping[str, Any], path: Path) -> None:
    """Seconds until step N of BERT, start included.

    Args:
        found: what was measured.
        path: of the picture.
    """
    run = next(iter(found["steps"]))
    median = {kind: r["median"] for kind in ("eager", "compile", "torch") for r in _of(run, kind)[:1]}
    starts = found["starts"].get("bert") or next(iter(found["starts"].values()))
    figure, axes = _figure(8, 4)
    for name, kind in (("eager", "eager"), ("compile", "compile"), ("onnxtrain", "torch"), ("cached", "torch")):
        if kind in median:
            times = [*accumulate([starts[name]["wall"], *[median[kind]] * 40])]
            axes.plot(range(1, len(times) + 1), times, color=_COLOURS[name], label=name)
    axes.set_xlabel(f"step of {run['workload']}")
    axes.set_ylabel("seconds since the start")
    axes.legend()
    _save(figure, path)


def _of(run: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """A variant's results that did not fail: of batches as they come, and grouped."""
    return [r for r in run["results"] if r["name"].removesuffix("-grouped") == kind and not r["error"]]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
