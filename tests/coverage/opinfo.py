"""PyTorch's operator database against ORTModule: which operators run as one graph and agree with eager.

For every entry of ``torch.testing._internal.common_methods_invocations.op_db`` that supports autograd in float32, each
sample input is one module whose tensors are arguments and whose other arguments are constants. It goes through capture,
gradient and the torch backend; its outputs and the gradients of all its inputs are compared with eager PyTorch's.

    python tests/coverage/opinfo.py                        every entry; prints what fails, by reason
    python tests/coverage/opinfo.py --only linalg.qr       one entry, with the failing sample's traceback
    python tests/coverage/opinfo.py --part 1/10            every tenth entry
    python tests/coverage/opinfo.py --write                every entry; brings the table up to date

Each entry runs in a process of its own with a time limit: a crash or a hang is a failure of that entry alone. Entries
that fail are in ``opinfo_failures.json`` with the reason; the exit status is 1 where others fail or these pass.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils import _pytree as pytree

TABLE = Path(__file__).with_name("opinfo_failures.json")
SAMPLES = 48  # most samples of one entry; the first and the last are among them, the others spread evenly between
BATCH = 12  # samples captured as one graph
SECONDS = 240.0  # time limit of one entry


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    Args:
        name: the entry, with its variant: ``linalg.norm.subgradients_at_zero``.
        ran: samples that ran.
        total: samples that the database has.
        reason: of the first sample that failed; empty where none did.
        detail: its arguments and traceback.
        seconds: time taken.
    """

    name: str
    ran: int
    total: int
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


def entries(part: str = "1/1") -> dict[str, Any]:
    """The entries that support autograd in float32, by name; of them every n-th for a part ``k/n``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    database.wrapper_set_seed = _unseeded
    found = {}
    for op in database.op_db:
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
            found[f"{op.name}.{op.variant_test_name}".rstrip(".")] = op
    place, count = (int(n) for n in part.split("/"))
    chosen = sorted(found)[place - 1 :: count]
    return {name: found[name] for name in chosen}


def _unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The database seeds random operators inside of each call, which a graph does not keep; here the caller seeds."""
    return op(*args, **kwargs)


class Calls(torch.nn.Module):
    """Calls of an operator, one for each sample: tensors are arguments, all else is constant.

    Floating tensors that need no gradient are buffers: running statistics are changed in place, which a module's
    buffers may be and its inputs may not.
    """

    def __init__(self, op: Any, samples: Sequence[Any]) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = pytree.tree_flatten([(s.input, s.args, s.kwargs) for s in samples])
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places: list[int] = []
        self.states: list[int] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.requires_grad:
                self.states.append(place)
                self.register_buffer(f"state_{place}", leaf.detach().clone())
            elif isinstance(leaf, torch.Tensor):
                self.places.append(place)
        self.tensors = [leaves[i] for i in self.places]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        for place in self.states:
            leaves[place] = getattr(self, f"state_{place}")
        made = [self.op(first, *a, **k) for first, a, k in pytree.tree_unflatten(leaves, self.spec)]
        return [[y for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor)] for result in made]


def run(name: str, op: Any, most: int) -> Outcome:
    """Samples of an entry, ``BATCH`` in one graph; where they fail together, the first that fails alone is found."""
    start = time.perf_counter()
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    chosen = _spread(samples, most)
    for first in range(0, len(chosen), BATCH):
        failed = _first_failure(op, chosen[first : first + BATCH])
        if failed is not None:
            (index, sample), error = failed
            detail = "".join(traceback.format_exception(error))
            detail = f"sample {index}: {sample.summary()}\n{detail}"
            return Outcome(name, len(chosen), len(samples), _reason(error), detail, time.perf_counter() - start)
    return Outcome(name, len(chosen), len(samples), seconds=time.perf_counter() - start)


def _first_failure(op: Any, chosen: Sequence[tuple[int, Any]]) -> tuple[tuple[int, Any], Exception] | None:
    """A sample that fails in a graph of its own, and how; failing only together with others counts for the first."""
    failure: Exception | None = None
    try:
        _check(op, [sample for _, sample in chosen])
    except Exception as error:
        failure = error
    if failure is None:
        return None
    middle = len(chosen) // 2
    halves = (chosen[:middle], chosen[middle:]) if middle else ()
    return next((f for half in halves if (f := _first_failure(op, half)) is not None), (chosen[0], failure))


