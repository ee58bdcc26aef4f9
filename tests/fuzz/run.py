"""Random files through artifacts: ``python -m fuzz.run --count 500 --jobs 2`` from ``tests``, or ``make fuzz``.

What was done is kept in a JSON file, so the same command goes on where it was stopped; ``--again`` forgets it. Faults
are printed with the command that repeats them; ``--seed N`` runs one file, shrinks it, and prints it as text.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onnx

os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS = 300  # of one file


def outcome(seed: int, without: tuple[str, ...] = ()) -> dict[str, object]:
    """One seed, as plain data."""
    import dataclasses

    from fuzz.onnx_files import FEATURES, generate
    from fuzz.oracle import THROWN, Outcome, check
    from fuzz.units import Rejected

    began = time.monotonic()
    try:
        file = generate(seed, [f for f in FEATURES if f not in without])
    except Rejected as error:
        found, operators = Outcome(THROWN, str(error)[:200]), []
    else:
        found = check(file)
        operators = sorted({n.op_type for n in file.model.graph.node})
    seconds = round(time.monotonic() - began, 2)
    return dataclasses.asdict(found) | {"seed": seed, "seconds": seconds, "operators": operators}


def outcomes(seeds: list[int], jobs: int, without: tuple[str, ...] = ()) -> Iterator[dict[str, object]]:
    """All seeds, each in a process of a pool; where one dies, its seeds are tried one by one."""
    from fuzz.calls import calls

    calls()  # read once, and known to all processes by fork
    if jobs < 2:
        yield from (outcome(s, without) for s in seeds)
        return
    fork = multiprocessing.get_context("fork")
    waiting = list(seeds)
    while waiting:
        with concurrent.futures.ProcessPoolExecutor(jobs, fork) as pool:
            futures = {pool.submit(outcome, s, without): s for s in waiting}
            waiting = []
            for future in concurrent.futures.as_completed(futures):
                try:
                    yield future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    waiting.append(futures[future])
        if waiting:
            first = waiting.pop(0)
            yield _alone(first, without)


def _alone(seed: int, without: tuple[str, ...]) -> dict[str, object]:
    """One seed in a process of its own, which may die."""
    fork = multiprocessing.get_context("fork")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, fork) as pool:
            return pool.submit(outcome, seed, without).result(SECONDS)
    except (concurrent.futures.process.BrokenProcessPool, TimeoutError) as error:
        return {"kind": "fault", "reason": f"the process died: {type(error).__name__}", "seed": seed, "detail": ""}


def report(done: dict[str, dict[str, object]]) -> str:
    """Counts of what became of the files, by kind and reason, with seeds."""
    kinds = collections.Counter(str(r["kind"]) for r in done.values())
    compared, gradients = (sum(int(str(r.get(k, 0))) for r in done.values()) for k in ("compared", "gradients"))
    operators = {o for r in done.values() if r["kind"] == "pass" for o in r["operators"]}  # type: ignore[attr-defined]
    lines = [
        f"{len(done)} seeds: {', '.join(f'{n} {k}' for k, n in kinds.most_common())}; "
        f"{compared} of {gradients} gradients compared; {len(operators)} operators"
    ]
    for kind in ("fault", "refused", "thrown away"):
        reasons: dict[str, list[int]] = collections.defaultdict(list)
        for r in done.values():
            if r["kind"] == kind:
                reasons[str(r["reason"])].append(int(str(r["seed"])))
        for reason, seeds in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
            lines.append(f"  {kind} {len(seeds)} x {reason}  --seed {' '.join(map(str, sorted(seeds)[:6]))}")
    return "\n".join(lines)


def main() -> int:
    """Run seeds; the exit status is 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="files")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--resume", type=Path, default=Path(tempfile.gettempdir()) / "onnxtrain-fuzz.json")
    parser.add_argument("--again", action="store_true", help="forget what was done")
    parser.add_argument("--seed", type=int, nargs="*", help="run these, and shrink those with faults")
    parser.add_argument("--without", nargs="*", default=[], help="features to leave out: names, dimensions, wraps, …")
    parser.add_argument("--save", type=Path, help="with --seed: write what was found here")
    parser.add_argument("--whole", action="store_true", help="with --seed: do not shrink")
    arguments = parser.parse_args()
    if arguments.seed:
        return _one_by_one(arguments)
    done = {} if arguments.again or not arguments.resume.exists() else json.loads(arguments.resume.read_text())
    chosen = range(arguments.first, arguments.first + arguments.count)
    for place, found in enumerate(
        outcomes([s for s in chosen if str(s) not in done], arguments.jobs, tuple(arguments.without))
    ):
        done[str(found["seed"])] = found
        if found["kind"] in ("fault", "refused"):
            print(f"--seed {found['seed']}: {found['kind']}: {found['reason']}", flush=True)
        if place % 20 == 0:
            _write(arguments.resume, done)
    _write(arguments.resume, done)
    shown = {k: v for k, v in done.items() if int(k) in chosen}
    print(report(shown))
    return int(any(r["kind"] == "fault" for r in shown.values()))


def _write(path: Path, done: dict[str, dict[str, object]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(done))
    partial.replace(path)


def _one_by_one(arguments: argparse.Namespace) -> int:
    from fuzz.onnx_files import FEATURES, generate
    from fuzz.oracle import FAULT, REFUSED, check
    from fuzz.shrink import shrunk, told

    worst = 0
    for seed in arguments.seed:
        file = generate(seed, [f for f in FEATURES if f not in arguments.without])
        found = check(file)
        if not arguments.whole and found.kind in (FAULT, REFUSED):
            file = shrunk(file, found)
            found = check(file)
        print(told(file, found))
        if arguments.save:
            onnx.save(file.model, arguments.save)
        worst |= int(found.kind == FAULT)
    return worst


if __name__ == "__main__":
    sys.exit(main())
