"""Graphs as drawings: every node and every value that goes from one to another is there, once."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import ORTModule
from onnxtrain.errors import ModuleError


class Net(nn.Module):
    """A sum of two ways from one value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.out(y.tanh() + y.sigmoid()).square().mean()


@pytest.fixture(scope="module")
def model() -> ORTModule:
    made = ORTModule(Net())
    made(torch.randn(3, 4)).backward()
    return made


def test_dot_has_all_of_the_graph(model: ORTModule) -> None:
    text = model.graph("captured", "dot")
    labels = dict(re.findall(r'^  (\w+) \[label="(.*?)"', text, re.M))
    edges = re.findall(r'^  (\w+) -> (\w+) \[label="(.*?)"', text, re.M)
    kinds = [label.partition("\\n")[0] for key, label in labels.items() if key.startswith("n")]
    assert kinds == ["Linear", "Tanh", "Sigmoid", "Add", "Linear", "Pow", "ReduceMean"]
    named = [(labels[a].partition("\\n")[0], labels[b].partition("\\n")[0]) for a, b, _ in edges]
    assert {("x", "Linear"), ("linear.weight", "Linear"), ("Linear", "Tanh"), ("Linear", "Sigmoid")} <= {*named}
    assert {("Tanh", "Add"), ("Sigmoid", "Add"), ("Add", "Linear")} <= {*named}
    assert len({*edges}) == len(edges) and all(a in labels and b in labels for a, b, _ in edges)
    assert any("test_drawing.py:" in label for label in labels.values())


def test_the_backward_pass_is_told_apart_and_saved_values_are_bold(model: ORTModule) -> None:
    text = model.graph("training", "dot")
    assert "fillcolor" in text and "style=bold" in text
    flow = model.graph("training", "mermaid")
    assert "[[" in flow and "==>" in flow and flow.startswith("flowchart TD\n")


def test_mermaid_has_the_same_nodes_and_edges(model: ORTModule) -> None:
    dot, flow = model.graph("training", "dot"), model.graph("training", "mermaid")
    drawn = re.findall(r"^  (\w+) -> (\w+) ", dot, re.M)
    assert re.findall(r"^  (\w+) (?:-->|==>)\|.*?\| (\w+)$", flow, re.M) == drawn
    assert re.findall(r"^  (\w+)[\[(]", flow, re.M) == re.findall(r"^  (\w+) \[label=", dot, re.M)


def test_graphviz_reads_it(model: ORTModule) -> None:
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    run = subprocess.run(["dot", "-Tplain"], input=model.graph("training", "dot"), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_another_form_is_an_error(model: ORTModule) -> None:
    with pytest.raises(ModuleError, match="'mermaid'"):
        model.graph("captured", "png")
