"""TrainingGraph → Plan: what is computed when, and what is kept in between."""

from onnxtrain.plan.partition import make_plan, partition

__all__ = ["make_plan", "partition"]
