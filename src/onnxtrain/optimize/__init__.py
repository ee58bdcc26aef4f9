"""Graph → Graph: the ordered lists of passes over a forward graph and over a training graph."""

from __future__ import annotations

from onnxtrain.ir.graphs import ForwardGraph, TrainingGraph
from onnxtrain.ir.passes import Pipeline, Record, Step
from onnxtrain.optimize.accumulation import EmbeddingSumPass
from onnxtrain.optimize.casts import hoist_casts
from onnxtrain.optimize.cleanup import (
    CommonSubexpressionsPass,
    ConstantsPass,
    DeadCodePass,
    KnownShapesPass,
    KnownTypesPass,
    NoOperationPass,
)
from onnxtrain.optimize.compute_order import ComputeOrderPass
from onnxtrain.optimize.convolution import ConvolutionsPass
from onnxtrain.optimize.fusions import FusionsPass
from onnxtrain.optimize.losses import LinearLossPass
from onnxtrain.optimize.merged_axes import MergedAxesPass
from onnxtrain.optimize.precision import CastPropagationPass
from onnxtrain.optimize.quantization import FakeQuantPass
from onnxtrain.optimize.registered import apply_registered, registered_for
from onnxtrain.optimize.sequences import SequencesPass
from onnxtrain.optimize.slices import SlicesPass
from onnxtrain.optimize.views import ViewsPass
from onnxtrain.options import Options


def forward_steps(options: Options) -> tuple[Step, ...]:
    """The passes over a forward graph, in order."""
    return (
        Step(KnownTypesPass(), "first: what is cast like another value does not need that value"),
        Step(ConstantsPass(), "early, so that later passes see constants where the exporter wrote nodes"),
        Step(KnownShapesPass(), "after constants: shape arithmetic whose result is known becomes constant"),
        Step(SequencesPass(), "once indices and sizes are known: tensors in sequences have no gradient"),
        Step(NoOperationPass(), "once types and shapes are known: casts, slices and expands that change nothing go"),
        Step(CommonSubexpressionsPass(), "after casts and identities no longer hide equal nodes"),
        Step(DeadCodePass(), "before passes that ask who else reads a value"),
        Step(FakeQuantPass(), "after equal constants are one: a pair must have the same scale"),
        Step(ConvolutionsPass(), "before slices and views, which may cancel what it adds"),
        Step(SlicesPass(), "after equal slices are one: what takes a tensor apart then does so once"),
        Step(ViewsPass(), "after equal views are one: a chain is then met from all its ends"),
        Step(DeadCodePass(), "again: views that nothing reads any longer"),
        Step(CastPropagationPass(options), "after views, over which casts move: fewer of them, and no two in a row"),
        Step(NoOperationPass(), "again: slices and views of whole tensors that rewrites left"),
        Step(FusionsPass(), "after cleanup, which leaves formulas in one form"),
        Step(DeadCodePass(), "last: takes away what the others left without a reader"),
    )


SELECTIONS = (
    Step(DeadCodePass(), "first: a value is needed whole while a dead node reads all of it"),
    Step(MergedAxesPass(), "before selections move: rows that are flattened are not told from each other"),
    Step(ViewsPass(), "what was merged and split is one view"),
    Step(DeadCodePass(), "again: the views that merged"),
    Step(ComputeOrderPass(), "a selection passes one operator where fusions left no formula"),
    Step(ViewsPass(), "selections bring axes to the front and back, which often cancels"),
    Step(NoOperationPass(), "views and slices of whole tensors that are left"),
    Step(DeadCodePass(), "last: what was computed whole before has no reader left"),
)

LOSSES = (
    Step(LinearLossPass(), "where the logits are no output and belong to rows that have labels"),
    Step(DeadCodePass(), "takes away the logits"),
)

TRAINING = (
    Step(DeadCodePass(), "first: rules emit gradients for inputs that do not need one"),
    Step(NoOperationPass(), "sums over axes that were not broadcast"),
    Step(ViewsPass(), "gradients of views often cancel"),
    Step(CommonSubexpressionsPass(), "rules of neighbouring nodes compute the same transposes"),
    Step(EmbeddingSumPass(), "once nodes that do nothing no longer stand between gradients and their sums"),
    Step(DeadCodePass(), "last, as above"),
)


def optimize(graph: ForwardGraph, options: Options | None = None, *, check: bool = True) -> list[Record]:
    """Optimize a forward graph in place; says what each pass did.

    Args:
        graph: the graph.
        options: what passes leave to choose; the defaults where None.
        check: verify the model after every pass.
    """
    return Pipeline(forward_steps(options or Options()), check).run(graph.model)


def move_selections(graph: ForwardGraph, *, check: bool = True) -> list[Record]:
    """Select first and compute then, in place; dropout draws fewer random numbers than eager's. Says what moved."""
    return Pipeline(SELECTIONS, check).run(graph.model)


def join_losses(graph: ForwardGraph, *, check: bool = True) -> list[Record]:
    """Compute a loss together with its output layer, in place, where nobody sees the scores between them."""
    return Pipeline(LOSSES, check).run(graph.model)


def optimize_training(graph: TrainingGraph, *, check: bool = True) -> list[Record]:
    """Optimize a training graph in place; says what each pass did."""
    return Pipeline(TRAINING, check).run(graph.model)


__all__ = [
    "apply_registered",
    "hoist_casts",
    "join_losses",
    "move_selections",
    "optimize",
    "optimize_training",
    "registered_for",
]
