"""Mixed precision: what scales the loss, so that small gradients are no zeros in half precision."""

from onnxtrain.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
