"""A torch module, its loss and its gradients as one file that the ordinary onnxruntime runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain.errors import CaptureError
from onnxtrain.experimental import export_gradient_graph


class Net(torch.nn.Module):
    """A frozen layer, one with statistics, one that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
        self.unused = torch.nn.Linear(2, 2).requires_grad_(False)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


def run(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_output_loss_and_gradients_are_eager(tmp_path: Path, training: bool) -> None:
    module, loss_fn = Net().train(training), torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    paths = tmp_path / "gradient.onnx", tmp_path / "forward.onnx"
    example = torch.randn(4, 6), torch.randint(3, (4,))
    export_gradient_graph(module, loss_fn, *example, paths[0], intermediate_graph_path=paths[1])
    onnx.checker.check_model(onnx.load(paths[0]), full_check=True)
    x, labels = torch.randn(7, 6), torch.randint(3, (7,))  # another size than the example's
    parameters = {n: p.detach().numpy() for n, p in module.named_parameters()}
    names = [v.name for v in onnx.load(paths[0]).graph.input]
    assert names[:2] == ["input", "labels"] and sorted(names[2:]) == sorted(parameters)
    feeds = {"input": x.numpy(), "labels": labels.numpy()} | parameters
    found = run(paths[0], feeds)
    output = module(x)
    loss = loss_fn(output, labels)
    loss.backward()
    wanted = {f"{n}_grad": p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    wanted |= {"output": output.detach().numpy(), "loss": loss.detach().numpy()}
    assert found.keys() == wanted.keys() == {"output", "loss", *(f"{n}_grad" for n in parameters if n[0] in "nh")}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert run(paths[1], feeds).keys() == {"output", "loss"}


def test_names_and_the_place_of_the_opset_are_the_callers(tmp_path: Path) -> None:
    path, module = tmp_path / "gradient.onnx", torch.nn.Linear(3, 2)
    names = {"input_names": ("x", "y"), "output_names": ("scores", "distance")}
    export_gradient_graph(module, torch.nn.functional.mse_loss, torch.ones(2, 3), torch.zeros(2, 2), path, 12, **names)
    graph = onnx.load(path).graph
    assert [v.name for v in graph.input] == ["x", "y", "weight", "bias"]
    assert [v.name for v in graph.output] == ["scores", "distance", "weight_grad", "bias_grad"]


def test_what_cannot_be_is_an_error(tmp_path: Path) -> None:
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    given = torch.ones(2, 3), torch.zeros(2, 2), tmp_path / "gradient.onnx"
    with pytest.raises(CaptureError, match="no parameter"):
        export_gradient_graph(frozen, torch.nn.functional.mse_loss, *given)
    with pytest.raises(CaptureError, match="more than one tensor"):
        export_gradient_graph(torch.nn.Linear(3, 2), lambda y, t: (y.sum(), t.sum()), *given)
    assert not given[2].exists()
