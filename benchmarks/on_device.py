"""Training artifacts against eager PyTorch on the CPU: ``python -m benchmarks.on_device``.

Both train the same model from the same weights on the same batches, one step each in turn in one process; memory is
measured in a process of its own for each, and must not grow over many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# threads that spin while they wait take the cores from whoever runs next: the two libraries would slow each other
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import onnx
import onnx.inliner
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import report
from benchmarks.measure import Result, disagreement
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.onnxblock import optim

RATE = 1e-4
PAUSE = 0.05  # seconds between steps: the threads of one library go on spinning for a while and would slow the other
VARIANTS = ("eager", "eager-fused", "artifacts")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        build: the model, with random weights.
        inputs: the arrays of a batch.
        classes: labels are random classes.
        dynamic: names of the dynamic axes of each input.
        training: whether batch normalization has the statistics of the batch; else it is frozen, as in fine-tuning.
        rate: of learning; where rounding grows to other losses within the steps that are timed, a small one.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    classes: int
    dynamic: dict[str, dict[int, str]]
    training: bool = True
    rate: float = RATE


class Logits(nn.Module):
    """A Transformers classifier that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, attention_mask=mask).logits


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return Logits(transformers.BertForSequenceClassification(config))


def _sentences(random: np.random.Generator) -> dict[str, np.ndarray]:
    ids = random.integers(0, 30522, (16, 128))
    mask = (np.arange(128) < random.integers(64, 129, (16, 1))).astype(np.int64)
    return {"ids": ids, "mask": mask}


class Scores(nn.Module):
    """A Transformers classifier of images that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model(pixels).logits


def _convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], num_labels=10)
    return Scores(transformers.ConvNextForImageClassification(config))


def _mobilenet() -> nn.Module:
    config = transformers.MobileNetV2Config(classifier_dropout_prob=0.0, num_labels=10)
    return Scores(transformers.MobileNetV2ForImageClassification(config))


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return Scores(transformers.ResNetForImageClassification(config))


def _images(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"pixels": random.standard_normal((8, 3, 112, 112), np.float32)}


_TEXT = {0: "batch", 1: "length"}
WORKLOADS = {
    "mlp": Workload(_mlp, lambda r: {"input": r.standard_normal((64, 784), np.float32)}, 10, {"input": {0: "batch"}}),
    "cnn": Workload(
        _cnn, lambda r: {"input": r.standard_normal((32, 1, 28, 28), np.float32)}, 10, {"input": {0: "batch"}}
    ),
    "bert_mini": Workload(_bert, _sentences, 10, {"ids": _TEXT, "mask": _TEXT}),
    **{
        build.__name__[1:]: Workload(build, _images, 10, {"pixels": {0: "batch"}}, training=False, rate=1e-6)
        for build in (_convnext, _mobilenet, _resnet)
    },
}


class Eager:
    """The model in eager PyTorch."""

    def __init__(self, workload: Workload, model: nn.Module, folder: Path, fused: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), workload.rate, weight_decay=1e-2, fused=fused)

    def step(self, inputs: dict[str, np.ndarray], labels: np.ndarray) -> float:
        """One training step; the loss."""
        loss = F.cross_entropy(self.model(*map(torch.from_numpy, inputs.values())), torch.from_numpy(labels))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Artifacts:
    """The same model from its .onnx file."""

    def __init__(self, workload: Workload, model: nn.Module, folder: Path) -> None:
        inputs = workload.inputs(np.random.default_rng(0))
        with _quiet():
            program = torch.onnx.export(
                model,
                tuple(map(torch.from_numpy, inputs.values())),
                dynamo=True,
                optimize=False,
                verbose=False,
                dynamic_shapes=tuple(workload.dynamic[name] for name in inputs),
            )
        program.save(folder / "model.onnx")
        files = generate_artifacts(
            folder / "model.onnx",
            loss=LossType.CrossEntropyLoss,
            optimizer=optim.AdamW(eps=1e-8, weight_decay=1e-2, formula="torch"),
            artifact_directory=folder,
            batch_statistics=workload.training,
        )
        self.state = CheckpointState.load_checkpoint(files["checkpoint"])
        self.module = Module(files["training_model"], self.state)
        self.optimizer = Optimizer(files["optimizer_model"], self.module)
        self.optimizer.set_learning_rate(workload.rate)

    def step(self, inputs: dict[str, np.ndarray], labels: np.ndarray) -> float:
        """One training step; the loss."""
        loss = self.module(*inputs.values(), labels)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)


def make(variant: str, workload: Workload, folder: Path) -> Any:
    """A variant in training, from the same weights each time."""
    torch.manual_seed(0)
    model = workload.build().train(workload.training)
    if variant == "artifacts":
        return Artifacts(workload, model, folder)
    return Eager(workload, model, folder, fused=variant == "eager-fused")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def batches(workload: Workload, count: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """The same batches each time."""
    random = np.random.default_rng(1)
    for _ in range(count):
        inputs = workload.inputs(random)
        yield inputs, random.integers(0, workload.classes, len(next(iter(inputs.values()))))


def time_steps(name: str, steps: int, warmup: int) -> list[Result]:
    """All variants in turn, whoever begins rotating."""
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        made = [(Result(v), make(v, workload, Path(folder))) for v in VARIANTS]
        for index, (inputs, labels) in enumerate(batches(workload, steps + warmup)):
            turn = index % len(made)
            for result, trained in [*made[turn:], *made[:turn]]:
                time.sleep(PAUSE)
                start = time.perf_counter()
                loss = trained.step(inputs, labels)
                seconds = time.perf_counter() - start
                result.losses.append(loss)
                result.first = result.first or seconds
                if index >= warmup:
                    result.seconds.append(seconds)
    return [result for result, _ in made]


@dataclasses.dataclass
class Memory:
    """Bytes of a process.

    Args:
        start: before the first step.
        early: the most until a tenth of the steps.
        late: the most of all steps.
        accounted: gradients and states, and activations as the order of the nodes has them alive; 0 where not known.
    """

    start: int
    early: int
    late: int
    accounted: int = 0


def measure_memory(name: str, variant: str, steps: int) -> Memory:
    """A variant alone in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_memory, (name, variant, steps))


