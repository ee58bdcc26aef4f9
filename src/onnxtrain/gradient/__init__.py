"""Graph → TrainingGraph: differentiate an ONNX forward pass by reverse accumulation."""

from onnxtrain.gradient.build import build_gradient, gradient_errors, tracked_outputs
from onnxtrain.gradient.registry import Context, gradient

__all__ = ["Context", "build_gradient", "gradient", "gradient_errors", "tracked_outputs"]
