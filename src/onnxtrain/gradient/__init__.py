"""Graph → TrainingGraph: differentiate an ONNX forward pass by reverse accumulation."""

from onnxtrain.gradient.again import gradients_as_outputs
from onnxtrain.gradient.build import build_gradient, gradient_errors, undifferentiable
from onnxtrain.gradient.flow import origins_of_outputs, tracked_outputs
from onnxtrain.gradient.inner import write_out_inner
from onnxtrain.gradient.node_lists import register_custom_stop_gradient_edges, register_gradient
from onnxtrain.gradient.registry import Context, gradient, registered_by_users

__all__ = [
    "Context",
    "build_gradient",
    "gradient",
    "gradient_errors",
    "gradients_as_outputs",
    "origins_of_outputs",
    "register_custom_stop_gradient_edges",
    "register_gradient",
    "registered_by_users",
    "tracked_outputs",
    "undifferentiable",
    "write_out_inner",
]
