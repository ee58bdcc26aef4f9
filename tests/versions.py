"""Runs the tests of artifacts with the oldest and with the newest releases of what they stand on.

``python tests/versions.py oldest newest`` makes an environment for each, beside ``--folder``, and prints what is in it.
``make versions`` does so with the folder ``build/versions``. Arguments after ``--`` go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = ("ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "safetensors")
TESTS = ["api", "ir", "onnxblock", "misuse", "test_cli.py", "test_adapters.py", "test_blockers.py"]
TESTS += ["test_custom_operators.py", "test_gradient_graphs.py", "test_quantized_weights.py"]
TOOLS = ["pytest>=8", "pytest-xdist>=3.6", "scikit-learn>=1.5", "skl2onnx>=1.18"]


def requirements(oldest: bool) -> list[str]:
    """What pyproject.toml asks for; of the packages that artifacts stand on, the oldest or the newest release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [line.split("#")[0].strip() for line in project["dependencies"]]
    found += project["optional-dependencies"]["onnxruntime"]
    return [_pinned(line) if oldest and re.split(r"[<>=]", line)[0] in NAMED else line for line in found]


def _pinned(requirement: str) -> str:
    """``onnx>=1.20,<2`` as ``onnx==1.20``."""
    return requirement.split(",")[0].replace(">=", "==")


def make(folder: Path, oldest: bool, torch: str) -> Path:
    """An environment; its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    given = [*requirements(oldest), *TOOLS, torch]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", *given]
    subprocess.run(install, check=True)
    return python


def main() -> int:
    """Run the tests in each environment; 1 where some fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="+", choices=("oldest", "newest"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--torch", default="torch==2.13.0", help="the PyTorch that tests compare with")
    arguments, more = parser.parse_known_args()
    failed = False
    for which in arguments.which:
        python = make(arguments.folder.resolve() / which, which == "oldest", arguments.torch)
        show = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
        subprocess.run([python, "-c", show, *NAMED, "torch"], check=True)
        tests = [str(path) for name in TESTS if (path := ROOT / "tests" / name).exists()]
        paths = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        chosen = more[1:] if more[:1] == ["--"] else more
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests, *chosen]
        failed |= subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
