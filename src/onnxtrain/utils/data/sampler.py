"""The samplers under the module's name that ``onnxruntime.training.utils.data`` had."""

from onnxtrain.utils.data.samplers import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
