"""Where onnxruntime-training had the registry of custom gradients: the same names, so that imports move over."""

from onnxtrain.gradient import register_custom_stop_gradient_edges, register_gradient

__all__ = ["register_custom_stop_gradient_edges", "register_gradient"]
