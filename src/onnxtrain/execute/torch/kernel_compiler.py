"""A process that makes loops of kernels with Inductor, and what of it there is in this one.

Inductor compiles in a process of its own: it sets torch's random state while it works, and a thread would hold up the
step. What comes back is Python that Inductor wrote, whose loops are in libraries by then.
"""

from __future__ import annotations

import atexit
import base64
import concurrent.futures
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import BackendError, first_line
from onnxtrain.ir import shapes

_LOG = logging.getLogger("onnxtrain.execute")
_WORKER = "onnxtrain.execute.torch.kernel_worker"
Sizes = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel's loop.

    Args:
        call: takes a list of tensors, which it empties, and gives a tuple of tensors.
        fits: whether it was made for tensors of these sizes.
    """

    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    fits: Callable[[Sizes], bool]


class KernelCompiler:
    """Makes loops of kernels, one after the other, in a process that begins with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that it is a child of: after a fork it is another's
        self._waiting: dict[int, tuple[ir.Graph, concurrent.futures.Future[Compiled]]] = {}
        self._lock, self._count, self._is_told = threading.Lock(), 0, False

    def submit(
        self, body: ir.Graph, device: str, sizes: Sizes, orders: Sequence[Any]
    ) -> concurrent.futures.Future[Compiled]:
        """The loop of a body, when it is there; BackendError where there will be none.

        Args:
            body: the body.
            device: where it runs.
            sizes: of its inputs, now.
            orders: of their axes in memory, the outermost first; empty where that is their own.
        """
        future: concurrent.futures.Future[Compiled] = concurrent.futures.Future()
        with self._lock:
            try:
                process = self._started()
                self._count += 1
                self._waiting[self._count] = body, future
                model = ir.serde.serialize_model(ir.Model(body, ir_version=10)).SerializeToString()
                text = base64.b64encode(model).decode()
                job: dict[str, Any] = {"number": self._count, "model": text, "device": device}
                job |= {"sizes": [*map(list, sizes)], "orders": orders, "threads": torch.get_num_threads()}
                print(json.dumps(job), file=process.stdin, flush=True)
            except OSError as error:
                self._waiting.pop(self._count, None)
                future.set_exception(self._refusal(str(error)))
        return future

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid():
            self._owner, self._waiting = os.getpid(), {}
            paths = os.pathsep.join(p for p in sys.path if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
            atexit.register(self._process.kill)
            threading.Thread(target=self._receive, args=(self._process, self._waiting), daemon=True).start()
        return self._process

    def _receive(
        self,
        process: subprocess.Popen[str],
        waiting: dict[int, tuple[ir.Graph, concurrent.futures.Future[Compiled]]],
    ) -> None:
        """Runs in a thread of its own, as long as the process lives; who still waits for it then is told."""
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            body, future = waiting.pop(answer["number"])
            try:
                if "error" in answer:
                    raise self._refusal(answer["error"])
                future.set_result(_loaded(body, answer))
            except Exception as error:
                future.set_exception(error)
        with self._lock:  # a job comes before, and is among those that wait, or begins another process
            left = [future for _, future in waiting.values()]
            self._process = None if self._process is process else self._process
        for future in left:
            if not future.done():
                future.set_exception(self._refusal("the process that compiles has ended"))

    def _refusal(self, why: str) -> BackendError:
        if not self._is_told:
            self._is_told = True
            _LOG.warning("a kernel runs on ATen, for Inductor made no loop of it: %s", first_line(Exception(why)))
        return BackendError(f"Inductor made no loop: {why}", cure='leave codegen="none"')


def _loaded(body: ir.Graph, answer: dict[str, Any]) -> Compiled:
    """What an answer of the process describes."""
    dims = [[d if isinstance(d, int) else str(d.value) for d in shapes.known_dims(v)] for v in body.inputs]
    holds = eval(f"lambda {', '.join(answer['symbols'])}: {answer['guards']}", {})
    places = [answer["symbols"][name] for name in answer["symbols"]]

    def fits(sizes: Sizes) -> bool:
        found: dict[int | str, int] = {}
        for known, own in zip(dims, sizes, strict=True):
            for dim, size in zip(known, own, strict=True):
                if found.setdefault(dim, dim if isinstance(dim, int) else size) != size:
                    return False
                if not isinstance(dim, int) and size < 2:
                    return False
        return bool(holds(*(sizes[i][axis] for i, axis in places)))

    return Compiled(_module_of(answer["source"]).call, fits)


def _module_of(source: str) -> Any:
    """The module that Inductor wrote, which loads its libraries; no processes that compile are started for it."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(compile_threads=1):
        return importlib.import_module("torch._inductor.codecache").PyCodeCache.load(source)
