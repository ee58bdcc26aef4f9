"""Writes the page where a network learns the digits that one draws, ready to be served from any folder of files.

    python examples/draw/publish.py FOLDER

As a hook of mkdocs it writes ``draw/`` into the site. onnxruntime-web is that of ``make javascript``, else it is read
from a public server of npm packages when the page is opened.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
SHARED = HERE.parent / "anywhere"
PAGE = ("index.html", "draw.css", "draw.mjs", "lesson.mjs", "pad.mjs")
SHARED_PAGE = ("page.css", "checkpoint.mjs", "run.mjs", "training.mjs")
RUNTIMES = SHARED / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
ELSEWHERE = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1/dist/"


def publish(folder: Path) -> None:
    """Write the page, its artifacts and onnxruntime-web into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copy(HERE / name, folder)
    for name in SHARED_PAGE:
        shutil.copy(SHARED / name, folder)
    _load(SHARED / "make_artifacts.py").make(folder / "artifacts", steps=0)
    for made in (folder / "artifacts").iterdir():
        made.chmod(0o644)  # safetensors' file is its writer's alone; a server must read it
    if RUNTIMES.is_dir():
        (folder / "onnxruntime-web").mkdir(exist_ok=True)
        for name in RUNTIME:
            shutil.copy(RUNTIMES / name, folder / "onnxruntime-web")
    else:
        index = folder / "index.html"
        index.write_text(index.read_text().replace("./onnxruntime-web/", ELSEWHERE))


def on_post_build(config: Any) -> None:
    """What mkdocs calls when the site is written."""
    publish(Path(config["site_dir"]) / "draw")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    publish(Path(sys.argv[1]))
