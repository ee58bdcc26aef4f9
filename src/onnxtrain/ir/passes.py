"""Pipeline: run passes in order, verify between them, time, count and dump."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from onnxtrain.ir.standard_form import attach
from onnxtrain.ir.verify import verify


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass at its place in a pipeline.

    Args:
        run: an ``onnx_ir`` pass, called with the model.
        reason: why the pass stands where it stands.
    """

    run: ir.passes.PassBase
    reason: str

    @property
    def name(self) -> str:
        """The pass's class name without the word Pass."""
        return type(self.run).__name__.removesuffix("Pass")


@dataclasses.dataclass(frozen=True)
class Record:
    """What one pass did: seconds it took, nodes before and after, whether it changed anything, and its own words."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    modified: bool
    note: str = ""


@dataclasses.dataclass
class Pipeline:
    """An ordered list of passes over one model.

    Args:
        steps: the passes, each with the reason for its position.
        check: verify the model after every pass.
        dump: called with the pass's name and the model after every pass that changed something.
    """

    steps: Sequence[Step]
    check: bool = True
    dump: Callable[[str, ir.Model], None] | None = None

    def run(self, model: ir.Model) -> list[Record]:
        """Run all passes in place and say what each did.

        Raises:
            GraphError: a pass left the model malformed; the message names the pass.
        """
        return [self._run(step, model) for step in self.steps]

    def _run(self, step: Step, model: ir.Model) -> Record:
        before, start = len(model.graph), time.perf_counter()
        modified = step.run(model).modified
        seconds = time.perf_counter() - start
        if modified and self.check:
            verify(model, after=step.name)
        if modified and self.dump is not None:
            self.dump(step.name, model)
        return Record(step.name, seconds, before, len(model.graph), modified, getattr(step.run, "note", ""))


def save(model: ir.Model, path: Path) -> None:
    """Write a model that opens in Netron, function bodies included: to a temporary name, then renamed."""
    model = attach(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    ir.save(model, temporary)
    temporary.replace(path)
