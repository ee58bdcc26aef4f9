"""The node tests that ship in the onnx package, differentiated: our gradient on onnxruntime against finite differences.

``python tests/coverage/onnx_nodes.py [OPERATOR ...]`` prints what passes and why the rest does not.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator
from onnx.version_converter import convert_version

from onnxtrain.errors import OnnxTrainError
from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.ir.shapes import infer_graph
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan import make_plan

OLDEST, NEWEST = 20, 23  # older tests are converted, as models are; operators that came later are not looked at
DIRECTIONS = 3
TOLERANCE = 5e-3  # of the product of the lengths of gradient and direction: onnxruntime computes in float32
_FIXED = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable


@dataclasses.dataclass(frozen=True)
class Result:
    """How one node test went.

    Args:
        name: the test's name.
        op: its operator.
        outcome: ``"pass"``, ``"skip"`` (nothing to differentiate) or ``"fail"``.
        reason: why it was skipped or failed.
    """

    name: str
    op: str
    outcome: str
    reason: str = ""


class Skip(Exception):
    """A test has nothing to be differentiated."""


def cases(operators: Iterable[str] = ()) -> list[Any]:
    """The node tests of standard operators up to opset ``NEWEST``, without those of their decompositions."""
    chosen = set(operators)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    kept = []
    for case in found:
        node = case.model.graph.node[-1]
        if "_expanded" in case.name or node.domain or (chosen and node.op_type not in chosen):
            continue
        if min(s.since_version for s in _schemas(node.op_type)) <= NEWEST:
            kept.append(case)
    return kept


def _schemas(op: str) -> list[Any]:
    return [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op and s.domain == ""]


def check(case: Any) -> Result:
    """Differentiate a test's node with respect to every input that ONNX calls differentiable."""
    op = case.model.graph.node[-1].op_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Result(case.name, op, *_compare(case))
    except Skip as skip:
        return Result(case.name, op, "skip", str(skip))
    except OnnxTrainError as error:
        return Result(case.name, op, "fail", error.what.splitlines()[0])
    except Exception as error:  # of onnx's reference, or of onnxruntime
        return Result(case.name, op, "fail", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")


def _compare(case: Any) -> tuple[str, str]:
    inputs = _inputs(case)
    rng = np.random.default_rng(0)
    # away from the round numbers of many tests, which lie on kinks
    inputs = {n: a + rng.uniform(1e-3, 4e-3, a.shape).astype(a.dtype) if _is_real(a) else a for n, a in inputs.items()}
    forward = _graph(case.model, inputs)
    training = build_gradient(forward)
    plan = make_plan(training)
    missing = [n for n in forward.signature.differentiable if n not in plan.gradients]
    executable = backend("onnxruntime").compile(plan)
    given = [torch.from_numpy(np.ascontiguousarray(inputs[n])) for n in forward.signature.user_inputs]
    outputs, saved = executable.forward(given)
    names = forward.signature.outputs
    real = dict(zip(names, (np.asarray(y) for y in outputs), strict=False))
    seeds = {n: rng.uniform(-1, 1, real[n].shape).astype(real[n].dtype) for n in plan.output_gradients}
    if plan.backward is None:
        raise Skip("no gradient flows")
    found = executable.backward(saved, [torch.from_numpy(s) for s in seeds.values()])
    gradients = {n: np.asarray(g, np.float64) for n, g in zip(plan.gradients, found, strict=True)}
    gradients |= {n: np.zeros(inputs[n].shape) for n in missing}
    return _agree(case.model, inputs, gradients, seeds, rng)


def _agree(
    model: onnx.ModelProto,
    inputs: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
    seeds: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> tuple[str, str]:
    """Whether gradients along random directions are those of central differences, for each input alone."""
    evaluator, step = ReferenceEvaluator(model), 1e-4
    exact = {n: a.astype(np.float64) if _is_real(a) else a for n, a in inputs.items()}

    def value(name: str, along: np.ndarray) -> float:
        made = dict(zip(evaluator.output_names, evaluator.run(list(seeds), exact | {name: along}), strict=False))
        return sum(float((np.asarray(made[n], np.float64) * seeds[n]).sum()) for n in seeds)

    evaluator.output_names[:] = list(seeds)
    for name, gradient in gradients.items():
        for _ in range(DIRECTIONS):
            v = rng.uniform(-1, 1, gradient.shape)
            numeric = (value(name, exact[name] + step * v) - value(name, exact[name] - step * v)) / (2 * step)
            ours, scale = float((gradient * v).sum()), np.linalg.norm(gradient) * np.linalg.norm(v) + 1e-2
            if not abs(ours - numeric) <= TOLERANCE * scale:
                return "fail", f"gradient of {name} along a direction is {ours:.6g}, by differences {numeric:.6g}"
    return "pass", ""


def _is_real(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype in (np.float32, np.float64)


def _inputs(case: Any) -> dict[str, np.ndarray]:
    """The test's inputs in float32, by name."""
    names = [v.name for v in case.model.graph.input]
    if any(v.type.WhichOneof("value") != "tensor_type" for v in (*case.model.graph.input, *case.model.graph.output)):
        raise Skip("sequences and optionals")
    arrays = dict(zip(names, case.data_sets[0][0], strict=False))
    if any(not isinstance(a, np.ndarray) for a in arrays.values()):
        arrays = {n: np.asarray(a) for n, a in arrays.items()}
    if any(a.dtype.kind not in "fiub" or a.dtype == np.float16 for a in arrays.values()):
        raise Skip("half precision, 8 bits, complex or strings")
    return arrays


def _graph(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> ForwardGraph:
    """The test's model: inputs that ONNX calls differentiable are wanted, integers are constants as in exports."""
    version = max(v.version for v in model.opset_import if not v.domain)
    made = ir.from_proto(convert_version(model, OLDEST) if version < OLDEST else model)
    graph, node = made.graph, model.graph.node[-1]
    schema = onnx.defs.get_schema(node.op_type, max(v.version for v in model.opset_import if not v.domain))
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(len(node.input))]
    wanted = {
        n
        for n, f in zip(node.input, formal, strict=True)
        if n in inputs and _is_real(inputs[n]) and f.differentiation_category != _FIXED
    }
    for value in list(graph.inputs):
        array = inputs[value.name]
        value.shape = ir.Shape(array.shape)
        if not _is_real(array):
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.initializers.add(value)
    names = tuple(str(v.name) for v in graph.inputs)
    for value in graph.outputs:
        value.shape = None
    infer_graph(graph)
    outputs = tuple(str(v.name) for v in graph.outputs)
    real = any(v.dtype is not None and v.dtype.is_floating_point() for v in graph.outputs)
    if not wanted or not real or Trait.STOP in traits_of(graph[-1]):
        raise Skip("nothing is differentiable")
    differentiable = tuple(n for n in names if n in wanted)
    return ForwardGraph(made, Signature(names, (), (), outputs, {}, differentiable))


def table(results: list[Result]) -> str:
    """Operators and tests that pass, then what fails by operator."""
    by_op: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        if result.outcome != "skip":
            by_op[result.op].append(result)
    failed = {op: [r for r in rs if r.outcome == "fail"] for op, rs in by_op.items()}
    whole = sum(not f for f in failed.values())
    tests = sum(map(len, by_op.values()))
    passed = tests - sum(map(len, failed.values()))
    lines = [
        f"{whole} of {len(by_op)} operators pass all their tests ({100 * whole / max(1, len(by_op)):.0f} %), "
        f"{passed} of {tests} tests ({100 * passed / max(1, tests):.0f} %)"
    ]
    for op in sorted(op for op, f in failed.items() if f):
        reasons = collections.Counter(re.sub(r"-?[\d.]+(e-?\d+)?", "#", r.reason) for r in failed[op])
        lines.append(f"{op}: {len(failed[op])} of {len(by_op[op])}")
        lines += [f"    {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def main() -> int:
    """Check the operators named on the command line, or all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("operators", nargs="*", help="operators to check; all where none is named")
    parser.add_argument("--tests", action="store_true", help="print every test that fails, with its reason")
    arguments = parser.parse_args()
    results = [check(case) for case in cases(arguments.operators)]
    if arguments.tests:
        print("\n".join(f"{r.name}: {r.reason}" for r in results if r.outcome == "fail"))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
