"""StatisticsSubscriber: one text file for each output of each module, in both directions, step by step."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from onnxtrain.errors import HookError
from onnxtrain.utils.hooks.subscriber import RuntimeStates, SubscriberBase

ORDER = "order.txt"
SAMPLES = 128  # how many of the first values are written
_PER_LINE = 8


class StatisticsSubscriber(SubscriberBase):
    """Writes ``step_N/{ModuleClass}_{index}_{k}th_output_{forward|backward}`` and ``step_N/order.txt``.

    Names and indices are the same for eager PyTorch and ORTModule, so that two directories can be compared (see
    ``merge_activation_summary``). The second call of a module in a step adds ``_call1`` to the name, and so on.

    Args:
        output_dir: the directory to write; in distributed training each rank needs its own.
        start_step: the first step to write.
        end_step: the step to stop before.
        override_output_dir: remove the steps that the directory has, instead of refusing to write there.
        run_on_cpu: compute on the CPU, part by part, where device memory is short.
        bucket_size: how many elements are taken at once; the working copies are as large.

    Raises:
        FileExistsError: the directory exists, without ``override_output_dir``.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 2**29,
    ) -> None:
        super().__init__(start_step, end_step)
        if bucket_size < 1:
            raise HookError(f"bucket_size must be positive, not {bucket_size}")
        self.output_dir, self.run_on_cpu, self.bucket_size = Path(output_dir), run_on_cpu, bucket_size
        if self.output_dir.exists() and not override_output_dir:
            raise FileExistsError(f"{self.output_dir} exists; choose another, or pass override_output_dir=True")
        for step in self.output_dir.glob("step_*"):
            shutil.rmtree(step)
        self.output_dir.mkdir(parents=True, exist_ok=True)

    def post_forward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Write an output."""
        self._write(states, f"{states.name}_{index}th_output", "forward", tensor)
        return tensor

    def pre_backward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Write the gradient of an output."""
        self._write(states, f"{states.name}_{index}th_output", "backward", gradient)
        return gradient

    def inspect_activation_apply(self, states: RuntimeStates, tensor: torch.Tensor) -> None:
        """Write a tensor at a marked point."""
        self._write(states, states.name, "forward", tensor)

    def inspect_gradient_apply(self, states: RuntimeStates, gradient: torch.Tensor) -> None:
        """Write the gradient at a marked point."""
        self._write(states, states.name, "backward", gradient)

    def _write(self, states: RuntimeStates, name: str, direction: str, tensor: torch.Tensor) -> None:
        call = f"_call{states.call}" if states.call else ""
        name = f"{name.replace(os.sep, '_')}{call}_{direction}"
        folder = self.output_dir / f"step_{states.global_states.execution_step}"
        folder.mkdir(exist_ok=True)
        temporary = folder / f".{name}.partial"
        temporary.write_text(summary(name, tensor, self.bucket_size, self.run_on_cpu))
        temporary.replace(folder / name)
        with (folder / ORDER).open("a") as order:
            order.write(f"{name}\n")


def summary(name: str, tensor: torch.Tensor, bucket_size: int = 2**29, run_on_cpu: bool = False) -> str:
    """A tensor's statistics as text, one ``key: value`` a line, then its first values.

    Minimum, maximum, mean and (population) standard deviation are those of the finite values, in float64.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    found = _Statistics()
    for bucket in flat.split(bucket_size) if flat.numel() else ():
        found.add(bucket.cpu() if run_on_cpu else bucket)
    rows = [f"name: {name}", f"shape: {list(tensor.shape)}", f"dtype: {tensor.dtype}", f"size: {tensor.numel()}"]
    rows += found.rows()
    first = flat[:SAMPLES].double().tolist()
    return "\n".join([*rows, f"first {len(first)} values:", *_lines(first)]) + "\n"


def _lines(values: list[float]) -> Iterator[str]:
    for start in range(0, len(values), _PER_LINE):
        yield " ".join(f"{v!r}" for v in values[start : start + _PER_LINE])


@dataclasses.dataclass
class _Statistics:
    """Statistics of the elements seen so far; ``squares`` sums the squared distances from the mean."""

    count: int = 0
    minimum: float = math.nan
    maximum: float = math.nan
    mean: float = math.nan
    squares: float = 0.0
    nan: int = 0
    inf: int = 0
    neg: int = 0
    pos: int = 0
    zero: int = 0

    def add(self, bucket: torch.Tensor) -> None:
        """Take in more elements; means and squares are joined as by Chan, Golub and LeVeque (1979)."""
        x = bucket.double()
        self.nan, self.inf = self.nan + int(x.isnan().sum()), self.inf + int(x.isinf().sum())
        self.neg, self.pos = self.neg + int((x < 0).sum()), self.pos + int((x > 0).sum())
        self.zero += int((x == 0).sum())
        x = x[x.isfinite()]
        if not x.numel():
            return
        low, high, mean = x.min().item(), x.max().item(), x.mean().item()
        squares, count, before = ((x - mean) ** 2).sum().item(), x.numel(), self.count
        if before == 0:
            self.count, self.minimum, self.maximum, self.mean, self.squares = count, low, high, mean, squares
            return
        self.count = before + count
        apart = mean - self.mean
        self.squares += squares + apart * apart * before * count / self.count
        self.mean += apart * count / self.count
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)

    def rows(self) -> list[str]:
        """One line each."""
        deviation = math.sqrt(self.squares / self.count) if self.count else math.nan
        found = {"min": self.minimum, "max": self.maximum, "mean": self.mean, "std": deviation}
        counts = {key: getattr(self, key) for key in ("nan", "inf", "neg", "pos", "zero")}
        return [f"{key}: {value!r}" for key, value in {**found, **counts}.items()]
