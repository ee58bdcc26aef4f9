"""Packages around training: hooks that watch a model, samplers that balance batches."""
