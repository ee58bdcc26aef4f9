"""The graph of tiny models after each stage, as text: a change shows as a difference to read.

``make golden`` writes the files again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onnxtrain.compiler import Report, capture_module, compile_graph
from onnxtrain.ir.printer import to_text
from onnxtrain.options import Options

FOLDER = Path(__file__).parent


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return torch.nn.functional.cross_entropy(logits, labels)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(x.shape[0], x.shape[1], 6, 4).transpose(1, 2).split(2, 1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).mean()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (Mlp, lambda: (torch.randn(3, 4), torch.randint(0, 3, (3,)))),
    "attention": (Attention, lambda: (torch.randn(2, 5, 8),)),
    "convolution": (Convolution, lambda: (torch.randn(2, 3, 8, 8),)),
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the files are of torch 2.13's exporter")
@pytest.mark.parametrize("name", list(MODELS))
def test_stages(name: str, request: pytest.FixtureRequest) -> None:
    build, example = MODELS[name]
    options, report = Options(backend="torch"), Report()
    captured = capture_module(build(), example(), {}, options, report)
    signature = captured.graph.signature
    compiled = compile_graph(captured.graph, signature.parameters, signature.outputs, options, report)
    assert compiled.training is not None
    stages = {
        "optimized": to_text(compiled.forward.model, title=f"{name}, optimized"),
        "training": to_text(compiled.training.model, title=f"{name}, training", saved=compiled.plan.saved),
        "forward": compiled.executable.source("forward"),
        "backward": compiled.executable.source("backward"),
    }
    text = "\n".join(f"==== {stage} ====\n{content}" for stage, content in stages.items())
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--regenerate-golden"):
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} changed; if that is meant: make golden"