def _spread(samples: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    count = len(samples)
    if count <= most:
        return list(enumerate(samples))
    places = sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
    return [(i, samples[i]) for i in places]


class Disagreement(Exception):
    """Outputs or gradients that are not eager's."""


def _check(op: Any, samples: Sequence[Any]) -> None:
    from onnxtrain import DebugOptions, LogLevel, ORTModule

    def calls() -> Calls:
        return Calls(op.op, samples)

    try:
        eager = _step(calls(), torch.float32)
    except Exception as error:
        raise Disagreement(f"eager fails on copies of the sample's tensors: {error}") from error
    made = _step(calls(), torch.float32, lambda module: ORTModule(module, DebugOptions(log_level=LogLevel.ERROR)))
    if _agree(made, eager):
        return
    try:
        exact = _step(calls(), torch.float64)
    except Exception:
        exact = eager  # no such kernel in float64
    _compare(made, eager, exact)


def _step(calls: Calls, dtype: torch.dtype, wrap: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, new buffers and gradients of one call in a precision, from the same random state each time."""
    calls = calls.to(dtype)
    leaves = [_leaf(t, dtype) for t in calls.tensors]
    module = calls if wrap is None else wrap(calls)
    torch.manual_seed(1)
    made = pytree.tree_leaves(module(*leaves))
    torch.manual_seed(2)
    seeds = [torch.randn(y.shape, dtype=_single(y.dtype)).to(y.dtype) for y in made]
    seeded = [(y, dy) for y, dy in zip(made, seeds, strict=True) if y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    found: Sequence[Any] = [None] * len(wanted)
    if seeded and wanted:
        found = torch.autograd.grad([y for y, _ in seeded], wanted, [dy for _, dy in seeded], allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    return [y.detach() for y in made], [b.detach() for b in calls.buffers()], gradients


def _leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    copy = tensor.detach().clone()
    if copy.dtype == torch.float32:
        copy = copy.to(dtype)
    if copy.dtype == torch.complex64 and dtype == torch.float64:
        copy = copy.to(torch.complex128)
    return copy.requires_grad_(tensor.requires_grad)


def _single(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _agree(made: Sequence[list[Any]], eager: Sequence[list[Any]]) -> bool:
    pairs = [(a, b) for mine, its in zip(made, eager, strict=True) for a, b in zip(mine, its, strict=False)]
    same = all(len(mine) == len(its) for mine, its in zip(made, eager, strict=True))
    return same and all(_close(a, b) for a, b in pairs)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _compare(made: Any, eager: Any, exact: Any) -> None:
    """Raise Disagreement where a result is farther from float64's than a few times what eager's is."""
    for kind, mine, its, true in zip(("output", "buffer", "gradient"), made, eager, exact, strict=True):
        if len(mine) != len(its):
            raise Disagreement(f"{len(mine)} {kind}s, eager has {len(its)}")
        for index, (a, b, c) in enumerate(zip(mine, its, true, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Disagreement(f"{kind} is {a.dtype} {tuple(a.shape)}, eager's {b.dtype} {tuple(b.shape)}")
            if not _close(a, b) and not _as_good(a, b, c):
                worst = (a.double() - b.double()).abs().max() if not a.is_complex() else (a - b).abs().max()
                raise Disagreement(f"values of the {kind}s differ", f"{kind} {index}: by {worst.item():.3g}\n{a}\n{b}")


def _as_good(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a is no farther from the exact value than four times eager's distance, or float32's resolution."""
    if a.shape != exact.shape or not (a.is_floating_point() or a.is_complex()):
        return False
    wide = exact.dtype if exact.dtype in (torch.float64, torch.complex128) else torch.float64
    both = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)) or not both.any():
        return False
    error, usual = ((x.to(wide) - exact.to(wide)).abs()[both].max() for x in (a, b))
    size = exact.abs()[both].max()
    return bool(error <= 4 * usual + 1e-5 * size + 1e-7)


