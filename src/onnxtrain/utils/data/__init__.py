"""Samplers that give the ranks of a distributed run equal work."""

from onnxtrain.utils.data.samplers import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
