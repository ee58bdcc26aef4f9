"""Memory plans by hand: what people write, what a graph offers, and what is taken of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from onnxtrain import Options
from onnxtrain.errors import OptionError
from onnxtrain.gradient import build_gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature, TrainingGraph
from onnxtrain.memory_options import PlanRequest, plans_of, probe_of, request_of
from onnxtrain.plan import make_plan
from onnxtrain.plan.by_hand import COMPROMISE, RECOMPUTE, candidates, check_known, layer_inputs, selected

SIZES = {"rows": 4}


def graph(text: str) -> ForwardGraph:
    """A forward graph of ONNX's text, with shapes; ``w`` and the like are parameters."""
    model = ir.from_onnx_text(f'<ir_version: 9, opset_import: ["" : 20]> {text}')
    for node in model.graph:
        shapes.infer(node)
    names = [str(v.name) for v in model.graph.inputs]
    weights = tuple(n for n in names if n.startswith("w"))
    users = tuple(n for n in names if n not in weights)
    outputs = tuple(str(v.name) for v in model.graph.outputs)
    return ForwardGraph(model, Signature(users, weights, (), outputs, {}, weights))


def trained(text: str) -> tuple[TrainingGraph, Plan]:
    forward = graph(text)
    training = build_gradient(forward, forward.signature.outputs)
    return training, make_plan(training)


CHAIN = """g (float[rows, 8] x, float[8, 8] w0, float[8, 8] w1, float[8, 8] w2) => (float[rows, 8] y) {
    a = MatMul(x, w0)
    b = Tanh(a)
    c = MatMul(b, w1)
    d = Tanh(c)
    y = MatMul(d, w2)
}"""


def test_what_is_found_last_first() -> None:
    training, plan = trained(CHAIN)
    found = candidates(training, plan, SIZES, "cpu", "1:0")
    assert [c.cluster for c in found] == ["MatMul+Tanh+", "MatMul+Tanh+"]
    assert [c.choice.dropped for c in found] == [("d",), ("b",)]
    assert {(c.kind, c.choice.gain, str(c.saving), c.share) for c in found} == {(RECOMPUTE, 128, "32*rows", 1.0)}
    assert candidates(training, plan, SIZES, "cpu", "0:0") == []


def test_at_most_15_operators_run_again() -> None:
    def text(count: int) -> str:
        lines = ["a0 = Add(x, x)", *(f"a{i + 1} = Add(a{i}, x)" for i in range(count)), f"y = MatMul(a{count}, w)"]
        return f"g (float[rows, 8] x, float[8, 8] w) => (float[rows, 8] y) {{ {' '.join(lines)} }}"

    assert [c.cluster for c in candidates(*trained(text(14)), SIZES, "cpu", "0:0")] == ["Add+" * 15]
    assert candidates(*trained(text(15)), SIZES, "cpu", "0:0") == []


def test_something_smaller_is_kept() -> None:
    training, plan = trained(
        """g (float16[rows, 8] x, float16[8, 8] w, float[8, 8] w2) => (float[rows, 8] y) {
            a = MatMul(x, w)
            b = Cast <to = 1> (a)
            y = MatMul(b, w2)
        }"""
    )
    (found,) = candidates(training, plan, SIZES, "cpu", "0:0")
    assert (found.cluster, found.kind, found.share, str(found.saving)) == ("Cast+", COMPROMISE, 0.5, "16*rows")
    assert (found.choice.dropped, found.choice.kept, found.choice.gain) == (("b",), ("a",), 64)
    (whole,) = candidates(training, plan, SIZES, "cpu", "1:0")
    assert (whole.cluster, whole.kind, whole.choice.kept) == ("MatMul+Cast+", RECOMPUTE, ())


