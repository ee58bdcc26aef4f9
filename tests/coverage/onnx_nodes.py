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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator
from onnx.version_converter import convert_version

from onnxtrain.errors import OnnxTrainError
from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.bodies import close_bodies
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.ir.opsets import NEWEST
from onnxtrain.ir.shapes import infer_graph
from onnxtrain.ir.traits import TRAITS, Trait
from onnxtrain.optimize import optimize
from onnxtrain.plan import make_plan

OLDEST = 20  # older tests are converted, as models are
DIRECTIONS = 3
TOLERANCE = 5e-3  # of the product of the lengths of gradient and direction: onnxruntime computes in float32
_IR = 10  # version of the file format, which onnxruntime must know
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
        schemas = _schemas(node.op_type)
        if min(s.since_version for s in schemas) <= NEWEST and not schemas[-1].deprecated:
            kept.append(case)
    return kept


def _schemas(op: str) -> list[Any]:
    found = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op and s.domain == ""]
    return sorted(found, key=lambda s: s.since_version)


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
    plain = _session(case.model, inputs)
    rng = np.random.default_rng(0)
    wanted = _wanted(case.model, inputs)
    for name in wanted:  # away from the round numbers of many tests, which lie on kinks
        moved = inputs[name] + rng.uniform(1e-3, 4e-3, inputs[name].shape)
        inputs[name] = np.asarray(moved, inputs[name].dtype)
    forward = _graph(case.model, inputs, wanted)
    plan = make_plan(build_gradient(forward))
    if plan.backward is None:
        raise Skip("no gradient flows")
    executable = backend("onnxruntime").compile(plan)
    given = [torch.from_numpy(np.array(inputs[n])) for n in forward.signature.user_inputs]
    outputs, saved = executable.forward(given)
    real = dict(zip(forward.signature.outputs, (np.asarray(y) for y in outputs), strict=False))
    if not all(np.isfinite(real[n]).all() for n in plan.output_gradients):
        raise Skip("the outputs are not finite")
    seeds = {n: rng.uniform(-1, 1, real[n].shape).astype(real[n].dtype) for n in plan.output_gradients}
    found = executable.backward(saved, [torch.from_numpy(s) for s in seeds.values()])
    gradients = {n: np.asarray(g, np.float64) for n, g in zip(plan.gradients, found, strict=True)}
    gradients |= {n: np.zeros(inputs[n].shape) for n in wanted if n not in plan.gradients}
    function, step = _function(case.model, plain, inputs, {n: real[n] for n in seeds})
    return _agree(function, step, inputs, gradients, seeds, rng)


def _session(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> ort.InferenceSession:
    """The test's own model in onnxruntime; skips what that cannot even compute."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.ir_version = min(model.ir_version, _IR)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        session.run(None, inputs)
    except Exception as error:  # of many kinds
        raise Skip("onnxruntime cannot compute it") from error
    return session


def _function(
    model: onnx.ModelProto, plain: ort.InferenceSession, inputs: dict[str, np.ndarray], real: dict[str, np.ndarray]
) -> tuple[Callable[[dict[str, np.ndarray]], Sequence[Any]], float]:
    """What is differentiated by differences, and the step: ONNX's reference in double where it computes the same.

    Where it does not, or does not take doubles, onnxruntime in float32 with a larger step.
    """
    evaluator = ReferenceEvaluator(model)

    def exact(given: dict[str, np.ndarray]) -> Sequence[Any]:
        doubled = {n: a.astype(np.float64) if _is_real(a) else a for n, a in given.items()}
        made = dict(zip(evaluator.output_names, evaluator.run(None, doubled), strict=False))
        return [made[n] for n in real]

    try:
        same = all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(exact(inputs), real.values(), strict=True))
    except Exception:  # of onnx's reference
        same = False
    if same:
        return exact, 1e-4
    kinds = {n: a.dtype for n, a in inputs.items()}
    return lambda given: plain.run(list(real), {n: a.astype(kinds[n]) for n, a in given.items()}), 1e-2


def _agree(
    function: Callable[[dict[str, np.ndarray]], Sequence[Any]],
    step: float,
    inputs: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
    seeds: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> tuple[str, str]:
    """Whether gradients along random directions are those of central differences, for each input alone."""

    def value(name: str, along: np.ndarray) -> float:
        made = function(inputs | {name: along})
        return sum(float((np.asarray(y, np.float64) * s).sum()) for y, s in zip(made, seeds.values(), strict=True))

    for name, gradient in gradients.items():
        at = inputs[name].astype(np.float64)
        for _ in range(DIRECTIONS):
            v = rng.uniform(-1, 1, gradient.shape)
            above, below = (value(name, np.asarray(at + s * v)) for s in (step, -step))
            numeric = (above - below) / (2 * step)
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


def _wanted(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The inputs that ONNX calls differentiable.

    Raises:
        Skip: there is none, or the operator draws random numbers.
    """
    node = model.graph.node[-1]
    schema = onnx.defs.get_schema(node.op_type, max(v.version for v in model.opset_import if not v.domain))
    if len(node.input) > onnx.defs.get_schema(node.op_type, NEWEST).max_input:
        raise Skip("a newer form")
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(len(node.input))]
    found = [
        n
        for n, f in zip(node.input, formal, strict=True)
        if n in inputs and _is_real(inputs[n]) and f.differentiation_category != _FIXED
    ]
    traits = TRAITS.get(node.op_type, Trait.NONE)
    if not found or Trait.STOP in traits:
        raise Skip("nothing is differentiable")
    if Trait.RANDOM in traits and len(node.input) > 2 and inputs.get(node.input[2], False):
        raise Skip("random")
    return tuple(dict.fromkeys(found))


def _graph(model: onnx.ModelProto, inputs: dict[str, np.ndarray], wanted: Sequence[str]) -> ForwardGraph:
    """The test's model, in which integers are constants, as in exports."""
    version = max(v.version for v in model.opset_import if not v.domain)
    made = ir.from_proto(convert_version(model, OLDEST) if version < OLDEST else model)
    made.ir_version = _IR
    graph = made.graph
    close_bodies(graph)
    for value in list(graph.inputs):
        array = inputs[value.name]
        value.shape = ir.Shape(array.shape)
        if not _is_real(array):
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.initializers.add(value)
    for value in graph.outputs:
        value.shape = None
    infer_graph(graph)
    if not any(v.dtype is not None and v.dtype.is_floating_point() for v in graph.outputs):
        raise Skip("nothing is differentiable")
    names = tuple(str(v.name) for v in graph.inputs)
    outputs = tuple(str(v.name) for v in graph.outputs)
    forward = ForwardGraph(made, Signature(names, (), (), outputs, {}, tuple(n for n in names if n in wanted)))
    optimize(forward)
    return forward


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
