"""What is needed of each value, as text, for three small modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onnxtrain.compiler import Report, capture_module
from onnxtrain.optimize.rows import Liveness, text_of, waiting_outputs
from onnxtrain.optimize.rows.demand import Whole
from onnxtrain.options import Options

WIDTH = 8


class Tagger(nn.Module):
    """Labels of tokens after one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 5)

    def mixed(self, ids: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(self.words(ids)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool()).transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.head(self.mixed(ids, mask)).view(-1, 5), labels.view(-1))


class Classifier(Tagger):
    """A class of each sequence, from its first token."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.head(self.mixed(ids, mask)[:, 0]), labels[:, 0])


class Mean(Tagger):
    """A class of each sequence, from the mean of all its tokens."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.head(self.mixed(ids, mask).mean(1)), labels[:, 0])


def demands(module: nn.Module) -> dict[str, str]:
    """For each operator that weights are read by, what is needed of its output."""
    ids = torch.randint(0, 9, (3, 7))
    given = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    graph = capture_module(module, given, {}, Options(), Report()).graph
    signature = graph.signature
    shown = dict.fromkeys(signature.outputs, True)
    assert not waiting_outputs(graph, signature.parameters, shown, ())
    liveness, found = Liveness(graph, signature.parameters, shown), {}
    for node in graph.model.graph:
        if node.domain and node.outputs[0] in liveness.demands:
            demand = liveness.demands[node.outputs[0]]
            place = "all" if isinstance(demand, Whole) else f"{demand.layout}: {text_of(demand.rows)}"
            found[f"{node.op_type} {len(found)}"] = place
    return found


GOLDEN = {
    Tagger: {
        "Embedding 0": "(0, 1): labels != -100, or such a row attends to it",
        "Linear 1": "(0, 1): labels != -100, or such a row attends to it",
        "MaskedScaledDotProductAttention 2": "(0, 2): labels != -100",
        "Linear 3": "(0, 1): labels != -100",
    },
    Classifier: {
        "Embedding 0": "(0, 1): token 0, or such a row attends to it",
        "Linear 1": "(0, 1): token 0, or such a row attends to it",
        "MaskedScaledDotProductAttention 2": "(0, 2): token 0",
        "Linear 3": "all",
    },
    Mean: {
        "Embedding 0": "all",
        "Linear 1": "all",
        "MaskedScaledDotProductAttention 2": "all",
        "Linear 3": "all",
    },
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_demands(kind: type[nn.Module]) -> None:
    assert demands(kind()) == GOLDEN[kind]


def test_what_reads_every_row_is_named() -> None:
    ids = torch.randint(0, 9, (3, 7))
    graph = capture_module(Mean(), (ids, torch.ones_like(ids), torch.zeros_like(ids)), {}, Options(), Report()).graph
    liveness = Liveness(graph, graph.signature.parameters, dict.fromkeys(graph.signature.outputs, True))
    reasons = {d.reason for d in liveness.demands.values() if isinstance(d, Whole)}
    assert any(
        "MaskedScaledDotProductAttention" in r and "reads every row" in r and "test_demand.py" in r for r in reasons
    )
