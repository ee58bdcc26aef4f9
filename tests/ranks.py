"""Two processes that run the same function together, over gloo on the CPU or over NCCL on a GPU each."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_COUNT = 2
_PATIENCE = 180  # seconds that a rank waits for the other


class Ranks:
    """Started at the first call and kept for the next one; started again after a failure, which leaves ranks apart.

    Args:
        folder: of the files where they meet, and of the graphs that they need not translate twice.
        backend: gloo or nccl.
    """

    def __init__(self, folder: Path, backend: str = "gloo") -> None:
        self._backend = backend
        self._files = (folder / f"rendezvous-{i}" for i in itertools.count())
        self._graphs = folder / "graphs"
        self._processes: list[Any] = []
        self._calls: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What a function of an importable module returns at each rank."""
        if not self._processes:
            self._start()
        for calls in self._calls:
            calls.send((function, args, kwargs))
        answers = [_answer(calls) for calls in self._calls]
        failures = [f"rank {rank}: {a}" for rank, a in enumerate(answers) if isinstance(a, str)]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for (value,) in answers]

    def _start(self) -> None:
        context, file = multiprocessing.get_context("spawn"), next(self._files)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", ORTMODULE_CACHE_DIR=str(self._graphs)):
            for rank in range(_COUNT):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self._backend, str(file), theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._calls.append(ours)

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for calls in self._calls:
            calls.close()
        self._processes, self._calls = [], []


def _answer(calls: Connection) -> Any:
    try:
        return pickle.loads(calls.recv_bytes()) if calls.poll(_PATIENCE) else "no answer"
    except EOFError:
        return "the process has ended"


def device() -> torch.device:
    """Where this rank computes."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")


def _serve(rank: int, backend: str, file: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        os.environ["LOCAL_RANK"] = str(rank)
    patience = datetime.timedelta(seconds=_PATIENCE)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=_COUNT, timeout=patience)
    while True:
        function, args, kwargs = calls.recv()
        torch.manual_seed(0)
        try:
            answer = pickle.dumps((function(*args, **kwargs),))
        except Exception:
            answer = pickle.dumps(traceback.format_exc())
        calls.send_bytes(answer)
