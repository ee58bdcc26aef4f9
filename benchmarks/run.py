"""The command line: ``python -m benchmarks.run WORKLOAD...``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from benchmarks import measure, report
from benchmarks.workloads import WORKLOADS, Size, batches

VARIANTS = ("eager", "compile", "torch", "onnxruntime", "eager-grouped", "compile-grouped", "torch-grouped")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Train workloads in turn by eager PyTorch, torch.compile and onnxtrain, in one process.",
        epilog="example: python -m benchmarks.run bert_classify --layers 2 --variants eager,torch,onnxruntime",
    )
    parser.add_argument(
        "workloads", nargs="+", choices=sorted(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS)
    )
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--dtype", choices=tuple(measure.TOLERANCE), default="float32", help="others use autocast")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves its choice")
    parser.add_argument("--variants", default="eager,compile,torch,onnxruntime", help=", ".join(VARIANTS))
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks.json"))
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; known are {', '.join(VARIANTS)}")
    return options


def run_workload(name: str, options: argparse.Namespace, console: Console) -> tuple[list[measure.Result], str]:
    """Measure one workload; says which losses disagree."""
    size = Size(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Size)})
    workload = WORKLOADS[name]
    torch.manual_seed(options.seed)
    model = workload.build(size).train()
    steps = options.steps + options.warmup
    data = {grouped: batches(workload, size, steps, options.seed, grouped) for grouped in (False, True)}
    variants = [measure.Variant(v, model, options.dtype) for v in options.variants]
    with console.status(name) as status:
        measure.run(variants, data, options.warmup, lambda text: status.update(f"{name}: {text}"))
    results = [v.result for v in variants]
    return results, measure.disagreement(results, options.dtype)


def main() -> int:
    """Run all workloads; 0 where everything ran and agreed."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    console = Console()
    found, failed = [], False
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    for name in options.workloads:
        results, problem = run_workload(name, options, console)
        shape = f"{options.layers} layers, batch {options.batch}, length {options.length}, {options.dtype}"
        report.show(console, f"{name}: {shape}", results)
        console.print(f"[red]losses disagree: {problem}[/red]" if problem else "losses agree with eager")
        found.append(report.as_json(name, settings, results))
        failed = failed or bool(problem) or any(r.error for r in results)
        report.write(options.json, found)
    console.print(f"written to {options.json.resolve()}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
