"""What older releases of onnx and onnxruntime cannot do: tests that need it are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnxruntime as ort
import pytest

HAS = tuple(int(part) for part in ort.__version__.split(".")[:2])


def needs_release(release: str, why: str) -> None:
    """Skip the test on an onnxruntime older than this one, the first that is known to do it."""
    if tuple(int(part) for part in release.split(".")) > HAS:
        pytest.skip(f"onnxruntime {ort.__version__}: {why}")


def needs_tensors_over_dlpack(backend: str) -> None:
    """Skip the test of the backend on an onnxruntime that takes no tensors over DLPack."""
    if backend == "onnxruntime" and not hasattr(ort.OrtValue, "from_dlpack"):
        needs_release("1.26", "it takes no tensors over DLPack")


def needs_opset(opset: int) -> None:
    """Skip the test on an onnx that does not know this opset, or an onnxruntime that reads no model of it."""
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"onnx {onnx.__version__} does not know opset {opset}")
    text = f'<ir_version: {13 if opset > 24 else 10}, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) '
    try:
        ort.InferenceSession(onnx.parser.parse_model(text + "{ y = Neg (x) }").SerializeToString())
    except Exception as error:  # onnxruntime raises many types
        pytest.skip(f"onnxruntime {ort.__version__} reads no model of opset {opset}: {str(error)[:80]}")


def needs_attributes(op: str, names: Iterable[str]) -> None:
    """Skip the test on an onnx whose Attention has no such attribute; other operators have some that are ours."""
    if op == "Attention" and (missing := set(names) - set(onnx.defs.get_schema(op).attributes)):
        pytest.skip(f"onnx {onnx.__version__}: {op} has no {sorted(missing)[0]}")
