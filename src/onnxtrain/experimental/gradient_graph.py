"""The loss of a torch module, its outputs and its gradients as one ``.onnx`` file, for any runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture import Captured, capture
from onnxtrain.errors import CaptureError
from onnxtrain.gradient_graphs import gradient_graph
from onnxtrain.options import OPSETS
from onnxtrain.portable import save, to_proto, write_atomically


class _WithLoss(torch.nn.Module):
    """A module that gives its output and its loss; parameters and buffers have the names of the module's own."""

    _original: torch.nn.Module
    _loss: Callable[[Any, Any], Any]

    def __init__(self, module: torch.nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        own = self.__dict__
        own["_original"], own["_loss"], own["training"] = module, loss, module.training
        for name in ("_parameters", "_buffers", "_modules"):
            own[name] = getattr(module, name)

    def forward(self, given: Any, labels: Any) -> tuple[Any, Any]:
        """The module's output, and the loss of it."""
        output = self._original(given)
        return output, self._loss(output, labels)


def export_gradient_graph(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = 20,
    *,
    intermediate_graph_path: str | os.PathLike[str] | None = None,
    input_names: Sequence[str] = ("input", "labels"),
    output_names: Sequence[str] = ("output", "loss"),
) -> None:
    """Write a model that computes output, loss and the gradient of the loss by the parameters.

    Its inputs are the input, the labels and all parameters under their own names, so that any program can keep and
    change them; its outputs are the output, the loss and ``{parameter}_grad`` of each parameter that requires a
    gradient. Buffers are constants. Sizes may be others than those of the examples. The module's mode says what dropout
    and BatchNorm do.

    Args:
        model: the module; it takes one tensor and gives one.
        loss_fn: the loss, a scalar, of the output and the labels; a function or a module.
        example_input: an input.
        example_labels: labels for it.
        gradient_graph_path: the file.
        opset_version: of the graph; where it is not one that graphs have, 20 or 21, the closest.
        intermediate_graph_path: also write output and loss without gradients.
        input_names: of the input and of the labels.
        output_names: of the output and of the loss.

    Raises:
        CaptureError: the module or the loss cannot be captured, gives several tensors, or no parameter is trained.
        GradientError: the loss cannot be differentiated.
    """
    wrapped = _WithLoss(model, loss_fn)
    captured = capture(
        wrapped, (example_input, example_labels), {}, opset=min(max(opset_version, OPSETS[0]), OPSETS[-1])
    )
    graph = _forward(captured, model, input_names, output_names)
    wanted = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not wanted:
        raise CaptureError("no parameter of the model requires a gradient", cure="model.requires_grad_(True)")
    if intermediate_graph_path is not None:
        save(ir.from_proto(to_proto(graph)), Path(intermediate_graph_path))
    made = gradient_graph(graph, wrt=wanted, outputs=output_names[1])
    write_atomically(Path(gradient_graph_path), made.SerializeToString())


def _forward(
    captured: Captured, module: torch.nn.Module, input_names: Sequence[str], output_names: Sequence[str]
) -> ir.Model:
    """The captured graph with these names; buffers are its initializers, and what they become is left out."""
    signature, graph = captured.graph.signature, captured.graph.model.graph
    if len(captured.sources) != 2 or len(signature.user_inputs) != 2:
        raise CaptureError("model and loss give more than one tensor each", cure="take one input, give one output")
    kept = [graph.outputs[i] for i in captured.sources]
    graph.outputs[:] = kept
    for value, name in zip(kept, output_names, strict=True):
        value.name = name
    given = {str(v.name): v for v in graph.inputs}
    for old, name in zip(signature.user_inputs, input_names, strict=True):
        given[old].name = name
    borrowed = {n: t if isinstance(t, torch.Tensor) else t.of(module) for n, t in captured.borrowed.items()}
    contents = dict(module.named_buffers()) | borrowed
    for name in signature.buffers:
        content = contents[name].detach().cpu().numpy()
        given[name].const_value = ir.tensor(content, name=name)
        graph.inputs.remove(given[name])
        graph.register_initializer(given[name])
    _name_parameters(graph, module)
    return captured.graph.model


def _name_parameters(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Every parameter is an input, also one that nothing reads."""
    known = {v.name for v in graph.inputs}
    for name, parameter in module.named_parameters():
        if name not in known:
            dtype = ir.DataType.from_numpy(parameter.detach().cpu().numpy().dtype)
            graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(parameter.shape))))
