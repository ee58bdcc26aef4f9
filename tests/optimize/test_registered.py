from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch

from onnxtrain.errors import GraphError
from onnxtrain.ortmodule import ORTModule, register_graph_optimizer, unregister_graph_optimizer

calls: list[list[str]] = []


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    calls.clear()
    function, devices = request.param
    register_graph_optimizer(devices)(function)
    yield
    unregister_graph_optimizer(function)


def tanh_becomes_a_sum(graph: onnx.GraphProto) -> None:
    """Forward: y = 3 x, written with new nodes; the gradient that was built for Tanh is not touched."""
    calls.append([n.op_type for n in graph.node])
    (node,) = (n for n in graph.node if n.op_type == "Tanh")
    node.op_type = "Sum"
    node.input.extend([node.input[0], node.input[0]])


def gradients_are_doubled(graph: onnx.GraphProto) -> None:
    for output in [o.name for o in graph.output if o.name.endswith("_grad")]:
        (node,) = (n for n in graph.node if output in n.output)
        node.output[list(node.output).index(output)] = f"{output}_once"
        graph.node.append(onnx.helper.make_node("Add", [f"{output}_once", f"{output}_once"], [output]))


def an_output_goes(graph: onnx.GraphProto) -> None:
    del graph.output[0]


@pytest.mark.parametrize("registered", [(tanh_becomes_a_sum, None), (tanh_becomes_a_sum, ["cpu"])], indirect=True)
def test_forward_is_rewritten(registered: None) -> None:
    x = torch.randn(3, 4)
    model = ORTModule(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(4, 4)))
    torch.testing.assert_close(model(x), model.module[1](3 * x))
    assert len(calls) == 1


@pytest.mark.parametrize("registered", [(gradients_are_doubled, "cpu")], indirect=True)
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_new_nodes_belong_to_the_backward(registered: None, backend: str) -> None:
    model = ORTModule(torch.nn.Linear(4, 2))
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    found = model.module.weight.grad.clone()
    model.module.weight.grad = None
    model.module(x).square().sum().backward()
    torch.testing.assert_close(found, 2 * model.module.weight.grad)


@pytest.mark.parametrize("registered", [(tanh_becomes_a_sum, "cuda")], indirect=True)
def test_other_devices_are_left_alone(registered: None) -> None:
    ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))(torch.randn(3, 4))
    assert not calls


@pytest.mark.parametrize("registered", [(an_output_goes, None)], indirect=True)
def test_borders_must_stay(registered: None) -> None:
    with pytest.raises(GraphError, match="an_output_goes changed the inputs or outputs"):
        ORTModule(torch.nn.Linear(4, 2))(torch.randn(3, 4))
