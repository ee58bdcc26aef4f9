"""Graph → Graph: the ordered lists of passes over a forward graph and over a training graph."""

from __future__ import annotations

import dataclasses

from onnxtrain.ir.graphs import ForwardGraph, TrainingGraph
from onnxtrain.ir.passes import Pipeline, Record, Step
from onnxtrain.optimize.casts import hoist_casts
from onnxtrain.optimize.cleanup import (
    CommonSubexpressionsPass,
    ConstantsPass,
    DeadCodePass,
    KnownShapesPass,
    NoOperationPass,
)
from onnxtrain.optimize.compute_order import ComputeOrderPass
from onnxtrain.optimize.fusions import FusionsPass
from onnxtrain.optimize.quantization import FakeQuantPass
from onnxtrain.optimize.registered import apply_registered
from onnxtrain.optimize.sequences import SequencesPass

FORWARD = (
    Step(ConstantsPass(), "first, so that later passes see constants where the exporter wrote nodes"),
    Step(KnownShapesPass(), "after constants: shape arithmetic whose result is known becomes constant"),
    Step(SequencesPass(), "once indices and sizes are known: tensors in sequences have no gradient"),
    Step(NoOperationPass(), "once types and shapes are known: casts, slices and expands that change nothing go"),
    Step(CommonSubexpressionsPass(), "after casts and identities no longer hide equal nodes"),
    Step(FakeQuantPass(), "after equal constants are one: a pair must have the same scale"),
    Step(FusionsPass(), "after cleanup, which leaves formulas in one form"),
    Step(DeadCodePass(), "before selections move: a value is needed whole while a dead node reads all of it"),
    Step(ComputeOrderPass(), "after fusions, so that a selection passes one operator instead of its formula"),
    Step(NoOperationPass(), "selections bring axes to the front and back, which often cancels"),
    Step(DeadCodePass(), "last: takes away what the others left without a reader"),
)

TRAINING = (
    Step(DeadCodePass(), "first: rules emit gradients for inputs that do not need one"),
    Step(NoOperationPass(), "gradients of views often cancel"),
    Step(CommonSubexpressionsPass(), "rules of neighbouring nodes compute the same transposes"),
    Step(DeadCodePass(), "last, as above"),
)


def optimize(graph: ForwardGraph, *, check: bool = True, same_draws: bool = False) -> list[Record]:
    """Optimize a forward graph in place; says what each pass did.

    Args:
        graph: what to optimize.
        check: verify the graph after every pass.
        same_draws: let dropout draw all the random numbers that eager PyTorch draws, those that nothing reads included.
    """
    return Pipeline([_drawing_all(s) if same_draws else s for s in FORWARD], check).run(graph.model)


def _drawing_all(step: Step) -> Step:
    if not isinstance(step.run, ComputeOrderPass):
        return step
    return dataclasses.replace(step, run=ComputeOrderPass(through_dropout=False))


def optimize_training(graph: TrainingGraph, *, check: bool = True) -> list[Record]:
    """Optimize a training graph in place; says what each pass did."""
    return Pipeline(TRAINING, check).run(graph.model)


__all__ = ["apply_registered", "hoist_casts", "optimize", "optimize_training"]
