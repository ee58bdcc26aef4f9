"""Jobs in processes of their own, some at a time: one that crashes or hangs is the failure of that one alone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass
class Done:
    """How a job ended.

    Args:
        job: the job.
        results: what it sent, in its order.
        end: ``""``, ``"time"`` where it took too long, ``"crash"`` where its process ended before it did.
        seconds: time taken.
    """

    job: Any
    results: list[Any]
    end: str = ""
    seconds: float = 0.0


def run(
    work: Callable[[Any, Callable[[Any], None]], None], jobs: Sequence[Any], count: int, limit: float
) -> Iterator[Done]:
    """Call ``work(job, send)`` for each job, in forked processes: what is imported here is not imported again.

    Args:
        work: does a job and sends results as it has them.
        jobs: the jobs.
        count: processes at a time.
        limit: seconds after which a job is ended; what it sent until then is kept.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < count:
            job = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, job, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (Done(job, []), process, time.monotonic())
        ready = multiprocessing.connection.wait(list(running), timeout=0.5)
        for receiver, (done, process, start) in list(running.items()):
            done.seconds = time.monotonic() - start
            if receiver in ready and not _receive(receiver, done):
                process.join()
            elif done.seconds > limit:
                process.kill()
                done.end = "time"
            else:
                continue
            del running[receiver]
            yield done


_LAST = "that was all"


def _receive(receiver: Any, done: Done) -> bool:
    """Keep what a job sent; says whether more may come."""
    try:
        result = receiver.recv()
    except EOFError:
        done.end = "crash"
        return False
    if result == _LAST:
        return False
    done.results.append(result)
    return True


def _work(work: Callable[[Any, Callable[[Any], None]], None], job: Any, sender: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    work(job, sender.send)
    sender.send(_LAST)
