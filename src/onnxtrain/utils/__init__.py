"""What goes around training: nested data by schema, hooks that watch a model, samplers that balance batches."""

from onnxtrain.utils.nested_data import extract_data_and_schema, unflatten_data_using_schema

__all__ = ["extract_data_and_schema", "unflatten_data_using_schema"]
