"""Benchmarks: eager, torch.compile and onnxtrain on the same batches, step by step in turn, in one process."""
