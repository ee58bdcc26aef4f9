"""The core needs neither torch nor onnxruntime."""

from __future__ import annotations

import subprocess
import sys

import pytest

CORE = ["onnxtrain", "onnxtrain.compiler", "onnxtrain.gradient", "onnxtrain.optimize", "onnxtrain.plan"]
CORE += ["onnxtrain.ir.builder", "onnxtrain.ir.verify", "onnxtrain.ir.printer", "onnxtrain.ir.functions"]


@pytest.mark.parametrize("blocked", ["torch", "onnxruntime"])
def test_core_imports_without(blocked: str) -> None:
    program = f"import sys; sys.modules[{blocked!r}] = None\n" + "\n".join(f"import {m}" for m in CORE)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_resolve() -> None:
    import onnxtrain

    assert all(getattr(onnxtrain, name) is not None for name in onnxtrain.__all__)
    assert set(onnxtrain.__all__) <= set(dir(onnxtrain))
    with pytest.raises(AttributeError, match="nothing"):
        _ = onnxtrain.nothing
