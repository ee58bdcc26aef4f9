"""Training artifacts within a memory budget: ``python -m benchmarks.memory_on_device``.

The peak is what the process takes during a step beyond what it had before: for stock onnxruntime without its arena,
where it is what is alive, and with its defaults, where two steps are counted (the second one plans its memory anew),
and for ``onnxtrain.api``. Each is measured in a process of its own, and the losses of all steps are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.on_device import WORKLOADS, Workload, _quiet
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import LossType, generate_artifacts

MODES = ("without arena", "defaults", "onnxtrain.api")
STEPS = 5


def _large_images(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"pixels": random.standard_normal((16, 3, 128, 128), np.float32)}


MODELS: dict[str, Workload] = {
    "bert_mini": WORKLOADS["bert_mini"],
    "mobilenet": dataclasses.replace(WORKLOADS["mobilenet"], inputs=_large_images, training=True),
    "resnet": dataclasses.replace(WORKLOADS["resnet"], inputs=_large_images, training=True),
    "convnext": dataclasses.replace(WORKLOADS["convnext"], inputs=_large_images, training=True),
}


def export(workload: Workload, folder: Path) -> dict[str, np.ndarray]:
    """Write the model and a batch; returns the inputs."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    inputs = workload.inputs(random)
    labels = random.integers(0, workload.classes, len(next(iter(inputs.values()))))
    np.savez(folder / "batch.npz", **inputs, labels=labels)
    shapes = tuple(workload.dynamic[name] for name in inputs)
    given = tuple(map(torch.from_numpy, inputs.values()))
    with _quiet():
        model = workload.build().train(workload.training)
        program = torch.onnx.export(model, given, dynamo=True, optimize=False, verbose=False, dynamic_shapes=shapes)
    program.save(folder / "model.onnx")  # type: ignore[union-attr]
    return inputs


def measure(folder: Path, batch: Path, mode: str) -> dict[str, Any]:
    """Peak, time and losses of some steps, in this process."""
    step = _module(folder, batch) if mode == "onnxtrain.api" else _session(folder, batch, mode == "defaults")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, losses, seconds, peak = _status("VmRSS"), [], [], 0
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(step().hex())
        seconds.append(time.perf_counter() - start)
        peak = _status("VmHWM") - before
    return {"peak": peak, "seconds": min(seconds[1:]), "losses": losses}


def _session(folder: Path, path: Path, defaults: bool) -> Callable[[], float]:
    state, batch = CheckpointState.load_checkpoint(folder / "checkpoint"), dict(np.load(path))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not defaults:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    model = folder / "training_model.onnx"
    disabled = {"EliminateDropout"}
    session = ort.InferenceSession(model, options, ["CPUExecutionProvider"], disabled_optimizers=disabled)
    feeds = batch | {n: p.data for n, p in state.parameters} | {"lazy_reset_grad": np.array(True)}
    for name, parameter in state.parameters:
        feeds[f"{name}_grad.accumulation.buffer"] = np.ones(parameter.form.shape, np.float32)
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    return lambda: float(session.run(None, feeds)[0])


def _module(folder: Path, path: Path) -> Callable[[], float]:
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    batch = dict(np.load(path))
    given = [batch[name] for name in module.input_names()]

    def step() -> float:
        module.lazy_reset_grad()
        return float(module(*given))

    return step


def _status(key: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def in_own_process(folder: Path, batch: Path, mode: str) -> dict[str, Any]:
    """``measure`` in a process whose freed blocks go back to the system."""
    command = [sys.executable, "-m", "benchmarks.memory_on_device", "--measure", str(folder), str(batch), mode]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment, text=True).stdout)


def compare(name: str, budgets: Sequence[str], console: Console) -> Mapping[str, Any]:
    """One model without a budget and with some."""
    table = Table("budget", "generated in", *MODES, "step", "losses", title=f"{name}: peak of a step in MiB")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        inputs = export(MODELS[name], Path(place))
        for budget in ("none", *budgets):
            folder, start = Path(place) / budget, time.perf_counter()
            generate_artifacts(
                Path(place) / "model.onnx",
                loss=LossType.CrossEntropyLoss,
                artifact_directory=folder,
                batch_statistics=True,
                memory_budget=None if budget == "none" else _number(budget),
                worst_case={n: v.shape for n, v in inputs.items()},
            )
            seconds = time.perf_counter() - start
            rows = {mode: in_own_process(folder, Path(place) / "batch.npz", mode) for mode in MODES}
            found[budget] = {"generated": seconds, **rows}
            peaks = [_share(rows[m]["peak"], found["none"][m]["peak"]) for m in MODES]
            step = f"{rows['defaults']['seconds'] * 1e3:.0f} ms"
            same = all(rows[m]["losses"] == found["none"][m]["losses"] for m in MODES)
            found[budget]["same"] = same
            table.add_row(budget, f"{seconds:.1f} s", *peaks, step, "the same" if same else "[red]differ[/red]")
    console.print(table)
    return found


def _number(budget: str) -> float | str:
    try:
        return float(budget)
    except ValueError:
        return budget


def _share(count: float, whole: float) -> str:
    return f"{count / 2**20:.0f} ({count / whole:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all losses are the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_on_device", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--budgets", nargs="+", default=["0.5", "min"], help="shares, bytes as text, or min")
    parser.add_argument("--json", type=Path, default=Path("out/memory_on_device.json"))
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "BATCH", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        folder, batch, mode = options.measure
        print(json.dumps(measure(Path(folder), Path(batch), mode)))
        return 0
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    console = Console()
    found = {name: compare(name, options.budgets, console) for name in options.models or MODELS}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=2))
    console.print(f"written to {options.json.resolve()}")
    return int(not all(rows["same"] for runs in found.values() for rows in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
