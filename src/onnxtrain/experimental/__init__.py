"""What ``onnxruntime.training.experimental`` had: the gradient of a torch module's loss as an ``.onnx`` file."""

from onnxtrain.experimental.gradient_graph import export_gradient_graph

__all__ = ["export_gradient_graph"]