def _reason(error: BaseException) -> str:
    """The error in one line, without what varies between samples."""
    import re

    text = str(error.args[0]) if isinstance(error, Disagreement) else str(getattr(error, "what", error))
    first = next((line for line in text.splitlines() if line.strip()), "")
    first = re.sub(r"\b[us]\d+\b", "n", re.sub(r"0x[0-9a-f]+", "…", first))
    return f"{type(error).__name__}: {first[:150]}"


def _child(pipe: Any, name: str, op: Any, most: int) -> None:

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if "OPINFO_VERBOSE" not in os.environ:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        gc.disable()
        try:
            pipe.send(run(name, op, most))
        except BaseException as error:
            pipe.send(Outcome(name, 0, 0, f"samples: {_reason(error)}", traceback.format_exc()))
    pipe.close()
    os._exit(0)


def outcomes(chosen: dict[str, Any], jobs: int, most: int, limit: float) -> Iterator[Outcome]:
    """Every entry in a forked process of its own, some at a time."""
    from onnxtrain import ORTModule

    torch.set_num_threads(1)
    ORTModule(torch.nn.Identity())(torch.ones(2, requires_grad=True))  # what all of them need is loaded once
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    waiting, running = list(chosen.items()), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, op = waiting.pop(0)
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(its, name, op, most))
            process.start()
            its.close()
            running[mine] = (name, process, time.monotonic())
        ready = multiprocessing.connection.wait(list(running), timeout=1.0)
        for pipe, (name, process, start) in list(running.items()):
            late = time.monotonic() - start > limit
            if pipe not in ready and not late:
                continue
            try:
                outcome = pipe.recv() if pipe in ready else Outcome(name, 0, 0, f"takes more than {limit:.0f} s")
            except EOFError:
                process.join()
                outcome = Outcome(name, 0, 0, f"the process ended with code {process.exitcode}")
            process.kill()
            process.join()
            del running[pipe]
            yield outcome


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    chosen = entries(options.part)
    if options.only:
        chosen = {n: op for n, op in chosen.items() if any(n == o or op.name == o for o in options.only)}
    found: list[Outcome] = []
    for outcome in outcomes(chosen, options.jobs, options.samples, options.limit):
        found.append(outcome)
        if options.verbose or options.only or outcome.reason:
            counts = f"{outcome.ran} of {outcome.total} samples in {outcome.seconds:.1f} s"
            print(f"[{len(found)}/{len(chosen)}] {outcome.name}: {counts}  {outcome.reason}", flush=True)
        if options.only and outcome.detail:
            print(outcome.detail)
    _summary(found, options.samples)
    known: dict[str, str] = json.loads(TABLE.read_text())
    if options.write:
        seen = {o.name for o in found}
        table = {n: r for n, r in known.items() if n not in seen} | {o.name: o.reason for o in found if o.reason}
        TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
        return 0
    new = [o.name for o in found if o.reason and o.name not in known]
    cured = [o.name for o in found if not o.reason and o.name in known and o.ran == o.total]
    if new:
        print(f"fail, and are not in {TABLE.name}: {' '.join(new)}")
    if cured:
        print(f"pass, and are in {TABLE.name} (write it again with --write): {' '.join(cured)}")
    return int(bool(new or cured))


def _summary(found: Sequence[Outcome], most: int) -> None:
    groups = collections.defaultdict(list)
    for outcome in found:
        if outcome.reason:
            groups[outcome.reason].append(outcome.name)
    for reason, names in sorted(groups.items(), key=lambda g: -len(g[1])):
        print(f"{len(names):4}  {reason}\n        {' '.join(names)}")
    good = sum(not o.reason for o in found)
    print(f"{good} of {len(found)} entries pass on all samples that ran ({good / max(1, len(found)):.1%})")
    ran, total = sum(o.ran for o in found), sum(o.total for o in found)
    bounded = sum(o.ran < o.total for o in found)
    print(f"{ran} of {total} samples ran: at most {most} of an entry, which {bounded} entries have more than")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of entries")
    parser.add_argument("--part", default="1/1", help="every n-th entry, beginning with the k-th: k/n")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="most samples of one entry")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds for one entry")
    parser.add_argument("--write", action="store_true", help=f"bring {TABLE.name} up to date for the entries that ran")
    parser.add_argument("--verbose", action="store_true", help="a line for entries that pass, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
