"""Random files and modules: ``python -m fuzz.run --kinds tensors --count 500`` from ``tests``, or ``make fuzz``.

What was done is kept in a JSON file for each kind, so the same command goes on where it was stopped; ``--again``
forgets it. Faults are printed with the command that repeats them; ``--seed N`` runs one seed, shrinks it, and prints it
as text: a module as a test that runs.
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
from collections.abc import Iterator
from pathlib import Path

from fuzz.kinds import KINDS, Wish, outcome, prepare, told

os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS = 300  # of one seed
AT_ONCE = 400  # seeds of one pool: processes that have run for long are given up


def outcomes(seeds: list[int], jobs: int, wish: Wish) -> Iterator[dict[str, object]]:
    """All seeds, each in a process of a pool; where one dies, its seeds are tried one by one."""
    prepare(wish.kind)
    if jobs < 2:
        yield from (outcome(s, wish) for s in seeds)
        return
    for first in range(0, len(seeds), AT_ONCE):
        yield from _in_pools(seeds[first : first + AT_ONCE], jobs, wish)


def _in_pools(waiting: list[int], jobs: int, wish: Wish) -> Iterator[dict[str, object]]:
    fork = multiprocessing.get_context("fork")
    while waiting:
        with concurrent.futures.ProcessPoolExecutor(jobs, fork) as pool:
            futures = {pool.submit(outcome, s, wish): s for s in waiting}
            waiting = []
            for future in concurrent.futures.as_completed(futures):
                try:
                    yield future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    waiting.append(futures[future])
        if waiting:
            yield _alone(waiting.pop(0), wish)


def _alone(seed: int, wish: Wish) -> dict[str, object]:
    """One seed in a process of its own, which may die."""
    fork = multiprocessing.get_context("fork")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, fork) as pool:
            return pool.submit(outcome, seed, wish).result(SECONDS)
    except (concurrent.futures.process.BrokenProcessPool, TimeoutError) as error:
        return {"kind": "fault", "reason": f"the process died: {type(error).__name__}", "seed": seed, "detail": ""}


def report(done: dict[str, dict[str, object]]) -> str:
    """Counts of what became of the seeds, by outcome and reason, with seeds."""
    kinds = collections.Counter(str(r["kind"]) for r in done.values())
    lines = [f"{len(done)} seeds: {', '.join(f'{n} {k}' for k, n in kinds.most_common())}{_amounts(done)}"]
    for kind in ("fault", "refused", "thrown away"):
        reasons: dict[str, list[int]] = collections.defaultdict(list)
        for r in done.values():
            if r["kind"] == kind:
                reasons[str(r["reason"])].append(int(str(r["seed"])))
        for reason, seeds in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
            lines.append(f"  {kind} {len(seeds)} x {reason}  --seed {' '.join(map(str, sorted(seeds)[:6]))}")
    return "\n".join(lines)


def _amounts(done: dict[str, dict[str, object]]) -> str:
    """What was compared of files, and how often rows were left out of modules."""
    compared, gradients, steps, dropped = (
        sum(int(str(r.get(k, 0))) for r in done.values()) for k in ("compared", "gradients", "steps", "dropped")
    )
    operators = {o for r in done.values() if r["kind"] == "pass" for o in r["operators"]}  # type: ignore[attr-defined]
    of_files = f"; {compared} of {gradients} gradients compared; {len(operators)} operators" if operators else ""
    leaving = sum(bool(r.get("dropped")) for r in done.values())
    of_modules = f"; rows left out in {dropped} of {steps} steps, of {leaving} modules" if dropped else ""
    return of_files + of_modules


def main() -> int:
    """Run seeds; the exit status is 1 where there is a fault."""
    arguments = _arguments()
    kinds = KINDS if "all" in arguments.kinds else arguments.kinds
    wishes = [Wish(kind, tuple(arguments.without), arguments.save, arguments.whole, arguments.device) for kind in kinds]
    if arguments.seed:
        return max(_one_by_one(arguments.seed, wish) for wish in wishes)
    return max(_run(arguments, wish) for wish in wishes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["files"], choices=[*KINDS, "all"], help="what is made")
    parser.add_argument("--count", type=int, default=100, help="how many of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--resume", type=Path, default=Path(tempfile.gettempdir()) / "onnxtrain-fuzz.json")
    parser.add_argument("--again", action="store_true", help="forget what was done")
    parser.add_argument("--seed", type=int, nargs="*", help="run these, and shrink those with faults")
    parser.add_argument("--without", nargs="*", default=[], help="features of files to leave out: names, wraps, …")
    parser.add_argument("--save", type=Path, help="with --seed: write the file that was found here")
    parser.add_argument("--whole", action="store_true", help="with --seed: do not shrink")
    parser.add_argument("--device", default="cpu", help="where random modules are, as torch names it")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, wish: Wish) -> int:
    """All seeds of one kind that were not run before; 1 where there is a fault."""
    plain = arguments.resume
    resume = plain if wish.kind == "files" else plain.with_name(f"{plain.stem}-{wish.kind}{plain.suffix}")
    done = {} if arguments.again or not resume.exists() else json.loads(resume.read_text())
    chosen = range(arguments.first, arguments.first + arguments.count)
    repeat = "" if wish.kind == "files" else f"--kinds {wish.kind} "
    for place, found in enumerate(outcomes([s for s in chosen if str(s) not in done], arguments.jobs, wish)):
        done[str(found["seed"])] = found
        if found["kind"] in ("fault", "refused"):
            print(f"{repeat}--seed {found['seed']}: {found['kind']}: {found['reason']}", flush=True)
        if place % 20 == 0:
            _write(resume, done)
    _write(resume, done)
    shown = {k: v for k, v in done.items() if int(k) in chosen}
    print(f"{wish.kind}: {report(shown)}", flush=True)
    return int(any(r["kind"] == "fault" for r in shown.values()))


def _write(path: Path, done: dict[str, dict[str, object]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(done))
    partial.replace(path)


def _one_by_one(seeds: list[int], wish: Wish) -> int:
    worst = 0
    for seed in seeds:
        text, is_fault = told(seed, wish)
        print(text)
        worst |= int(is_fault)
    return worst


if __name__ == "__main__":
    sys.exit(main())
