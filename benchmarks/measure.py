"""Training the variants in turn, and what is measured on the way."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.memory import checkpointed, compiled
from onnxtrain import Options, ORTModule
from onnxtrain.execute.torch.allocations import peak_of

_CPU = torch.device("cpu")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
DROPOUT_TOLERANCE = (
    0.03  # of the mean of all losses: what is dropped changes a step of few rows by as much, a mean by less
)
_OURS = ("torch", "torch-off", "torch-whole", "torch-codegen", "onnxruntime")
KINDS = ("eager", "eager-default", "checkpoint", "compile", *_OURS)
OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-5, fused=True),
}
_AS_TORCH_CHOOSES = partial(torch.optim.AdamW, lr=1e-5)  # of the variant eager-default
BUDGETS = ("compile-SHARE", "torch-BUDGET")  # such as compile-0.5 and torch-min


@dataclasses.dataclass
class Result:
    """What was measured of one variant.

    Args:
        name: the variant.
        seconds: time of each step after the warm-up.
        first: time of the first step, compilation included.
        losses: loss of every step.
        peak: most bytes of tensors alive during a step beside parameters and inputs; None where it cannot be seen.
        predicted: what the report before the first step says of that; None where there is none.
        weights: sum over the bits of all weights after the last step: equal where all steps were.
        roofline: share of the operators' time that the machine needs for them at least; None where nobody asks.
        error: why it failed; empty where it did not.
    """

    name: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    first: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    peak: int | None = None
    predicted: int | None = None
    weights: int | None = None
    roofline: float | None = None
    error: str = ""

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def spread(self) -> float:
        """Interquartile range of a step's seconds."""
        if len(self.seconds) < 4:
            return float("nan")
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return high - low

    @property
    def grouped(self) -> bool:
        """Whether it trains on length-grouped batches."""
        return self.name.endswith("-grouped")

    def speed(self, base: Result) -> float:
        """How many times as fast as another variant: the median of the ratios of steps on the same batch."""
        pairs = list(zip(base.seconds, self.seconds, strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else float("nan")

    def memory(self, base: Result) -> float:
        """The peak as a multiple of another variant's on the same batch."""
        return self.peak / base.peak if self.peak is not None and base.peak else float("nan")


def same_data(kind: str, result: Result, results: Sequence[Result]) -> Result | None:
    """The variant of a kind that trains on the same batches as a result; None where it did not run or failed."""
    name = f"{kind}-grouped" if result.grouped else kind
    return next((r for r in results if r.name == name and not r.error), None)


def is_variant(name: str) -> bool:
    """Whether a variant has this name."""
    return name.removesuffix("-grouped") in KINDS or is_budget(name)


def is_budget(name: str) -> bool:
    """Whether a variant has a budget of memory."""
    kind, _, budget = name.removesuffix("-grouped").partition("-")
    return kind in ("compile", "torch") and bool(budget) and f"{kind}-{budget}" not in KINDS


def wrap(name: str, model: torch.nn.Module, layer: type[torch.nn.Module] | None = None) -> torch.nn.Module:
    """A model as a variant trains it; ``-grouped`` names the data, not the model.

    Args:
        name: the variant.
        model: to train.
        layer: class of what is checkpointed; None where the model knows its own.
    """
    kind, _, stated = name.removesuffix("-grouped").partition("-")
    if kind == "eager":
        return model
    if kind == "checkpoint":
        return checkpointed(model, layer)
    if kind == "compile":
        return compiled(model, float(stated)) if stated else torch.compile(model, dynamic=True)  # type: ignore[return-value]
    if stated == "off":
        return ORTModule(model, options=Options(backend=kind, compute_optimizer=False, sparse_optimizer=False))
    if stated == "whole":
        return ORTModule(model, options=Options(backend=kind, segments=1))
    if stated == "codegen":
        return ORTModule(model, options=Options(backend=kind, codegen="auto"))
    return ORTModule(model, options=Options(backend=kind, memory_budget=_budget(stated) if stated else None))


def _budget(stated: str) -> float | str:
    try:
        return float(stated)
    except ValueError:
        return stated


class Variant:
    """One model in training.

    Args:
        name: how it is trained.
        model: it is copied.
        dtype: float32, or what autocast computes in.
        layer: class of what is checkpointed; None where the model knows its own.
        accumulate: batches for each update of the weights; each is a step of its own.
        device: where it is trained.
        optimizer: one of ``OPTIMIZERS``.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        dtype: str,
        layer: type[torch.nn.Module] | None = None,
        accumulate: int = 1,
        device: str = "cpu",
        optimizer: str = "sgd",
    ) -> None:
        self.result, self.accumulate, self.device = Result(name), accumulate, torch.device(device)
        self.model = wrap(name, copy.deepcopy(model).to(self.device), layer)
        is_default = name.removesuffix("-grouped") == "eager-default"
        self.optimizer = (_AS_TORCH_CHOOSES if is_default else OPTIMIZERS[optimizer])(self.model.parameters())
        self.autocast = None if dtype == "float32" else getattr(torch, dtype)

    def step(self, batch: dict[str, torch.Tensor], timed: bool) -> None:
        """One training step."""
        self._wait()
        start = time.perf_counter()
        loss = self._loss(batch)
        loss.backward()
        if (len(self.result.losses) + 1) % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._wait()
        seconds = time.perf_counter() - start
        self.result.losses.append(loss.item())
        if timed:
            self.result.seconds.append(seconds)
        if len(self.result.losses) == 1:
            self.result.first = seconds

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self._precision():
            return self.model(**batch).loss

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def measure_peak(self, batch: dict[str, torch.Tensor]) -> None:
        """Peak of what torch allocates during forward and backward, the parameters' gradients among it.

        Weights, inputs and whatever else was there before do not count. onnxruntime's own memory is not seen by torch.
        """
        if self.result.name.startswith("onnxruntime"):
            return
        self.optimizer.zero_grad()
        if isinstance(self.model, ORTModule):
            with self._precision():
                self.result.predicted = self.model.memory_report(**batch).peak
        self.result.peak = peak_of(lambda: self._loss(batch).backward(), self.device)
        self.optimizer.zero_grad()
        self.result.weights = sum(int(p.detach().view(torch.int32).long().sum()) for p in self.model.parameters())

    def measure_roofline(self, batch: dict[str, torch.Tensor]) -> None:
        """How near a step's operators are to what the machine can do; of ORTModule on PyTorch's kernels alone."""
        if self.result.name.removesuffix("-grouped") == "torch" and isinstance(self.model, ORTModule):
            with self._precision():
                costs = self.model.profile(**batch).costs
            self.result.roofline = sum(c.least for c in costs) / sum(c.seconds for c in costs)


def run(
    variants: Sequence[Variant],
    data: dict[bool, list[dict[str, torch.Tensor]]],
    warmup: int,
    progress: Callable[[str], Any] = lambda text: None,
    seed: int = 0,
    roofline: bool = False,
) -> None:
    """Train all variants, step by step in turn, whoever begins rotating; a variant that fails is left out from then on.

    Memory is measured on the largest batch.

    Args:
        variants: what to train.
        data: batches, padded naively (False) and length-grouped (True).
        warmup: steps at the start that are not timed.
        progress: told what runs.
        seed: of torch's generator; each step begins with the same state of it in all variants.
        roofline: whether to measure, too, how near operators are to what the machine can do.
    """
    steps = len(data[False])
    for index in range(steps):
        turn = index % len(variants)
        for variant in [*variants[turn:], *variants[:turn]]:
            if not variant.result.error:
                progress(f"step {index + 1}/{steps} {variant.result.name}")
                batch = data[variant.result.grouped][index]
                torch.manual_seed(seed + index)
                _guarded(variant, lambda v, b=batch, timed=index >= warmup: v.step(b, timed))
    for variant in variants:
        if not variant.result.error:
            progress(f"memory {variant.result.name}")
            batch = max(data[variant.result.grouped], key=lambda b: sum(t.numel() for t in b.values()))
            _guarded(variant, lambda v, b=batch: v.measure_peak(b))
            if roofline:
                _guarded(variant, lambda v, b=batch: v.measure_roofline(b))


def _guarded(variant: Variant, work: Callable[[Variant], None]) -> None:
    try:
        work(variant)
    except Exception as error:  # one variant's fault must not end the others
        variant.result.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def disagreement(results: Sequence[Result], dtype: str, dropout: float = 0.0) -> str:
    """Which variant's losses differ from eager's on the same batches by more than is allowed; empty where none does.

    Every step by ``TOLERANCE`` of the precision; with dropout, where each variant drops other elements, the mean of
    all steps by ``DROPOUT_TOLERANCE``. With a budget of memory, ORTModule has the same weights after all steps, bit by
    bit, as without one.
    """
    for other in (r for r in results if not r.error):
        free = same_data("torch", other, results)
        if free and is_budget(other.name) and other.name.startswith("torch") and other.weights != free.weights:
            return f"{other.name} has other weights than {free.name} after all steps"
        base = same_data("eager", other, results)
        if base is None:
            continue
        pairs = list(zip(base.losses, other.losses, strict=True))
        where, allowed = [f"at step {i}" for i in range(1, len(pairs) + 1)], TOLERANCE[dtype]
        if dropout:
            pairs = [(statistics.fmean(base.losses), statistics.fmean(other.losses))]
            where, allowed = ["in the mean of all steps"], max(DROPOUT_TOLERANCE, TOLERANCE[dtype])
        for place, (a, b) in zip(where, pairs, strict=True):
            if not abs(a - b) <= allowed * max(1.0, abs(a)):
                return f"{other.name} has loss {b:.6f} where {base.name} has {a:.6f}, {place}"
    return ""
