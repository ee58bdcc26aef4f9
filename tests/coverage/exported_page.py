"""The report of the walk over exported models."""

from __future__ import annotations

import collections
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LIBRARIES = ("torch", "torchvision", "timm", "transformers", "tf2onnx", "keras", "skl2onnx", "onnx", "onnxruntime")


Key = tuple[str, str, int]


def text(outcomes: Mapping[Key, Any], missing: Sequence[str], unwalked: Sequence[Key] = ()) -> str:
    """Counts, a line for each architecture, then failures, what exporters did not write, and notes."""
    found = list(outcomes.values())
    passed = sum(o.status == "pass" for o in found)
    unwritten = [o for o in found if o.status == "exporter"]
    models = dict.fromkeys(o.model for o in found)
    exporters = list(dict.fromkeys(o.exporter for o in found))
    lines = [
        "# What exporters write",
        "",
        "Written by `exported.py --page`: each small random model is exported, made artifacts, is",
        "trained for 10 steps of AdamW and exported again. What is trained by default must be what the module trains,",
        "each loss eager's within 1e-3, the trained model valid and its outputs eager's. A model that was",
        "exported with its BatchNormalization multiplied into other weights is compared with a module in that form.",
        f"{_versions()}.",
        "",
        f"**{passed} of {len(found) - len(unwritten)} models that were written pass, of {len(models)} architectures.** "
        f"{len(unwritten)} were not written, or do not run as they are: the exporter's fault.",
        *([f"{_sum(unwalked)} were not walked yet."] if unwalked else []),
        *([f"Not installed: {', '.join(missing)}."] if missing else []),
        "",
        "The numbers are the opsets that pass; `13→18` was asked for as 13 and written as 18.",
        "",
        f"| architecture | {' | '.join(exporters)} |",
        f"|---|{'---|' * len(exporters)}",
    ]
    for model in models:
        cells = [_cell(o for o in found if (o.model, o.exporter) == (model, e)) for e in exporters]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    failures = [o for o in found if o.status not in ("pass", "exporter")]
    lines += _grouped("Failures", failures, lambda o: f"{o.status}: {o.reason}")
    lines += _grouped("Not written, by fault of the exporter", unwritten, lambda o: o.reason)
    lines += _grouped("Trained in another form", (o for o in found if o.notes), lambda o: "; ".join(o.notes))
    return "\n".join(lines) + "\n"


def _versions() -> str:
    known = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if name in known)


def _sum(keys: Sequence[Key]) -> str:
    """How many there are of each exporter."""
    return ", ".join(f"{count} of {name}" for name, count in collections.Counter(e for _, e, _ in keys).items())


def _cell(outcomes: Iterable[Any]) -> str:
    given = sorted(outcomes, key=lambda o: o.opset)
    passed = [_opset(o) for o in given if o.status == "pass"]
    failed = [_opset(o) for o in given if o.status not in ("pass", "exporter")]
    return " ".join(passed) + (f" **fails: {' '.join(failed)}**" if failed else "") or "–"


def _opset(outcome: Any) -> str:
    if not outcome.opset:
        return f"default ({outcome.written})" if outcome.written else "default"
    changed = outcome.written and outcome.written != outcome.opset
    return f"{outcome.opset}→{outcome.written}" if changed else str(outcome.opset)


def _grouped(title: str, outcomes: Iterable[Any], say: Any) -> list[str]:
    """A table: what is said, then which models it is said of."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for o in outcomes:
        rows.setdefault((o.model, o.exporter, say(o)), []).append(_opset(o))
    together: dict[tuple[str, str, str], list[str]] = {}
    for (model, exporter, said), opsets in rows.items():
        together.setdefault((exporter, " ".join(opsets), said), []).append(model)
    if not together:
        return []
    lines = ["", f"## {title}", "", "| what | exporter | opsets | models |", "|---|---|---|---|"]
    for (exporter, opsets, said), models in together.items():
        lines.append(f"| {said.replace('|', '/')[:600]} | {exporter} | {opsets} | {', '.join(models)} |")
    return lines
