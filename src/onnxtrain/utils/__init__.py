"""What goes around training: nested data by schema, hooks that watch a model, samplers that balance batches."""

from onnxtrain.utils.element_types import (
    onnx_dtype_to_pytorch_dtype,
    pytorch_scalar_type_to_pytorch_dtype,
    pytorch_type_to_onnx_dtype,
)
from onnxtrain.utils.nested_data import (
    ORTModelInputOutputSchemaType,
    ORTModelInputOutputType,
    PrimitiveType,
    extract_data_and_schema,
    unflatten_data_using_schema,
)
from onnxtrain.utils.profiling import (
    log_memory_usage,
    nvtx_function_decorator,
    torch_nvtx_range_pop,
    torch_nvtx_range_push,
)
from onnxtrain.utils.text_table import PTable

__all__ = [
    "ORTModelInputOutputSchemaType",
    "ORTModelInputOutputType",
    "PTable",
    "PrimitiveType",
    "extract_data_and_schema",
    "log_memory_usage",
    "nvtx_function_decorator",
    "onnx_dtype_to_pytorch_dtype",
    "pytorch_scalar_type_to_pytorch_dtype",
    "pytorch_type_to_onnx_dtype",
    "torch_nvtx_range_pop",
    "torch_nvtx_range_push",
    "unflatten_data_using_schema",
]
