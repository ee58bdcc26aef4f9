"""The backward pass is cut where little is alive, and each gradient is in one part."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxtrain import Options
from onnxtrain.compiler import Report, capture_module, compile_graph
from onnxtrain.ir.graphs import Plan, Segment
from onnxtrain.ir.parts import merged
from onnxtrain.plan.segments import reads_in_parts

WIDTH = 4


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Dense(nn.Module):
    """Every layer reads all of those before it: no place is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * i, WIDTH) for i in range(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(torch.cat(seen, -1))))
        return seen[-1]


class Tied(nn.Module):
    """The first weight is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.second(torch.tanh(self.first(x)))), self.first.weight)


def planned(module: nn.Module) -> Plan:
    """The plan of a training step of a module that takes rows of four numbers."""
    options, report = Options(), Report()
    graph = capture_module(module, (torch.randn(3, WIDTH),), {}, options, report).graph
    names = graph.signature.parameters
    return compile_graph(graph, names, graph.signature.outputs, options, report).plan


@pytest.mark.parametrize(
    ("build", "count"), [(lambda: nn.Linear(WIDTH, 1), 1), (lambda: nn.Sequential(*(Block() for _ in range(5))), 5)]
)
def test_a_residual_block_is_a_segment(build: Callable[[], nn.Module], count: int) -> None:
    segments = planned(build()).segments
    owners = [{name.partition(".")[0] for name in s.gradients} for s in segments]
    assert len(segments) == count
    if count > 1:
        assert owners == [{str(i)} for i in reversed(range(count))]


@pytest.mark.parametrize("build", [Dense, Tied, lambda: nn.Conv1d(3, 3, 1)])
def test_each_gradient_and_each_node_is_in_one_segment(build: Callable[[], nn.Module]) -> None:
    plan = planned(build())
    assert plan.backward is not None
    assert sorted(n for s in plan.segments for n in s.gradients) == sorted(plan.gradients)
    assert sum(s.nodes for s in plan.segments) == len(plan.backward.graph)


def test_a_shared_weight_is_in_the_last_segment() -> None:
    segments = planned(Tied()).segments
    assert segments[0].gradients and "first.weight" in segments[-1].gradients


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_segments_are_merged_by_their_nodes(most: int) -> None:
    segments = [Segment((str(i),), nodes) for i, nodes in enumerate((1, 1, 1, 9, 2, 2, 2, 6))]
    groups = merged(segments, most)
    assert [s for group in groups for s in group] == segments
    assert len(groups) == min(most, len(segments)) or most == 100
    assert max(sum(s.nodes for s in group) for group in groups) <= 24 / most + 9


def test_inference_has_none() -> None:
    options, report = Options(), Report()
    graph = capture_module(Tied(), (torch.randn(3, WIDTH),), {}, options, report).graph
    assert compile_graph(graph, (), (), options, report).plan.segments == ()


def test_what_a_forward_graph_reads_in_parts() -> None:
    """A part for each residual block, in their order; a weight that is read again is where it is first."""
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    parts = reads_in_parts(captured(blocks))
    assert [[n for n in part if n != "input"] for part in parts] == [
        [f"{i}.{n}" for n in ("norm.weight", "norm.bias", "inner.weight", "inner.bias", "outer.weight", "outer.bias")]
        for i in range(3)
    ]
    found = [name for part in reads_in_parts(captured(Tied())) for name in part]
    assert found.index("first.weight") < found.index("second.weight")


def captured(module: nn.Module) -> ir.Graph:
    return capture_module(module, (torch.randn(3, WIDTH),), {}, Options(), Report()).graph.model.graph
