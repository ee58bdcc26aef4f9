"""Pages as programs: the blocks of a page, one after the other, in a folder that is empty at first."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<kind>python|console)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python or of commands.

    Args:
        line: where its first line is on the page, from 1.
        kind: ``"python"`` or ``"console"``.
        text: what it says.
        why_not: why a test cannot run it; empty where it is run.
    """

    line: int
    kind: str
    text: str
    why_not: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    content = page.read_text()
    return [
        Block(content.count("\n", 0, m.start("text")) + 1, m["kind"], m["text"], m["why"] or "")
        for m in _BLOCK.finditer(content)
    ]


def program(page: Path, afterwards: str = "") -> str:
    """The page as one program, each line where it is on the page."""
    lines = ["from pages import console"]
    for block in (b for b in blocks(page) if not b.why_not):
        text = block.text if block.kind == "python" else f"console({block.text!r})\n"
        lines += [""] * (block.line - 1 - len(lines)) + text.splitlines()
    return "\n".join([*lines, afterwards, ""])


def console(text: str) -> None:
    """Run commands as a shell would; ``onnxtrain`` and ``python`` are those of this test."""
    ours = {"onnxtrain": [sys.executable, "-m", "onnxtrain.cli"], "python": [sys.executable]}
    for line in text.splitlines():
        name, *arguments = shlex.split(line, comments=True)
        subprocess.run([*ours[name], *arguments], check=True)


def run(page: Path, folder: Path, afterwards: str = "") -> subprocess.CompletedProcess[str]:
    """Run a page in this folder, alone in its process as a user's program is, as the only one of its group."""
    path = folder / f"{page.stem.replace('-', '_').lower()}.py"
    path.write_text(program(page, afterwards))
    return subprocess.run(
        [sys.executable, path.name], cwd=folder, env=_environment(), capture_output=True, text=True, timeout=600
    )


def _environment() -> dict[str, str]:
    """This process's, with our modules and with what torchrun sets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    paths = [str(Path(__file__).parent), *(p for p in sys.path if p)]
    return {**os.environ, **group, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
