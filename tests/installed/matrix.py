"""Installs the built wheel into bare environments, for each Python and PyTorch and each extra, and uses what it brings.

``make matrix`` goes through all cells; ``python tests/installed/matrix.py oldest newest`` through two. A cell is a
Python, a PyTorch and an extra; Pythons that this machine lacks are named and left out. 1 where a cell fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("torch==2.11.0", "torch==2.13.0", "torch")
EXTRAS = ("", "onnxruntime", "torch", "transformers", "demo")  # each has a program of its name beside this file
RESOLVED = ("docs", "dev", "walks")  # of these only whether they can be installed together


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is installed, and with which Python.

    Args:
        python: its version.
        extra: of pyproject.toml, or none.
        torch: the requirement, where the extra has PyTorch.
    """

    python: str
    extra: str
    torch: str = ""

    def __str__(self) -> str:
        extra = f"[{self.extra}]" if self.extra else ""
        return f"Python {self.python}, onnxtrain{extra}{', ' if self.torch else ''}{self.torch}"


def cells(which: str) -> Iterator[Cell]:
    """All of them; or those of the oldest or of the newest Python and PyTorch."""
    if which in ("oldest", "newest"):
        known = [p for p in PYTHONS if interpreter(p)]
        python, torch = (known[0], TORCHES[0]) if which == "oldest" else (known[-1], TORCHES[-1])
        yield from (Cell(python, "onnxruntime"), Cell(python, "torch", torch))
        return
    for python in PYTHONS:
        yield from (Cell(python, ""), Cell(python, "onnxruntime"))
        yield from (Cell(python, "torch", torch) for torch in TORCHES)
    yield from (Cell(PYTHONS[0], extra, TORCHES[1]) for extra in ("transformers", "demo"))
    yield from (Cell(PYTHONS[0], extra) for extra in RESOLVED)


def interpreter(version: str) -> str | None:
    """A Python of a version: this one, one on the path, or one of pyenv's."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    if found := shutil.which(f"python{version}"):
        runs = subprocess.run([found, "--version"], capture_output=True, check=False)
        if runs.returncode == 0:  # pyenv's stand-ins say that no version is chosen
            return found
    made = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(made[-1]) if made else None


def build(folder: Path) -> Path:
    """The wheel, and the source archive beside it, from which it is built."""
    shutil.rmtree(folder, ignore_errors=True)
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    pip(tools, "install", "build")
    subprocess.run([tools / "bin" / "python", "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened, tarfile.open(source) as archive:
        held, archived = opened.namelist(), archive.getnames()
    assert "onnxtrain/py.typed" in held and not [n for n in held if not n.startswith("onnxtrain")], held
    assert any(n.endswith("onnxtrain/py.typed") for n in archived)
    return wheel


def pip(environment: Path, *arguments: str) -> None:
    """Run pip in an environment.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [environment / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)}: {done.stderr.strip()[-600:]}")


def use(cell: Cell, wheel: Path, folder: Path) -> str:
    """Install a cell's wheel, and run its program outside of the repository; what it printed last.

    Raises:
        RuntimeError: it cannot be installed, or the program failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    python = interpreter(cell.python)
    assert python is not None
    subprocess.run([python, "-m", "venv", folder], check=True)
    wanted = f"{wheel}[{cell.extra}]" if cell.extra else str(wheel)
    if cell.extra in RESOLVED:
        pip(folder, "install", "--dry-run", wanted)
        return "can be installed"
    pip(folder, "install", wanted, *([cell.torch] if cell.torch else []))
    script = Path(__file__).with_name(f"uses_{cell.extra or 'nothing'}.py")
    command = [folder / "bin" / "python", "-I", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1500:])
    return done.stdout.strip().splitlines()[-1]


def main() -> int:
    """Go through the cells; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", default=["all"], choices=("all", "oldest", "newest"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    wheel = build(folder)
    missing = [p for p in PYTHONS if interpreter(p) is None]
    chosen = dict.fromkeys(c for which in arguments.which for c in cells(which) if c.python not in missing)
    failed = 0
    for index, cell in enumerate(chosen):
        place, start = folder / f"cell-{index}", time.perf_counter()
        try:
            outcome = use(cell, wheel, place)
        except RuntimeError as error:
            outcome, failed = f"FAILED\n{error}", failed + 1
        print(f"{cell}: {outcome} ({time.perf_counter() - start:.0f} s)", flush=True)
        if not arguments.keep:
            shutil.rmtree(place, ignore_errors=True)
    if missing:
        print(f"not there, and not tried: Python {', '.join(missing)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
