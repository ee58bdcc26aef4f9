"""Graph → TrainingGraph: differentiate an ONNX forward pass by reverse accumulation."""

from onnxtrain.gradient.build import build_gradient, tracked_outputs, undifferentiable
from onnxtrain.gradient.registry import Context, gradient

__all__ = ["Context", "build_gradient", "gradient", "tracked_outputs", "undifferentiable"]
