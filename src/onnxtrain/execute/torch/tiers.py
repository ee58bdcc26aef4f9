"""The tiers of kernels: each runs on ATen at once, and on a loop that Inductor has made of it once that is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor

from onnxtrain.errors import first_line
from onnxtrain.execute.torch.kernel_compiler import Compiled, KernelCompiler
from onnxtrain.execute.torch.kernels import body_of
from onnxtrain.execute.torch.programs import compile_body
from onnxtrain.execute.torch.registry import Lowering
from onnxtrain.execute.torch.timing import seconds_of

_LOG = logging.getLogger("onnxtrain.execute")
_TIMES = 5  # each is timed, in turn
_ERROR = 16  # units in the last place of the largest element, by which sums in another order may differ
_TIMES_WORSE = 4  # than ATen's result, compared with that of double precision
_LARGEST = 1 << 24  # elements that are computed in double precision
_ALIGNED = 16  # bytes, which compiled loops of accelerators assume
_MOST_SIZES = 4096


class Kernels:
    """The kernels of one device, by name: those that compute the same are one.

    Args:
        device: where they run.
        compiler: what makes loops of them.
        is_waited_for: whether a kernel waits for its loop, and runs on it though it may be slower.
    """

    def __init__(self, device: str, compiler: KernelCompiler, is_waited_for: bool) -> None:
        self.device, self._compiler, self._is_waited_for = device, compiler, is_waited_for
        self._found: dict[str, Kernel] = {}

    def __call__(self, node: ir.Node) -> Lowering:
        """How a node that is a kernel runs."""
        kernel = self._found.get(node.op_type)
        if kernel is None:
            kernel = Kernel(node, self.device, self._compiler, self._is_waited_for)
            self._found[node.op_type] = kernel
        return Lowering(kernel, frozenset(), view=False, inplace=None, wants=frozenset())

    @property
    def states(self) -> dict[str, str]:
        """For each kernel what it runs on, and why."""
        return {name: kernel.state for name, kernel in self._found.items()}


class Kernel:
    """One kernel.

    Args:
        node: it stands for this one.
        device: where it runs.
        compiler: makes a loop of it when it is called first.
        is_waited_for: whether a call waits for that.

    Attributes:
        state: what it runs on, and why.
    """

    def __init__(self, node: ir.Node, device: str, compiler: KernelCompiler, is_waited_for: bool) -> None:
        body = body_of(node)
        self._name, self._body, self._device = node.op_type, body, device
        self._compiler, self._is_waited_for = compiler, is_waited_for
        function, is_one = compile_body(body, device).function, len(body.outputs) == 1
        self._aten: Callable[..., Any] = (lambda *args: function(*args)[0]) if is_one else function
        self._compiled: Callable[..., Any] = self._aten
        self._fits: Callable[..., bool] = lambda *sizes: False
        self._orders: list[tuple[int, ...] | None] = []
        self._seen: dict[tuple[torch.Size, ...], bool] = {}
        self._run, self.state = self._first, "ATen: not called yet"

    def __call__(self, *args: torch.Tensor) -> Any:
        """The results: a tensor, or a tuple of them."""
        return self._run(*args)

    def _first(self, *args: torch.Tensor) -> Any:
        if isinstance(args[0], FakeTensor) or args[0].device.type == "meta":
            return self._aten(*args)
        self._orders = [*map(order_of, args)]
        if None in self._orders:
            self._run, self.state = self._aten, "ATen: what it reads lies with gaps in memory"
            return self._aten(*args)
        self._run, self.state = self._aten, "ATen: its loop is being made"
        made = self._compiler.submit(self._body, self._device, [tuple(x.shape) for x in args], self._orders)
        made.add_done_callback(lambda found: self._arrived(found.exception() or found.result()))
        if self._is_waited_for:
            made.exception()
        return self._run(*args)

    def _arrived(self, found: Compiled | BaseException) -> None:
        """Called by the compiler's thread."""
        if isinstance(found, BaseException):
            self.state = f"ATen: {first_line(found)}"
            return
        is_one = len(self._body.outputs) == 1
        self._compiled = (lambda *args: found.call([*args])[0]) if is_one else (lambda *args: found.call([*args]))
        self._fits, self.state, self._run = found.fits, "ATen: its loop is there", self._compared

    def _on_loop(self, *args: torch.Tensor) -> Any:
        return self._compiled(*args) if self._can_take(args) else self._aten(*args)

    def _compared(self, *args: torch.Tensor) -> Any:
        """Both are run; the loop stays if they agree, and, where it was not waited for, if it is the faster one."""
        if not self._can_take(args):
            return self._aten(*args)
        self._run, made = self._aten, self._aten(*args)
        try:
            error = self._error(args, made, self._compiled(*args))
        except Exception as raised:  # whatever what Inductor wrote raises
            return self._refused(made, f"raises {type(raised).__name__}: {first_line(raised)}")
        if error > _ERROR:
            return self._refused(made, f"differs by {error:.0f} units in the last place")
        self.state = "Inductor"
        if not self._is_waited_for:
            ways = (self._aten, self._compiled)
            seconds = [[seconds_of(lambda way=way: way(*args), self._device) for way in ways] for _ in range(_TIMES)]
            slow, fast = (min(column) for column in zip(*seconds, strict=True))
            times = f"{fast * 1e6:.0f} µs on Inductor's loop, {slow * 1e6:.0f} without"
            self.state = f"{'Inductor' if fast < slow else 'ATen'}: {times}"
        if self.state.startswith("Inductor"):
            self._run = self._on_loop
        return made

    def _refused(self, made: Any, why: str) -> Any:
        self.state = f"ATen: Inductor's loop {why}"
        _LOG.warning("%s runs on ATen: Inductor's loop %s", self._name, why)
        return made

    def _error(self, args: Sequence[torch.Tensor], expected: Any, found: Any) -> float:
        """By how many units in the last place the loop's results are too far from ATen's, or from the exact ones."""
        error = _difference(expected, found)
        is_single = (
            all(x.dtype in (torch.float32, torch.bool) for x in args) and max(x.numel() for x in args) < _LARGEST
        )
        if error <= _ERROR or error == float("inf") or not is_single:
            return error
        exact = self._aten(*(x.double() if x.is_floating_point() else x for x in args))
        own, aten = _difference(exact, found), _difference(exact, expected)
        return 0.0 if own <= _TIMES_WORSE * aten else own

    def _can_take(self, args: Sequence[torch.Tensor]) -> bool:
        """Whether the loop takes these: tensors in the order in memory, and of the sizes, that it was made for."""
        for x, order in zip(args, self._orders, strict=True):
            if isinstance(x, FakeTensor) or not (x.permute(order) if order else x).is_contiguous():
                return False
        if self._device != "cpu" and any(x.data_ptr() % _ALIGNED for x in args):
            return False
        sizes = tuple([x.shape for x in args])
        known = self._seen.get(sizes)
        if known is None:
            if len(self._seen) >= _MOST_SIZES:
                self._seen.clear()
            known = self._seen[sizes] = self._fits(sizes)
        return known


def told(kernels: Collection[Kernel]) -> str:
    """How many kernels run on what."""
    made = sum(k.state.startswith("Inductor") for k in kernels)
    waiting = sum("being made" in k.state for k in kernels)
    waits = f", {waiting} wait for theirs" if waiting else ""
    return f"{len(kernels)} kernels of several operators: {made} on loops of Inductor{waits}"


def order_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a tensor as they lie in memory, the outermost first; empty where in order, None where with gaps."""
    if x.is_contiguous():
        return ()
    order = tuple(sorted(range(x.dim()), key=lambda axis: -x.stride(axis)))
    return order if x.permute(order).is_contiguous() else None


def _difference(expected: Any, found: Any) -> float:
    """The largest error, in units in the last place of the largest element; infinite where others are not numbers."""
    pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else zip(expected, found, strict=True)
    return max(_error(a, b) for a, b in pairs)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    a, b = (torch.where(x.isfinite(), x, 0) for x in (a, b))
    if not a.numel() or not (largest := float(a.abs().max())):
        return 0.0 if torch.equal(a, b) else float("inf")
    return float((a.double() - b.double()).abs().max()) / (largest * torch.finfo(b.dtype).eps)
