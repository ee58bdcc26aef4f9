"""Compare two directories of a StatisticsSubscriber, eager PyTorch's and ORTModule's, and name where they part.

``python -m onnxtrain.utils.hooks.merge_activation_summary --pt_dir D1 --ort_dir D2 --output_dir D3``
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from onnxtrain.utils.hooks.statistics import ORDER

SUMMARY = "summary.txt"
_EXACT = ("shape", "dtype", "size", "nan", "inf")
_CLOSE = ("min", "max", "mean", "std")
_WIDTH = 48


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One tensor's file: its lines, its fields, its first values."""

    lines: tuple[str, ...]
    fields: dict[str, str]
    values: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Recorded | None:
        """Parse a file; None where there is none."""
        if not path.is_file():
            return None
        lines = path.read_text().splitlines()
        split = next((i for i, line in enumerate(lines) if line.startswith("first ")), len(lines))
        fields = dict(line.split(": ", 1) for line in lines[:split] if ": " in line)
        return cls(tuple(lines), fields, tuple(float(v) for line in lines[split + 1 :] for v in line.split()))

    @property
    def scale(self) -> float:
        """The largest absolute value of the tensor."""
        return max((abs(v) for v in map(float, (self.fields["min"], self.fields["max"])) if v == v), default=0.0)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two recorded tensors differ.

    Args:
        step: the step's folder name.
        name: the tensor.
        error: largest difference found, relative to the tensor's largest value in eager PyTorch.
        reason: what differs beyond the tolerance; empty where nothing does.
    """

    step: str
    name: str
    error: float
    reason: str

    def __str__(self) -> str:
        return f"{self.step}/{self.name}: {self.reason or 'same'} (relative error {self.error:.2e})"


def compare(step: str, name: str, pt: Recorded | None, ort: Recorded | None, rtol: float, atol: float) -> Difference:
    """Compare shape, type and counts exactly, statistics and first values relative to the largest value."""
    if pt is None or ort is None:
        return Difference(step, name, math.inf, f"only in {'ort' if pt is None else 'pt'}")
    for key in _EXACT:
        if pt.fields.get(key) != ort.fields.get(key):
            return Difference(
                step, name, math.inf, f"{key} is {pt.fields.get(key)} in pt, {ort.fields.get(key)} in ort"
            )
    pairs = [(key, float(pt.fields[key]), float(ort.fields[key])) for key in _CLOSE]
    pairs += [(f"value {i}", a, b) for i, (a, b) in enumerate(zip(pt.values, ort.values, strict=True))]
    worst, a, b = max(pairs, key=lambda pair: _distance(pair[1], pair[2]))
    distance, scale = _distance(a, b), pt.scale
    error = 0.0 if distance == 0.0 else distance / scale if scale else math.inf
    reason = f"{worst} is {a!r} in pt, {b!r} in ort" if distance > rtol * scale + atol else ""
    return Difference(step, name, error, reason)


def _distance(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def merge(pt_dir: Path, ort_dir: Path, output_dir: Path, rtol: float, atol: float) -> list[Difference]:
    """Write every tensor of both sides side by side, and the summary; the comparisons in order.

    Raises:
        FileNotFoundError: a directory is missing or holds no steps.
    """
    steps = sorted({*_steps(pt_dir), *_steps(ort_dir)}, key=lambda s: (len(s), s))
    found: list[Difference] = []
    for step in steps:
        for name in _order(pt_dir / step, ort_dir / step):
            pt, ort = Recorded.read(pt_dir / step / name), Recorded.read(ort_dir / step / name)
            found.append(compare(step, name, pt, ort, rtol, atol))
            _write(output_dir / step / name, f"{found[-1]}\n\n{side_by_side(pt, ort)}")
    _write(output_dir / SUMMARY, summary(found, rtol))
    return found


def _steps(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory")
    found = [order.parent.name for order in folder.glob(f"step_*/{ORDER}")]
    if not found:
        raise FileNotFoundError(f"{folder} has no steps: no file step_N/{ORDER}")
    return found


def _order(pt: Path, ort: Path) -> list[str]:
    """Names in eager PyTorch's order, then those that ORTModule alone has."""
    listed = [path.read_text().splitlines() for path in (pt / ORDER, ort / ORDER) if path.is_file()]
    return list(dict.fromkeys(name for names in listed for name in names))


def side_by_side(pt: Recorded | None, ort: Recorded | None) -> str:
    """Two files in two columns; lines that differ are marked, and first values come one a line."""
    columns = [_column(side) for side in (pt, ort)]
    rows = [f"  {'pt':{_WIDTH}} ort"]
    for a, b in zip_longest(*columns, fillvalue=""):
        rows.append(f"{' ' if a == b else '*'} {a:{_WIDTH}} {b}".rstrip())
    return "\n".join(rows) + "\n"


def _column(side: Recorded | None) -> list[str]:
    if side is None:
        return ["(missing)"]
    heading = [line for line in side.lines if ": " in line or line.startswith("first ")]
    return [*heading, *map(repr, side.values)]


def summary(found: Sequence[Difference], rtol: float) -> str:
    """The first tensor that differs, then all tensors in order with their errors."""
    differing = [d for d in found if d.reason]
    rows = [f"{len(differing)} of {len(found)} tensors differ beyond a relative tolerance of {rtol:g}"]
    if differing:
        rows.append(f"first: {differing[0]}")
    return "\n".join([*rows, "", *(f"{'*' if d.reason else ' '} {d}" for d in found)]) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where both directories were read, whether they differ or not."""
    parser = argparse.ArgumentParser(prog="merge_activation_summary", description="Compare activations of two runs.")
    parser.add_argument("--pt_dir", type=Path, required=True, help="what eager PyTorch wrote")
    parser.add_argument("--ort_dir", type=Path, required=True, help="what ORTModule wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the comparison goes")
    parser.add_argument("--rtol", type=float, default=1e-3, help="tolerance relative to a tensor's largest value")
    parser.add_argument("--atol", type=float, default=1e-7, help="differences that never count")
    given = parser.parse_args(arguments)
    try:
        found = merge(given.pt_dir, given.ort_dir, given.output_dir, given.rtol, given.atol)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(found, given.rtol).split("\n\n", 1)[0])
    print(f"see {given.output_dir / SUMMARY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
