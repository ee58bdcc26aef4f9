"""``onnxtrain doctor``: what is here, what is missing, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from onnxtrain.cli import doctor, main

_VERSION = importlib.metadata.version
_TORCH = _VERSION("torch")  # which names no build, as ``torch.__version__`` does


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def _found(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    status, text = _told(capsys, "--json")
    return status, {f["name"]: f for f in json.loads(text)}


def _with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Other versions of packages; None where one is not installed."""

    def version(package: str) -> str:
        found = versions.get(package.replace("-", "_"), "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found or _VERSION(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_machine_on_which_all_works(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _told(capsys)
    assert status == 0 and "!" not in text
    assert [line for line in text.splitlines() if line and line[0] not in " -!"] == [
        *("machine", "packages", "devices", "compilers", "settings")
    ]
    assert onnxtrain.__version__ in text and _TORCH in text


def test_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _found(capsys)
    assert status == 0
    assert found["torch"]["found"] == _TORCH and not found["torch"]["problem"]
    assert {"numpy", "onnx", "onnxruntime", "transformers", "CPU", "C++", "graph cache"} <= found.keys()


def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _with_versions(monkeypatch, onnx="1.14.0")
    status, text = _told(capsys)
    assert status == 1
    assert "! onnx                     1.14.0" in text and "pip install 'onnx" in text


def test_an_extra_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is wrong then: a feature is missing, and how to get it is said."""
    _with_versions(monkeypatch, transformers=None, accelerate=None)
    status, text = _told(capsys)
    assert status == 0
    assert "- transformers             not installed" in text and "pip install 'onnxtrain[transformers]'" in text


def test_an_extra_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _with_versions(monkeypatch, torch="2.4.0")
    status, found = _found(capsys)
    assert status == 1 and "torch>=2.11" in found["torch"]["problem"]


def test_an_onnxruntime_that_only_trains_artifacts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_versions(monkeypatch, onnxruntime="1.22.0")
    status, text = _told(capsys)
    assert status == 0 and 'Options(backend="onnxruntime") of ORTModule needs onnxruntime>=1.26' in text


def test_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(b"x" * 2**20)
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ORTMODULE_CASHE_DIR", "elsewhere")
    status, found = _found(capsys)
    assert status == 0 and found["graph cache"]["found"] == f"{tmp_path}: 1 files, 1.0 MiB"
    assert found["ORTMODULE_CASHE_DIR"]["problem"] == "there is no such variable: nothing reads it"
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "new")
    status, found = _found(capsys)
    assert status == 1 and "ORTMODULE_ONNX_OPSET_VERSION" in found["options"]["problem"]


def test_a_source_tree_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(package: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert {f.part for f in doctor.examined()} == {"machine", "devices", "compilers", "settings"}
