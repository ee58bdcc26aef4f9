"""The smaller names of ``onnxruntime.training.utils``."""

from __future__ import annotations

import logging

import onnx
import pytest
import torch

from onnxtrain import utils
from onnxtrain.errors import BackendError, UnsupportedDataError


def test_element_types_both_ways() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        assert utils.onnx_dtype_to_pytorch_dtype(utils.pytorch_type_to_onnx_dtype(dtype)) is dtype
    assert utils.pytorch_type_to_onnx_dtype("Half") == onnx.TensorProto.FLOAT16
    assert utils.pytorch_scalar_type_to_pytorch_dtype("Long") is torch.int64


def test_unknown_element_types_are_errors() -> None:
    with pytest.raises(BackendError, match="STRING"):
        utils.onnx_dtype_to_pytorch_dtype(onnx.TensorProto.STRING)
    with pytest.raises(BackendError, match="qint8"):
        utils.pytorch_type_to_onnx_dtype(torch.qint8)
    with pytest.raises(UnsupportedDataError, match="Flaot"):
        utils.pytorch_type_to_onnx_dtype("Flaot")


@pytest.mark.parametrize(("value", "dtype"), [(True, torch.bool), (3, torch.int64), (0.5, torch.float32)])
def test_primitive_types(value: float, dtype: torch.dtype) -> None:
    assert utils.PrimitiveType.is_primitive_type(value)
    tensor = utils.PrimitiveType.get_tensor(value)
    assert tensor.dtype is dtype and tensor.item() == value and tensor.shape == ()


def test_what_is_not_primitive() -> None:
    assert not any(map(utils.PrimitiveType.is_primitive_type, ("a", None, torch.tensor(1), [1])))


def test_table() -> None:
    table = utils.PTable(sortable=True)
    table.add_row(["second", 2, "b"])
    notes = utils.PTable()
    notes.add_row(["a note"])
    table.add_row(["first", 10]).append_annotation_table(notes)
    assert table.get_string() == "first   10\n  a note\nsecond  2   b"
    assert table.get_string(8, 4).splitlines()[-1] == "second    2     b"


def test_memory_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(1024, 512, bias=False)
    logger = logging.getLogger("memory")
    with caplog.at_level(logging.INFO, "memory"):
        utils.log_memory_usage("pre_forward", step_info="step 3", logger=logger, module=module)
        monkeypatch.setenv("RANK", "1")
        utils.log_memory_usage("pre_forward", logger=logger)
    (line,) = caplog.messages
    assert line.startswith("rank-0 step 3 memory (pre_forward) | ") and "parameters 2 MiB" in line


def test_ranges_leave_functions_as_they_are() -> None:
    @utils.nvtx_function_decorator
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(3) == 6 and double.__doc__ == "Twice."
