"""onnxtrain check: everything that keeps an ONNX model from being trained, in one go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import Options, check_model, cli
from onnxtrain.execute.torch import lowerings  # noqa: F401  (fills LOWERINGS)
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.gradient import rules  # noqa: F401  (fills RULES)
from onnxtrain.gradient.registry import RULES

WEIGHTS = {"w": (4, 4), "v": (4,), "unused": (2,)}


def model(*nodes: onnx.NodeProto, opset: int = 20, output: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model of one input ``x``, weights ``w`` and ``v``, and one output ``y``."""
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in WEIGHTS.items()]
    graph = helper.make_graph(
        list(nodes),
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", output, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def saved(path: Path, *nodes: onnx.NodeProto, **settings: int) -> Path:
    onnx.save(model(*nodes, **settings), path / "model.onnx")
    return path / "model.onnx"


def node(op_type: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=f"node_{output}", **attributes)


TRAINABLE = (node("MatMul", "x w", "a"), node("Softmax", "a", "b"), node("Mul", "b v", "y"))
BLOCKED = (
    node("MatMul", "x w", "a"),
    node("Erf", "w", "d"),
    node("Mul", "a d", "e"),
    node("Softsign", "e", "f"),
    node("Softsign", "f", "y"),
)


@pytest.fixture(autouse=True)
def _without_two_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Erf and Softsign as operators that have neither a rule nor a lowering."""
    for op_type in ("Erf", "Softsign"):
        monkeypatch.delitem(RULES, ("", op_type))
        monkeypatch.delitem(LOWERINGS, ("", op_type))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_trainable_model_is_trainable(tmp_path: Path, backend: str) -> None:
    found = check_model(saved(tmp_path, *TRAINABLE), options=Options(backend=backend))
    assert found, str(found)
    assert "can be trained" in str(found) and found.backend == backend


def test_all_operators_without_rule_are_listed_at_once(tmp_path: Path) -> None:
    found = check_model(saved(tmp_path, *BLOCKED), options=Options(backend="onnxruntime"))
    assert not found
    assert [b.node for b in found.blockers] == [
        "Erf(node_d)",
        "Softsign(node_f)",
        "Softsign(node_y)",
    ], "each node by name, the second Softsign hides neither the first nor Erf"
    assert {b.kind for b in found.blockers} == {"GradientError"}


def test_what_the_backend_lacks_is_listed_too(tmp_path: Path) -> None:
    found = check_model(saved(tmp_path, *BLOCKED), options=Options(backend="torch"))
    lacking = [b.node for b in found.blockers if b.kind == "BackendError"]
    assert lacking == ["Erf(node_d)", "Softsign(node_f)", "Softsign(node_y)"]
    text = str(found)
    assert text.count("cannot run the operator Softsign") == 1, "nodes of one kind are told together"
    assert "at Softsign(node_y)" in text and "cure:" in text


def test_an_operator_of_the_backward_pass_that_the_backend_lacks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delitem(LOWERINGS, ("", "Cos"))
    nodes = (node("MatMul", "x w", "a"), node("Sin", "a", "y"))
    found = check_model(saved(tmp_path, *nodes), options=Options(backend="torch"))
    assert [(b.kind, b.node.split("(")[0]) for b in found.blockers] == [("BackendError", "Cos")], str(found)


def test_an_operator_that_no_trained_weight_reaches_is_no_blocker(tmp_path: Path) -> None:
    nodes = (node("Softsign", "x", "n"), node("MatMul", "n w", "y"))
    assert check_model(saved(tmp_path, *nodes), options=Options(backend="onnxruntime"))
    nodes = (*BLOCKED[:-1], node("Mul", "f v", "y"))
    assert not check_model(saved(tmp_path, *nodes), options=Options(backend="onnxruntime"))
    frozen = check_model(saved(tmp_path, *nodes), options=Options(backend="onnxruntime"), parameters=["v"])
    assert frozen, str(frozen)


def test_an_older_opset_is_brought_up(tmp_path: Path) -> None:
    assert check_model(saved(tmp_path, *TRAINABLE, opset=17), options=Options(backend="torch"))


def test_what_cannot_be_read_is_a_blocker(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    found = check_model(tmp_path / "text.onnx")
    assert [b.kind for b in found.blockers] == ["GraphError"] and "cannot be read" in str(found)
    missing = check_model(saved(tmp_path, *TRAINABLE), parameters=["nothing.*"])
    assert "nothing.*" in str(missing)


def test_the_command_exits_with_one_where_something_blocks(tmp_path: Path, capsys) -> None:
    assert cli.main(["check", str(saved(tmp_path, *TRAINABLE)), "--backend", "torch"]) == 0
    assert "can be trained" in capsys.readouterr().out
    assert cli.main(["check", str(saved(tmp_path, *BLOCKED)), "--backend", "torch", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["trainable"] is False and len(told["blockers"]) == 6
    assert cli.main(["check", str(saved(tmp_path, *TRAINABLE)), "--train", "unu*"]) == 1
    assert "no output depends" in capsys.readouterr().out
    assert cli.main(["check", str(tmp_path / "nothing.onnx")]) == 2
    assert "nothing.onnx" in capsys.readouterr().err
