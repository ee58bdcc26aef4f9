"""Second derivatives of the table of operators: the backward pass differentiated again, against torch in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from op_cases import CASES, Case
from op_runs import Row, prepare, seeds

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient, gradients_as_outputs
from onnxtrain.plan import make_plan

Tensor = torch.Tensor
WITHOUT = {  # torch has no second derivative there, or another one
    "PRelu-kink": "torch takes another side of the kink",
    **dict.fromkeys(
        ("Pow-zero-base-0.5", "Pow-whole-exponents", "Pow-zero-base-tensor", "Pow-negative-base", "ReduceL2-zeros"),
        "the derivative of a power at 0, or of a negative number, is no number",
    ),
    **dict.fromkeys(
        (*("CumProd-zeros", "CumProd-zeros-both", "ScatterElements-mul-ties", "ScatterND-mul-ties"),),
        "a product's gradient where a factor is 0 is found by a branch, which is not differentiated",
    ),
}


@dataclasses.dataclass
class Second:
    """Gradients of a weighted sum of gradients.

    Args:
        inputs: all inputs, then the gradients of the outputs: leaves.
        weights: for the name of each input that has a gradient, what it is multiplied by.
        gradients: of the differentiable ones among the inputs; None where torch says that there is none.
    """

    inputs: list[Tensor]
    weights: dict[str, Tensor]
    gradients: list[Tensor | None]


def _by_torch(row: Row) -> Second | None:
    """What torch finds; None where it has no second derivative."""
    tensors = [torch.from_numpy(np.array(a)) for a in row.arrays]
    for name, tensor in zip(row.plan.signature.inputs, tensors, strict=True):
        tensor.requires_grad_(name in row.plan.gradients)
    made = row.case.reference(*tensors)
    outputs = list(made) if isinstance(made, tuple | list) else [made]
    given = [torch.from_numpy(dy) for dy in seeds(row, [y.detach().numpy() for y in outputs])]
    dys = [dy.requires_grad_() for dy in given]
    named = dict(zip(row.plan.signature.outputs, outputs, strict=True))
    pairs = [(named[n], dy) for n, dy in zip(row.plan.output_gradients, dys, strict=True) if named[n].requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    try:
        ys, seeded = zip(*pairs, strict=True)
        first = torch.autograd.grad(ys, wanted, seeded, create_graph=True, allow_unused=True)
        rng = torch.Generator().manual_seed(0)
        weights = [torch.rand(t.shape, generator=rng, dtype=t.dtype) * 2 - 1 for t in wanted]
        terms = [(dx, w) for dx, w in zip(first, weights, strict=True) if dx is not None and dx.requires_grad]
        if not terms:
            return None
        made, factors = zip(*terms, strict=True)
        second = torch.autograd.grad(made, [*wanted, *dys], factors, allow_unused=True)
    except (NotImplementedError, RuntimeError):
        return None
    named_weights = dict(zip(row.plan.gradients, weights, strict=True))
    return Second([t.detach() for t in (*tensors, *dys)], named_weights, list(second))


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=lambda c: c.id)
def test_the_backward_pass_is_differentiated_like_any_other(case: Case, request: pytest.FixtureRequest) -> None:
    if case.id in WITHOUT:
        request.applymarker(pytest.mark.xfail(reason=WITHOUT[case.id], strict=True))
    row = prepare(case, np.float64, gradients=True)
    theirs = _by_torch(row)
    if theirs is None:
        return
    training = build_gradient(row.graph)
    graph = gradients_as_outputs(training)
    names = (*training.gradients, *training.output_gradients.values())
    graph.signature = dataclasses.replace(graph.signature, differentiable=names)
    plan = make_plan(build_gradient(graph))
    executable = backend("torch").compile(plan)
    outputs, saved = executable.forward(theirs.inputs)
    weights = {training.gradients[name]: weight for name, weight in theirs.weights.items()}
    made = executable.backward(saved, [weights[name] for name in plan.output_gradients])
    assert len(outputs) >= len(training.gradients)
    found = dict(zip(plan.gradients, made, strict=True))
    for name, expected in zip(names, theirs.gradients, strict=True):
        ours = found.get(name)
        if ours is not None or expected is not None:
            model = ours if expected is None else expected
            zeros = torch.zeros_like(model)
            torch.testing.assert_close(
                zeros if ours is None else ours, zeros if expected is None else expected, rtol=1e-7, atol=1e-9
            )