def _memory(name: str, variant: str, steps: int) -> Memory:
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        trained = make(variant, workload, Path(folder))
        data = list(batches(workload, 4))
        accounted = _accounted(trained, Path(folder), data[0]) if variant == "artifacts" else 0
        gc.collect()
        start, early = _resident(), 0
        for index in range(steps):
            trained.step(*data[index % len(data)])
            if index + 1 == max(steps // 10, 3):
                early = _peak()
        return Memory(start, early, _peak(), accounted)


def _accounted(trained: Artifacts, folder: Path, batch: tuple[dict[str, np.ndarray], np.ndarray]) -> int:
    """Bytes of gradients, optimizer states and activations of a step with this batch."""
    gradients = sum(p.form.size * 4 for p in trained.state.parameters.values() if p.requires_grad)
    states = sum(t.view().nbytes for t in trained.state.optimizer.values())
    model = onnx.inliner.inline_local_functions(onnx.load(folder / "training_model.onnx"))
    given = {**batch[0], "labels": batch[1]}
    for value in model.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, getattr(given.get(value.name), "shape", ()), strict=False
        ):
            dim.dim_value = size
    del model.graph.value_info[:]
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    sizes = {v.name: _bytes(v) for v in model.graph.value_info}
    last = {name: index for index, node in enumerate(model.graph.node) for name in node.input}
    alive = most = 0
    for index, node in enumerate(model.graph.node):
        alive += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, alive)
        alive -= sum(sizes.get(name, 0) for name in {*node.input, *node.output} if last.get(name, index) == index)
    return gradients + states + most


def _bytes(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    count = math.prod(d.dim_value for d in kind.shape.dim)
    return count * onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show_memory(console: Console, name: str, found: dict[str, Memory], steps: int) -> None:
    """Print what each variant took beyond what it had before its first step, and how much of that came late."""
    table = Table(title=f"{name}: memory of {steps} steps")
    for column in ("variant", "most during steps", "accounted for", "growth after a tenth of them"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant, memory in found.items():
        row = [_mib(memory.late - memory.start), _mib(memory.accounted) if memory.accounted else "", ""]
        row[2] = _mib(memory.late - memory.early)
        table.add_row(variant, *row)
    console.print(table)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all losses agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--memory-steps", type=int, default=2000, help="steps of the memory measurement; 0 is none")
    parser.add_argument("--json", type=Path, default=Path("out/on_device.json"))
    options = parser.parse_args(arguments)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    console, found, failed = Console(), [], False
    for name in options.workloads or WORKLOADS:
        results = time_steps(name, options.steps, options.warmup)
        report.show(console, name, results)
        problem = disagreement(results, "float32")
        console.print(f"[red]losses disagree: {problem}[/red]" if problem else "losses agree with eager")
        failed |= bool(problem)
        entry = report.as_json(name, {"steps": options.steps}, results)
        if options.memory_steps:
            memory = {v: measure_memory(name, v, options.memory_steps) for v in ("eager", "artifacts")}
            show_memory(console, name, memory, options.memory_steps)
            entry["memory"] = {v: dataclasses.asdict(m) for v, m in memory.items()}
        found.append(entry)
        report.write(options.json, found)
    console.print(f"written to {options.json.resolve()}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
