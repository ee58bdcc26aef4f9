"""The core needs neither torch nor onnxruntime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CORE = ["onnxtrain", "onnxtrain.compiler", "onnxtrain.gradient", "onnxtrain.optimize", "onnxtrain.plan"]
CORE += ["onnxtrain.ir.builder", "onnxtrain.ir.verify", "onnxtrain.ir.printer", "onnxtrain.ir.functions"]
CORE += ["onnxtrain.ir.standard_form"]


@pytest.mark.parametrize("blocked", ["torch", "onnxruntime"])
def test_core_imports_without(blocked: str) -> None:
    program = f"import sys; sys.modules[{blocked!r}] = None\n" + "\n".join(f"import {m}" for m in CORE)
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("blocked", ["torch", "onnxruntime"])
def test_names_that_need_no_torch(blocked: str) -> None:
    program = f"import sys; sys.modules[{blocked!r}] = None\n"
    program += "from onnxtrain import PropagateCastOpsStrategy, is_ortmodule_available, Options\n"
    program += f"assert is_ortmodule_available() is ({blocked!r} != 'torch')\n"
    program += "Options(propagate_cast_ops_strategy=PropagateCastOpsStrategy.INSERT_AND_REDUCE)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_resolve() -> None:
    import onnxtrain

    assert all(getattr(onnxtrain, name) is not None for name in onnxtrain.__all__)
    assert set(onnxtrain.__all__) <= set(dir(onnxtrain))
    with pytest.raises(AttributeError, match="nothing"):
        _ = onnxtrain.nothing


TRAINING_NEEDS = ["numpy", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "safetensors", "ml_dtypes", "sympy"]
THEIR_NEEDS = ["coloredlogs", "flatbuffers", "google", "humanfriendly", "mpmath", "packaging", "typing_extensions"]
ARTIFACTS = """
import sys

ALLOWED = {"onnxtrain", "digits", *sys.stdlib_module_names, *%r}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import digits
import onnxtrain.api, onnxtrain.artifacts
from onnxtrain import cli

paths = onnxtrain.artifacts.generate_artifacts(
    digits.network(),
    loss=onnxtrain.artifacts.LossType.CrossEntropyLoss,
    optimizer=onnxtrain.artifacts.OptimType.AdamW,
    artifact_directory=sys.argv[1],
)
np.savez(sys.argv[1] + "/data.npz", image=np.eye(10, 64, dtype=np.float32), labels=np.arange(10))
assert cli.main(["train", sys.argv[1], "--data", sys.argv[1] + "/data.npz", "--epochs", "2"]) == 0
assert cli.main(["export", sys.argv[1], sys.argv[1] + "/model.onnx"]) == 0
"""


def test_training_artifacts_need_no_more_than_a_device_has(tmp_path: Path) -> None:
    program = ARTIFACTS % [*TRAINING_NEEDS, *THEIR_NEEDS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment)
    assert (tmp_path / "model.onnx").exists()
