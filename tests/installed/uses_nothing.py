"""The core alone: its command line, and training artifacts, without PyTorch and onnxruntime."""

import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import model

import onnxtrain
from onnxtrain import artifacts

COMMAND = Path(sys.executable).with_name("onnxtrain")
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("onnxruntime") is None
for command in (["--version"], ["ops"], ["--help"]):
    said = subprocess.run([COMMAND, *command], capture_output=True, text=True, check=True)
    assert said.stdout.strip(), command
said = subprocess.run([COMMAND, "doctor"], capture_output=True, text=True)
assert said.returncode < 2 and "torch" in said.stdout, said.stdout + said.stderr  # 1: something is missing
model.write("model.onnx")
artifacts.generate_artifacts("model.onnx", loss=artifacts.LossType.CrossEntropyLoss, artifact_directory="run")
assert Path("run/training_model.onnx").exists()
print(f"onnxtrain {onnxtrain.__version__} makes training artifacts")
