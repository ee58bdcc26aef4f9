"""Walk what exporters write: each model makes artifacts, trains as eager PyTorch does, and is exported again.

    python tests/coverage/exported.py --jobs 2                        # all; writes exported.md
    python tests/coverage/exported.py --only GPT2LMHeadModel ...      # some; prints only
    python tests/coverage/exported.py --exporters dynamo --opsets 21  # some of each
    python tests/coverage/exported.py --results walk.jsonl            # all that walk.jsonl does not have yet
    python tests/coverage/exported.py --repeat GPT2LMHeadModel dynamo 21   # one: a program of a few lines that fails

Each architecture and exporter is a process of its own, which goes through the opsets.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnx
import torch

sys.path.insert(0, str(Path(__file__).parent))
import exported_page
import shrinking
import workers
from comparing import Differs, Reference, check, line
from exporters import EXPORTERS, ExporterError, missing, quiet
from foreign import FOREIGN
from libraries import load_torchvision
from specimens import SPECIMENS

from onnxtrain.errors import OnnxTrainError

MODELS = SPECIMENS | {s.name: s for s in FOREIGN}
PAGE = Path(__file__).with_name("exported.md")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one model fared.

    Args:
        model: the architecture.
        exporter: what wrote it.
        opset: the one asked for; 0 is the exporter's default.
        status: ``"pass"``; ``"exporter"``, where it does not write the model; ``"weights"``, where what is trained by
            default is not what the module trains; ``"losses"`` and ``"outputs"``, where they are not eager's; the
            class of an error; ``"time"``, ``"crash"``.
        reason: one line; for a pass the largest relative difference of a loss.
        written: the opset in the file.
        nodes: how many there are in it.
        notes: what is worth saying of a model that passes.
        seconds: taken.
    """

    model: str
    exporter: str
    opset: int
    status: str
    reason: str
    written: int = 0
    nodes: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def go_through(model: str, exporter: str, opsets: Sequence[int | None]) -> Iterator[Outcome]:
    """One architecture as one exporter writes it at each opset; the same file at two of them is looked at once."""
    specimen, way = MODELS[model], EXPORTERS[exporter]
    seen: dict[str, Outcome] = {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        references = functools.cache(functools.partial(Reference, specimen, way.training))
        write = way.start(specimen, specimen.build())
        for opset in opsets:
            start = time.monotonic()
            begun = Outcome(model, exporter, opset or 0, "pass", "")
            try:
                path = Path(folder) / "model.onnx"
                outcome = _one(begun, opset, write, path, references, seen)
            except ExporterError as error:
                outcome = dataclasses.replace(begun, status="exporter", reason=str(error))
            yield dataclasses.replace(outcome, seconds=round(time.monotonic() - start, 1))


def _one(begun: Outcome, opset: int | None, write: Any, path: Path, references: Any, seen: dict) -> Outcome:
    try:
        write(opset, path)
    except Exception as error:
        raise ExporterError(line(error)) from error
    proto = onnx.load(path)
    written = max(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    key = hashlib.sha256(proto.graph.SerializeToString()).hexdigest() + str(written)
    if key not in seen:
        outcome = dataclasses.replace(begun, written=written, nodes=len(proto.graph.node))
        try:
            worst, notes = check(path, references, path.parent / "run")
            seen[key] = dataclasses.replace(outcome, reason=f"{worst:.0e}", notes=notes)
        except ExporterError as error:
            seen[key] = dataclasses.replace(outcome, status="exporter", reason=str(error))
        except Differs as error:
            seen[key] = dataclasses.replace(outcome, status=error.kind, reason=str(error))
        except OnnxTrainError as error:
            where = f" ({error.node})" if error.node else ""
            seen[key] = dataclasses.replace(outcome, status=type(error).__name__, reason=line(error.what) + where)
        except Exception as error:
            seen[key] = dataclasses.replace(outcome, status=type(error).__name__, reason=line(error))
    return dataclasses.replace(seen[key], opset=begun.opset)


Key = tuple[str, str, int]


def walk(keys: Sequence[Key], jobs: int, limit: float) -> Iterator[Outcome]:
    """The outcomes in the order they come; each architecture and exporter in a process of its own."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for model, exporter, opset in keys:
        grouped.setdefault((model, exporter), []).append(opset)
    for done in workers.run(_work, [(*pair, opsets) for pair, opsets in grouped.items()], jobs, limit):
        model, exporter, opsets = done.job
        yield from done.results
        if done.end and len(done.results) < len(opsets):
            why = f"above {limit:.0f} s" if done.end == "time" else "the process ended without an answer"
            yield Outcome(model, exporter, opsets[len(done.results)], done.end, why, seconds=done.seconds)


def _work(job: tuple[str, str, list[int]], send: Callable[[Outcome], None]) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    model, exporter, opsets = job
    try:
        for outcome in go_through(model, exporter, [o or None for o in opsets]):
            send(outcome)
    except Exception as error:  # the module itself, in eager
        send(Outcome(model, exporter, opsets[0], "eager", line(error)))


def page(outcomes: Mapping[Key, Outcome]) -> str:
    """The report."""
    unwalked = [key for key in _keys(list(MODELS), list(EXPORTERS), None) if key not in outcomes]
    return exported_page.text(outcomes, missing(), unwalked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the walk; the exit status is 1 where a model fails that its exporter wrote."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="MODEL", default=list(MODELS), help="walk these architectures")
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    parser.add_argument("--opsets", nargs="+", type=int, help="those of the exporter's; 0 is its default")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are read from here, and new ones added")
    parser.add_argument("--again", action="store_true", help="walk what failed once more")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each architecture and exporter")
    parser.add_argument("--page", action="store_true", help="write exported.md")
    parser.add_argument(
        "--repeat", nargs=3, metavar=("MODEL", "EXPORTER", "OPSET"), help="the smallest that still fails"
    )
    given = parser.parse_args(arguments)
    if unknown := [n for n in given.only if n not in MODELS]:
        parser.error(f"{unknown[0]} is not among the architectures that are installed")
    prepare()
    if given.repeat:
        return _repeat(*given.repeat)
    known = _read(given.results)
    keys = _keys(given.only, given.exporters, given.opsets)
    done = {k for k, o in known.items() if not given.again or o.status in ("pass", "exporter")}
    for outcome in walk([k for k in keys if k not in done], given.jobs, given.limit):
        known[outcome.model, outcome.exporter, outcome.opset] = outcome
        where = f"{outcome.model} | {outcome.exporter} | {outcome.opset}"
        print(f"{outcome.status:14} {where:70} {outcome.seconds:5.1f} s  {outcome.reason}", flush=True)
        if given.results is not None:
            with given.results.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    failed = [o for o in known.values() if o.status not in ("pass", "exporter")]
    for o in _smallest(failed):
        print(f"{o.status}, {o.nodes} nodes: exported.py --repeat '{o.model}' '{o.exporter}' {o.opset}")
    print(f"{sum(o.status == 'pass' for o in known.values())} of {len(known)} pass, {len(failed)} fail")
    if given.page:
        PAGE.write_text(page(known))
    return 1 if failed else 0


def _smallest(failed: Sequence[Outcome]) -> list[Outcome]:
    """Of each kind of failure the one with the smallest model."""
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in sorted(failed, key=lambda o: o.nodes, reverse=True):
        kind = outcome.reason if outcome.status[0].isupper() else ""  # errors by what they say, the rest together
        found[outcome.status, re.sub(r"\S*\d\S*", "…", kind)] = outcome
    return list(found.values())


def _repeat(model: str, exporter: str, opset: str) -> int:
    """Write one model, cut it down to what still fails in the same way, and print a program that repeats it."""
    specimen, way = MODELS[model], EXPORTERS[exporter]
    folder = Path("out") / "exported"
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        way.start(specimen, specimen.build())(int(opset) or None, folder / "model.onnx")
    proto = onnx.load(folder / "model.onnx")
    why = shrinking.failure(proto)
    if why is None:
        print(f"artifacts are made of {folder / 'model.onnx'}: only its training differs, or nothing does")
        return 0
    smallest = shrinking.smallest(proto, lambda part: shrinking.failure(part) == why)
    onnx.save(smallest, folder / "smallest.onnx")
    print(shrinking.program(smallest, why))
    return 1


def _keys(models: Sequence[str], exporters: Sequence[str], opsets: Sequence[int] | None) -> list[Key]:
    """What is to be walked."""
    pairs = [(m, e) for m in models for e in exporters if MODELS[m].library in EXPORTERS[e].libraries]
    known = {e: [o or 0 for o in EXPORTERS[e].opsets] for e in exporters}
    return [(m, e, o) for m, e in pairs for o in known[e] if opsets is None or o in opsets]


def prepare() -> None:
    """Import what is imported once for all processes, quietly."""
    load_torchvision()
    warnings.simplefilter("ignore")
    for name in ("timm", "transformers"):
        if name not in missing():
            __import__(name)
    if "transformers" not in missing():
        import transformers

        transformers.logging.set_verbosity_error()


def _read(results: Path | None) -> dict[Key, Outcome]:
    """The outcomes of earlier walks, the latest of each."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    found = [Outcome(**{**json.loads(text), "notes": tuple(json.loads(text)["notes"])}) for text in lines]
    return {(o.model, o.exporter, o.opset): o for o in found}


if __name__ == "__main__":
    sys.exit(main())
