"""Models in onnxruntime's own format, by the tool's signature and names of files."""

from __future__ import annotations

import logging
from pathlib import Path

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.artifacts import LossType, OptimizationStyle, convert_onnx_models_to_ort, generate_artifacts
from onnxtrain.errors import ArtifactError

ROWS = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)


def scores(path: Path, **options: str) -> np.ndarray:
    chosen = ort.SessionOptions()
    for key, value in options.items():
        chosen.add_session_config_entry(key.replace("__", "."), value)
    session = ort.InferenceSession(path, chosen, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": ROWS})[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The network, whose dropout does nothing, in a folder of a folder."""
    proto = digits.network()
    ratio = next(n for n in proto.graph.node if n.output[0] == "ratio")
    ratio.attribute[0].f = 0.0
    (tmp_path / "in" / "deep").mkdir(parents=True)
    onnx.save(proto, tmp_path / "in" / "deep" / "digits.onnx")
    return tmp_path / "in" / "deep" / "digits.onnx"


def test_a_folder_is_converted(model: Path, tmp_path: Path) -> None:
    made = convert_onnx_models_to_ort(
        tmp_path / "in",
        output_dir=tmp_path / "out",
        optimization_styles=[*OptimizationStyle],
        save_optimized_onnx_model=True,
        enable_type_reduction=True,
    )
    assert [p.relative_to(tmp_path / "out").as_posix() for p in made] == [
        "deep/digits.ort",
        "deep/digits.with_runtime_opt.ort",
    ]
    for path in made:
        np.testing.assert_allclose(scores(path), scores(model), rtol=1e-5, atol=1e-6)
        onnx.checker.check_model(path.with_suffix(".optimized.onnx"))
    needed = (tmp_path / "out" / "required_operators_and_types.config").read_text()
    assert "ai.onnx;" in needed and "Gemm" in needed and "float" in needed
    assert (tmp_path / "out" / "required_operators_and_types.with_runtime_opt.config").exists()


def test_files_go_beside_the_model(model: Path) -> None:
    (made,) = convert_onnx_models_to_ort(str(model))
    assert made == model.with_suffix(".ort")
    assert (model.parent / "digits.required_operators.config").exists()


def test_dropout_still_drops(tmp_path: Path) -> None:
    path = tmp_path / "digits.onnx"
    onnx.save(digits.network(), path)
    (made,) = convert_onnx_models_to_ort(path)
    session = ort.InferenceSession(made, providers=["CPUExecutionProvider"], disabled_optimizers=["EliminateDropout"])
    first, second = (session.run(None, {"image": ROWS})[0] for _ in range(2))
    assert (first != second).any()


def test_what_cannot_be_converted_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ArtifactError, match=r"is no \.onnx file"):
        convert_onnx_models_to_ort(tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(ArtifactError, match="cannot be converted"):
        convert_onnx_models_to_ort(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert convert_onnx_models_to_ort(tmp_path, allow_conversion_failures=True) == []
    assert "broken.onnx cannot be converted" in caplog.text


def test_artifacts_have_twins(tmp_path: Path) -> None:
    files = generate_artifacts(
        digits.network(), loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path, ort_format=True
    )
    assert files["training_model.ort"].read_bytes()[4:8] == b"ORTM"
