"""The torch backend: a plan becomes Python source that calls ATen, one line per node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import BackendError, first_line
from onnxtrain.execute.base import Backend, Executable, Footprint, Timing
from onnxtrain.execute.torch.effects import silenced
from onnxtrain.execute.torch.footprint import footprint
from onnxtrain.execute.torch.heap import keep_freed
from onnxtrain.execute.torch.kernel_compiler import KernelCompiler
from onnxtrain.execute.torch.memory import added_of
from onnxtrain.execute.torch.program import Program
from onnxtrain.execute.torch.programs import compile_plan
from onnxtrain.execute.torch.registry import lowering_of
from onnxtrain.execute.torch.tiers import Kernel, Kernels, told
from onnxtrain.execute.torch.timing import Clock
from onnxtrain.ir.expansions import can_expand
from onnxtrain.ir.graphs import Plan, describe, source_of
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.options import Options


class TorchExecutable(Executable):
    """A plan as two Python functions over tensors."""

    has_segments = True

    def __init__(
        self, plan: Plan, forward: Program, backward: Program | None, device: str, added: Mapping[str, int]
    ) -> None:
        super().__init__(plan)
        self._forward, self._backward, self._device = forward, backward, device
        self.added = added

    @torch.no_grad()
    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        with torch._C._DisableAutocast():  # the casts are in the plan; calls in a region without it have none
            outputs, saved, sizes = self._forward.function(inputs)
        return outputs, (saved, sizes)

    @torch.no_grad()
    def backward(self, saved: Any, output_gradients: Sequence[Any]) -> list[Any]:
        return super().backward(saved, output_gradients)

    def walk(self, saved: Any, output_gradients: list[Any], made: list[Any]) -> Iterator[None]:
        """Run the backward pass, as the base class says; gradient mode has to be off at each step."""
        assert self._backward is not None, "a plan for inference has no backward pass"
        return self._backward.function(*saved, output_gradients, made)

    def footprint(self, inputs: Sequence[Any]) -> Footprint:
        parts = (self.plan.forward, self.plan.backward)
        nodes = (n for model in parts if model is not None for n in model.graph)
        if effect := next((n for n in nodes if Trait.EFFECT in traits_of(n) and n.op_type not in _OF_CLASSES), None):
            raise _untold(f"{effect.op_type} may do more than compute", describe(effect), source_of(effect))
        try:
            programs = {"forward": self._forward, "backward": self._backward}
            with silenced():
                return footprint(self, inputs, self._device, {n: p for n, p in programs.items() if p is not None})
        except Exception as error:  # whatever torch says of an operator without content
            raise _untold(first_line(error)) from error

    def timings(self, inputs: Sequence[Any]) -> list[Timing]:
        clock = Clock(self._device)
        forward, backward = clock.watched(self._forward), self._backward and clock.watched(self._backward)
        watched = TorchExecutable(self.plan, forward, backward, self._device, self.added)
        outputs, saved = watched.forward(inputs)
        if backward is not None:
            named = dict(zip(self.plan.signature.outputs, outputs, strict=False))
            watched.backward(saved, [torch.ones_like(named[name]) for name in self.plan.output_gradients])
        return clock.timings()

    def told(self) -> list[str]:
        programs = [p for p in (self._forward, self._backward) if p is not None]
        kernels = {f for p in programs for f in p.operators if isinstance(f, Kernel)}
        return [told(kernels)] if kernels else []

    def source(self, part: str) -> str:
        program = self._forward if part == "forward" else self._backward
        return program.source if program is not None else ""


_OF_CLASSES = ("PythonOp", "PythonOpGrad")  # a user's class, which runs on tensors without content


def _untold(why: str, node: str = "", source: str = "") -> BackendError:
    return BackendError(
        f"it cannot be told what memory a step needs: {why}", node=node, source=source, cure="leave memory_budget away"
    )


class TorchBackend(Backend):
    """Runs plans on PyTorch, CPU or GPU."""

    name = "torch"
    runs_aten = True
    gathers = True

    def __init__(self) -> None:
        self._compiler = KernelCompiler()
        self._kernels: dict[tuple[str, str], Kernels] = {}

    def runs(self, node: ir.Node) -> bool:
        return node.op_type == "Constant" or can_expand(node) or lowering_of(node) is not None

    def draws_again(self, device: str) -> bool:
        return torch.device(device).type in ("cpu", "cuda")  # whose generators' states are known

    def compile(self, plan: Plan, device: str = "cpu", options: Options | None = None) -> TorchExecutable:
        if plan.backward is not None and torch.device(device).type == "cpu" and (options is None or options.keep_freed):
            keep_freed()
        added = added_of(plan)
        is_free = options is None or options.memory_budget is None
        kernels = self._kernels_of(device, options) if is_free else None
        forward, backward = compile_plan(plan, device, added, keeps=is_free, kernels=kernels)
        return TorchExecutable(plan, forward, backward, device, added)

    def _kernels_of(self, device: str, options: Options | None) -> Kernels | None:
        """The kernels that plans share; None where there are to be none."""
        if options is None or options.codegen == "none" or options.deterministic:
            return None
        found = self._kernels.get((device, options.codegen))
        if found is None:
            found = Kernels(device, self._compiler, is_waited_for=options.codegen == "inductor")
            self._kernels[device, options.codegen] = found
        return found


__all__ = ["TorchBackend", "TorchExecutable"]
