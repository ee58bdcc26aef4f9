"""The command line: ``python -m benchmarks.run WORKLOAD...``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from benchmarks import measure, report
from benchmarks.measure import BUDGETS, KINDS, is_variant
from benchmarks.workloads import PRESETS, WORKLOADS, Composition, Run, Size, batches, composition

DEFAULT = ("eager", "compile", "torch", "onnxruntime")
_KNOWN = f"{', '.join((*KINDS, *BUDGETS))}, each also with -grouped"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``runs`` are what is to be measured, by name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Train workloads in turn by eager PyTorch, torch.compile and onnxtrain, in one process.",
        epilog="example: python -m benchmarks.run bert_classify --layers 2 --variants eager,torch,onnxruntime",
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}; with --preset, some of its runs"
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="runs of stated sizes; sizes given here replace theirs"
    )
    sizes = parser.add_argument_group("size")
    for field in dataclasses.fields(Size):
        kind = {"default": argparse.SUPPRESS, "help": f"default {field.default}"}
        sizes.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), **kind)
    own = argparse.SUPPRESS  # the run's own where it is not given
    parser.add_argument("--dtype", choices=tuple(measure.TOLERANCE), default=own, help="others use autocast")
    parser.add_argument(
        "--optimizer", choices=tuple(measure.OPTIMIZERS), default=own, help="default sgd; adamw is fused"
    )
    parser.add_argument("--device", default="cpu", help="where all train, as torch names it; default cpu")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each update of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which no further run begins")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves its choice")
    parser.add_argument("--variants", help=f"{_KNOWN}; default {','.join(DEFAULT)}, or the preset's")
    parser.add_argument(
        "--roofline", action="store_true", help="also how near operators are to what the machine can do"
    )
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks.json"))
    options = parser.parse_args(arguments)
    known = PRESETS[options.preset] if options.preset else {n: Run(n, Size(), DEFAULT) for n in WORKLOADS}
    chosen = options.workloads or (list(known) if options.preset else [])
    if not chosen:
        parser.error(f"name workloads ({', '.join(WORKLOADS)}) or a --preset ({', '.join(PRESETS)})")
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown workloads {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    options.runs = {name: _changed(known[name], options) for name in chosen}
    if unknown := {v for run in options.runs.values() for v in run.variants if not is_variant(v)}:
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; known are {_KNOWN}")
    return options


def _changed(run: Run, options: argparse.Namespace) -> Run:
    """A run with what the command line states in place of its own."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Size) if hasattr(options, f.name)}
    variants = tuple(options.variants.split(",")) if options.variants else run.variants
    stated = {name: getattr(options, name) for name in ("dtype", "optimizer") if hasattr(options, name)}
    return dataclasses.replace(run, size=dataclasses.replace(run.size, **given), variants=variants, **stated)


@dataclasses.dataclass
class Measured:
    """What came of a run.

    Args:
        results: of each variant.
        data: what the batches consist of, naively padded and grouped; empty where they have no tokens.
        problem: which losses disagree; empty where none do.
    """

    results: list[measure.Result]
    data: dict[str, Composition]
    problem: str


def measured(name: str, run: Run, options: argparse.Namespace, console: Console) -> Measured:
    """Measure one run."""
    workload, size = WORKLOADS[run.workload], run.size
    torch.manual_seed(options.seed)
    model = workload.build(size).train()
    steps = options.steps + options.warmup
    data = {grouped: batches(workload, size, steps, options.seed, grouped) for grouped in (False, True)}
    data = {g: [{k: t.to(options.device) for k, t in batch.items()} for batch in each] for g, each in data.items()}
    made = (run.dtype, workload.layer, options.accumulate, options.device, run.optimizer)
    variants = [measure.Variant(v, model, *made) for v in run.variants]
    with console.status(name) as status:
        measure.run(
            variants,
            data,
            options.warmup,
            lambda text: status.update(f"{name}: {text}"),
            options.seed,
            options.roofline,
        )
    results = [v.result for v in variants]
    used = {"grouped" if g else "naive": composition(data[g]) for g in sorted({r.grouped for r in results})}
    compositions = {name: c for name, c in used.items() if c is not None}
    return Measured(results, compositions, measure.disagreement(results, run.dtype, size.dropout))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 where everything ran and agreed."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    console = Console()
    found, failed, begun = [], False, time.monotonic()
    stated = ("preset", "device", "steps", "warmup", "accumulate", "seed", "threads")
    shared = {k: getattr(options, k) for k in stated}
    for name, run in options.runs.items():
        if time.monotonic() - begun > options.within:
            console.print(f"{name} is left out: there is no time left")
            continue
        made = measured(name, run, options, console)
        report.show(console, f"{name}: {_described(run.size, run.dtype)}", made.results, made.data)
        agreed = "losses agree with eager" + (" in their mean" if run.size.dropout else "")
        console.print(f"[red]losses disagree: {made.problem}[/red]" if made.problem else agreed)
        own = {"workload": run.workload, "dtype": run.dtype, "optimizer": run.optimizer}
        settings = {**own, **dataclasses.asdict(run.size), **shared}
        found.append(report.as_json(name, settings, made.results, made.data) | {"problem": made.problem})
        failed = failed or bool(made.problem) or any(r.error for r in made.results)
        report.write(options.json, found)
    console.print(f"written to {options.json.resolve()}")
    return int(failed)


def _described(size: Size, dtype: str) -> str:
    return f"{size.layers} layers of {size.hidden}, batch {size.batch}, length {size.length}, {dtype}"


if __name__ == "__main__":
    sys.exit(main())
