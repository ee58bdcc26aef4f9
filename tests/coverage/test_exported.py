"""The walk over exported models: a share of it, and that it tells each kind of fault from the others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import comparing
import exported
import exported_page
import numpy as np
import onnx
import pytest
import shrinking
import torch
from exported import Outcome, go_through
from exporters import EXPORTERS, NEWEST, Exporter
from foreign import FOREIGN, Images, by_helper
from parametrization import FORMS, match
from specimens import SPECIMENS
from torch import nn
from torch.torch_version import TorchVersion

HELPER = "onnx.helper"


@pytest.mark.parametrize("model", [s.name for s in FOREIGN if s.library == "onnx"])
def test_models_made_by_hand_train_at_the_oldest_and_the_newest_opset(model: str) -> None:
    found = list(go_through(model, HELPER, [13, NEWEST]))
    assert [o.status for o in found] == ["pass", "pass"], found


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "TorchScript", "TorchScript, training"])
@pytest.mark.parametrize("model", ["keyword spotter", "U-Net", "LSTM tagger"])
def test_models_that_torch_exports_train(model: str, exporter: str) -> None:
    if (model, exporter) == ("LSTM tagger", "dynamo") and TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("torch 2.11 does not export LSTM layers with sizes that vary")
    found = list(go_through(model, exporter, [None, 13, 21]))
    assert {o.status for o in found} == {"pass"}, found


@pytest.mark.slow
def test_models_of_scikit_learn_train() -> None:
    for model in ("MLPClassifier", "MLPRegressor"):
        found = list(go_through(model, "skl2onnx", [None, 13]))
        assert {o.status for o in found} == {"pass"}, found


def _exporter(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """An exporter of ours by the name of a known one."""
    monkeypatch.setitem(
        EXPORTERS, HELPER, Exporter(lambda specimen, module: write(by_helper(specimen, module)), ("onnx",))
    )


def _only(model: str = "perceptron by onnx.helper") -> Outcome:
    (outcome,) = go_through(model, HELPER, [20])
    return outcome


def test_what_an_exporter_refuses_is_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(opset: int | None, path: Path) -> None:
        raise RuntimeError("no such opset\nand more")

    _exporter(monkeypatch, lambda write: refuses)
    assert (_only().status, _only().reason) == ("exporter", "RuntimeError: no such opset")


def _changed(write: Any, change: Any) -> Any:
    def changed(opset: int | None, path: Path) -> None:
        write(opset, path)
        proto = onnx.load(path)
        change(proto.graph)
        onnx.save(proto, path)

    return changed


def test_a_file_that_computes_something_else_is_the_exporters_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.5, tensor.name))

    _exporter(monkeypatch, lambda write: _changed(write, scaled))
    assert (_only().status, "does not compute" in _only().reason) == ("exporter", True)


def test_a_constant_that_is_no_parameter_is_told_where_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "before"
        graph.node.append(onnx.helper.make_node("Add", ["before", "table"], ["scores"]))
        graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 1e-6, np.float32), "table"))

    _exporter(monkeypatch, lambda write: _changed(write, shifted))
    outcome = _only()
    assert (outcome.status, outcome.reason) == ("weights", "trains table [4] (Add:1)")


def test_losses_that_are_not_eagers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    train = comparing.Reference._train

    def faster(self: Any, module: nn.Module, frozen: Any) -> Any:
        losses, module = train(self, module, frozen)
        return [value * (1 + step / 1000) for step, value in enumerate(losses)], module

    monkeypatch.setattr(comparing.Reference, "_train", faster)
    outcome = _only()
    assert outcome.status == "losses" and "step 3" in outcome.reason, outcome


def test_what_is_refused_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "before"
        graph.node.append(onnx.helper.make_node("Round", ["before"], ["rounded"]))
        graph.node.append(onnx.helper.make_node("Identity", ["rounded"], ["scores"]))

    monkeypatch.setattr(comparing, "_fault", lambda path, reference: "")
    _exporter(monkeypatch, lambda write: _changed(write, odd))
    assert _only().status == "ArtifactError"


def test_parameters_are_found_turned_joined_split_and_rounded() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 5), nn.Linear(6, 2), nn.Linear(2, 2))
    a, b, c, d = ({n: p.detach().numpy() for n, p in part.named_parameters()} for part in module)
    constants = {
        "turned": a["weight"].T, "joined": np.concatenate([a["bias"], b["bias"]]), "again": a["weight"],
        "left": c["weight"][:, :3], "right": c["weight"][:, 3:], "rounded": b["weight"] * np.float32(1 + 1e-6),
        "table": np.linspace(0, 1, 10, dtype=np.float32), "half": d["weight"] / 2, "d": d["bias"], "c": c["bias"],
    }  # fmt: skip
    found = match(constants, module)
    assert set(found.holders) == {"turned", "joined", "left", "right", "rounded", "d", "c"}
    assert (found.copies, found.absent) == ({"again": "turned"}, ["3.weight"])


@pytest.mark.parametrize("form", FORMS)
def test_forms_compute_the_same(form: str) -> None:
    specimen = next(s for s in FOREIGN if s.module is Images)
    module, given = specimen.build(), specimen.batch()
    other = FORMS[form](module, given)
    torch.testing.assert_close(other(**given), module(**given), rtol=1e-4, atol=1e-5)
    assert any(isinstance(p, nn.BatchNorm2d) for p in other.modules()) == (form == "")
    assert all(p.requires_grad for p in other.parameters())


def test_a_walk_goes_on_where_the_results_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(write: Any) -> Any:
        return lambda opset, path: os._exit(3) if opset == 21 else write(opset, path)

    _exporter(monkeypatch, dies)
    monkeypatch.setitem(EXPORTERS, HELPER, dataclasses.replace(EXPORTERS[HELPER], opsets=(20, 21)))
    monkeypatch.setattr(exported, "PAGE", tmp_path / "page.md")
    given = ["--only", "perceptron by onnx.helper", "--exporters", HELPER, "--results", str(tmp_path / "walk.jsonl")]
    assert exported.main(given) == 1
    assert exported.main([*given, "--page"]) == 1
    said = capsys.readouterr().out
    assert said.count("crash  ") == 1 and said.count("1 of 2 pass, 1 fail") == 2
    assert "| perceptron by onnx.helper | 20 **fails: 21** |" in (tmp_path / "page.md").read_text()


def test_of_each_kind_of_failure_the_smallest_is_named() -> None:
    refused, other = "the type of val_7 is not known", "there is no y"
    rows = [("a", "GraphError", refused, 9), ("b", "GraphError", refused.replace("7", "31"), 4)]
    rows += [("c", "GraphError", other, 5), ("d", "losses", "x is 1", 8), ("e", "losses", "y is 2", 3)]
    failed = [Outcome(m, "dynamo", 20, status, reason, 20, nodes) for m, status, reason, nodes in rows]
    assert sorted(o.model for o in exported._smallest(failed)) == ["b", "c", "e"]


def test_the_page_says_what_was_asked_and_written() -> None:
    outcomes = [
        Outcome("a", "dynamo", 0, "pass", "1e-7", 20),
        Outcome("a", "dynamo", 13, "pass", "1e-7", 18, notes=("lengths are fixed",)),
        Outcome("a", "dynamo", 21, "losses", "x | y", 21),
        Outcome("b", "dynamo", 13, "exporter", "it cannot"),
    ]
    text = exported_page.text({(o.model, o.exporter, o.opset): o for o in outcomes}, ["timm"], [("c", "dynamo", 13)])
    assert "**2 of 3 models that were written pass, of 2 architectures.**" in text and "Not installed: timm." in text
    assert "1 of dynamo were not walked yet." in text
    assert "| a | default (20) 13→18 **fails: 21** |" in text and "| b | – |" in text
    assert "| losses: x / y | dynamo | 21 | a |" in text and "| it cannot | dynamo | 13 | b |" in text
    assert "| lengths are fixed | dynamo | 13→18 | a |" in text


def test_the_catalogue_is_wide() -> None:
    assert len(SPECIMENS) >= 25 and {"torch", "transformers"} <= {s.library for s in SPECIMENS.values()}


def test_the_smallest_part_that_fails_is_found_and_shown() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    whole (float[n, 4] x) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}, float[4] v = {1, 2, 3, 4}>
    { a = Mul (x, w)  b = Tanh (a)  c = Round (b)  d = Mul (c, v)  y = Exp (d) }
    """
    whole = onnx.parser.parse_model(text)
    part = shrinking.smallest(whole, lambda m: any(n.op_type == "Round" for n in m.graph.node))
    assert [n.op_type for n in part.graph.node] == ["Round"]
    assert [i.name for i in part.graph.input] == ["b"] and not part.graph.initializer
    part = shrinking.smallest(whole, lambda m: {"Tanh", "Mul"} <= {n.op_type for n in m.graph.node})
    assert [n.op_type for n in part.graph.node] == ["Mul", "Tanh"]
    assert shrinking.failure(part) is None
    text = shrinking.program(part, "it fails")
    assert "# it fails" in text and "b = Tanh (a)" in text
    compile(text, "repeated", "exec")