def test_where_layers_begin() -> None:
    text = """g (float[rows, 8] x, float[8] w, float[8, 8] w1) => (float[rows, 8] y) {
        a = LayerNormalization(x, w)
        b = MatMul(a, w1)
        c = Softmax(b)
        d = Add(x, c)
        e = LayerNormalization(d, w)
        f = Tanh(e)
        h = Add(d, f)
        i = LayerNormalization(h, w)
        j = Softmax(i)
        y = Mul(j, h)
    }"""
    assert [v.name for v in layer_inputs(graph(text).model.graph)] == ["x", "h"]
    training, plan = trained(text)
    dropped = {n for c in candidates(training, plan, SIZES, "cpu", "1:1") for n in c.choice.dropped}
    made = {str(v.name) for n in training.model.graph for v in n.outputs}
    assert {*plan.saved} & made - dropped == {"h"}  # the input of the second layer is all that is left
    assert "h" in {n for c in candidates(training, plan, SIZES, "cpu", "1:0") for n in c.choice.dropped}


@pytest.mark.parametrize(
    ("requests", "level", "dropped"),
    [
        ([("MatMul+Tanh+", 1, -1)], 0, ["b", "d"]),
        ([("MatMul+Tanh+", 1, 1)], 0, ["b"]),
        ([("MatMul+Tanh+", 2, 7)], 0, ["b", "d"]),
        ([("MatMul+Tanh+", 1, 0)], 0, []),
        ([("MatMul+Tanh+", 0, -1)], 0, []),
        ([("Tanh+", 1, -1)], 0, []),
        ([], 0, []),
        ([], 1, ["b", "d"]),
        ([("MatMul+Tanh+", 0, -1)], 2, ["b", "d"]),
    ],
)
def test_what_is_taken(requests: list[tuple[str, int, int]], level: int, dropped: list[str]) -> None:
    found = candidates(*trained(CHAIN), SIZES, "cpu", "1:0")
    taken = selected(found, [PlanRequest(*r) for r in requests], level)
    assert sorted(n for c in taken for n in c.choice.dropped) == dropped


def test_what_is_not_there() -> None:
    known = {("Linear+Gelu+", RECOMPUTE), ("Cast+", COMPROMISE)}
    check_known([PlanRequest("Linear+Gelu+", 2, 1), PlanRequest("Cast+", 2, -1), PlanRequest("Nothing+", 0, -1)], known)
    with pytest.raises(OptionError, match=r"Linear\+Gelu:1:-1.*close names: Linear\+Gelu\+"):
        check_known([PlanRequest("Linear+Gelu", 1, -1)], known)
    with pytest.raises(OptionError, match=r"there are Cast\+, Linear\+Gelu\+\n"):
        check_known([PlanRequest("Softmax+", 1, -1)], known)
    with pytest.raises(OptionError, match=r"write 'Cast\+:2:3'"):
        check_known([PlanRequest("Cast+", 1, 3)], known)


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        ((), ()),
        ("", ()),
        ("Gelu+:1:-1", ("Gelu+:1:-1",)),
        (" Gelu+:1:-1 ,Cast+Mul+:2:3,", ("Gelu+:1:-1", "Cast+Mul+:2:3")),
        (["Gelu+:1:-1", "Cast+:1:1,Gelu+:0:2"], ("Gelu+:0:2", "Cast+:1:1")),
    ],
)
def test_plans_as_people_write_them(stated: Any, read: tuple[str, ...], tmp_path: Path) -> None:
    assert plans_of(stated) == Options(memory_plans=stated).plans_by_hand == read
    path = tmp_path / "plans.json"
    path.write_text(
        json.dumps(list(stated) if isinstance(stated, tuple) else [stated] * isinstance(stated, str) or stated)
    )
    assert plans_of(path) == plans_of(str(path)) == read


@pytest.mark.parametrize(
    "wrong", ["Gelu+", "Gelu+:1", "Gelu+:1:1:1", "Gelu+:3:1", "Gelu+:1:-2", ":1:1", "Gelu+:1:all", 3]
)
def test_plans_that_are_none(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"memory.plan"):
        Options(memory_plans=wrong)


@pytest.mark.parametrize("content", ['{"a": 1}', "[1]", "Gelu+:1:-1"])
def test_files_that_are_no_plans(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"plans\.json"):
        Options(memory_plans=path)


def test_levels_and_probes_that_are_none() -> None:
    assert probe_of(" 1:1 ") == "1:1"
    assert request_of("A+:1:-1") == PlanRequest("A+", 1, -1)
    for wrong in ("2:0", "1", "", 1):
        with pytest.raises(OptionError, match="memory_probe"):
            Options(memory_probe=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="memory_level"):
        Options(memory_level=3)
