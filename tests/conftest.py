"""Seeds, the golden option, and the command that reproduces a failure."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write the golden files again")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _watch() -> None:
    from sharing import watch

    watch()


@pytest.fixture(scope="session")
def deepspeed_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What DeepSpeed compiles when it starts, compiled before ranks wait for each other.

    It takes a minute and more, and a process that is ended meanwhile leaves a lock for which every later one waits;
    so it lies in a folder of this run, where workers wait for the one that compiles. Another ninja than this one would
    compile it again.
    """
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        if not _has_cuda():
            load = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as op; op().load(verbose=False)"
            subprocess.run([sys.executable, "-c", load], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True)
        yield


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a CUDA device where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    if not _has_cuda():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.failed:
        place = Path(item.path).relative_to(item.config.rootpath)
        name = item.nodeid.split("::", 1)[-1]
        report.sections.append(("reproduce", f"python -m pytest '{place}::{name}'"))
    return report
