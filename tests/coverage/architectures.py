"""Walk the catalogue of Transformers architectures and say which train as in eager PyTorch.

    python tests/coverage/architectures.py --jobs 2                      # all; writes architectures.md
    python tests/coverage/architectures.py --only LlamaForCausalLM ...   # some; prints only
    python tests/coverage/architectures.py --results walk.jsonl          # all that walk.jsonl does not have yet

Each architecture is one training step of the torch backend beside the same step in eager PyTorch, in a process of its
own.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))
import workers
from catalogue import ARCHITECTURES, Architecture

import onnxtrain
from onnxtrain import Options, ORTModule
from onnxtrain.errors import OnnxTrainError

PAGE = Path(__file__).with_name("architectures.md")
CLOSE, NOISE = 1e-3, 1e-5  # of a gradient's largest element; of the largest gradient's
RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one architecture fared.

    Args:
        model: the class.
        status: ``"pass"``, or the kind of failure: the error's class, ``"differs"``, ``"eager"`` where the model does
            not run at all, ``"time"``, ``"crash"``.
        reason: one line; for a pass the largest relative difference of a gradient.
        seconds: of the worker.
    """

    model: str
    status: str
    reason: str
    seconds: float = 0.0


def parity(architecture: Architecture) -> Outcome:
    """One step of the graph beside one of eager PyTorch: loss, gradients, parameters after it."""
    torch.manual_seed(0)
    try:
        eager = architecture.build()
        given = architecture.batch()
        ours = copy.deepcopy(eager)
        expected = _step(eager, given)
    except Exception as error:  # a configuration that the class does not take
        return Outcome(architecture.model, "eager", _line(error))
    try:
        wrapped = ORTModule(ours, options=Options(backend="torch", summary=False, density_threshold=0.95))
        found = _step(wrapped, given)
    except OnnxTrainError as error:
        where = ", ".join(part for part in (error.node, error.source.rsplit("/", 1)[-1]) if part)
        return Outcome(architecture.model, type(error).__name__, f"{error.what} ({where})" if where else error.what)
    except Exception as error:
        return Outcome(architecture.model, type(error).__name__, _line(error))
    return _compare(architecture.model, expected, found, (eager, ours))


def _step(model: torch.nn.Module, given: dict[str, Any]) -> float:
    """Loss of one step of plain gradient descent; the gradients stay on the parameters."""
    output = model(**copy.deepcopy(given))
    loss = getattr(output, "loss", None)
    if loss is None:
        leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        loss = torch.stack([t.float().square().mean() for t in leaves]).sum()
    loss.sum().backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    return loss.detach().sum().item()


def _compare(name: str, expected: float, found: float, models: tuple[torch.nn.Module, torch.nn.Module]) -> Outcome:
    eager, ours = (dict(m.named_parameters()) for m in models)
    if not abs(found - expected) <= 1e-4 * abs(expected) + 1e-6:
        return Outcome(name, "differs", f"the loss is {found:.6g}, in eager {expected:.6g}")
    largest = max((float(p.grad.abs().max()) for p in eager.values() if p.grad is not None), default=0.0)
    if not largest > 0:
        return Outcome(name, "eager", f"no gradient to compare: the largest is {largest}")
    worst, worst_name = 0.0, ""
    for path, parameter in eager.items():
        a, b = (torch.zeros_like(parameter) if p.grad is None else p.grad for p in (ours[path], parameter))
        error = float((a - b).abs().max() / (b.abs().max() + largest * NOISE / CLOSE + 1e-30)) if b.numel() else 0.0
        if not error <= worst:
            worst, worst_name = error, path
    if not worst <= CLOSE:
        return Outcome(name, "differs", f"the gradient of {worst_name} by {worst:.1e} of its largest element")
    for path, parameter in eager.items():
        if not torch.allclose(ours[path], parameter, rtol=1e-3, atol=1e-3 * RATE * largest + 1e-7):
            return Outcome(name, "differs", f"the parameter {path} after the step")
    return Outcome(name, "pass", f"{worst:.0e}")


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines[0] if lines else ''} ({Path(place.filename).name}:{place.lineno})"


def walk(names: Sequence[str], jobs: int, limit: float) -> Iterator[Outcome]:
    """The outcomes in the order they come; each architecture in a process of its own, ended after ``limit`` seconds."""
    ends = {"time": f"above {limit:.0f} s", "crash": "the process ended without an answer"}
    for done in workers.run(_work, names, jobs, limit):
        outcome = done.results[0] if done.results else Outcome(done.job, done.end, ends[done.end])
        yield dataclasses.replace(outcome, seconds=done.seconds)


def _work(name: str, send: Callable[[Outcome], None]) -> None:
    torch.set_num_threads(1)
    send(parity(ARCHITECTURES[name]))


def page(outcomes: Sequence[Outcome]) -> str:
    """The report: counts by family, then each architecture, failures first."""
    passed = sum(o.status == "pass" for o in outcomes)
    lines = [
        "# Transformers architectures",
        "",
        "Written by `python tests/coverage/architectures.py`: one training step of a small random model on the torch",
        f"backend beside eager PyTorch. transformers {transformers.__version__}, torch {torch.__version__}, onnxtrain "
        f"{onnxtrain.__version__}.",
        "",
        f"**{passed} of {len(outcomes)} pass ({100 * passed / max(len(outcomes), 1):.0f} %).**",
        "",
        "| family | pass | of |",
        "|---|---|---|",
    ]
    total = Counter(ARCHITECTURES[o.model].family for o in outcomes)
    good = Counter(ARCHITECTURES[o.model].family for o in outcomes if o.status == "pass")
    lines += [f"| {family} | {good[family]} | {count} |" for family, count in total.items()]
    if unseen := [name for name in ARCHITECTURES if name not in {o.model for o in outcomes}]:
        lines += ["", f"Of the catalogue {len(unseen)} were not walked this time: {', '.join(unseen)}."]
    failures = [o for o in outcomes if o.status != "pass"]
    if failures:
        lines += ["", "## Failures", "", "| model | kind | reason |", "|---|---|---|"]
        lines += [f"| {o.model} | {o.status} | {_cell(o.reason)} |" for o in sorted(failures, key=_by_kind)]
    lines += [
        "",
        "## Passes",
        "",
        "The number is the largest difference of a gradient, as a part of its largest element.",
    ]
    lines += ["", "| model | family | difference |", "|---|---|---|"]
    order = list(ARCHITECTURES)
    for o in sorted((o for o in outcomes if o.status == "pass"), key=lambda o: order.index(o.model)):
        lines.append(f"| {o.model} | {ARCHITECTURES[o.model].family} | {o.reason} |")
    return "\n".join(lines) + "\n"


def _by_kind(outcome: Outcome) -> tuple[str, str]:
    return outcome.status, outcome.model


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the walk; the exit status is 1 where fewer pass than ``--at-least`` per cent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="run these; without --results no page is written")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are read from here, and new ones added")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each architecture")
    parser.add_argument("--at-least", type=float, default=90, help="per cent that must pass")
    given = parser.parse_args(arguments)
    if unknown := [n for n in given.only or () if n not in ARCHITECTURES]:
        parser.error(f"{unknown[0]} is not in the catalogue")
    transformers.logging.set_verbosity_error()
    known = _read(given.results)
    names = given.only or [name for name in ARCHITECTURES if name not in known]
    for outcome in walk(names, given.jobs, given.limit):
        known[outcome.model] = outcome
        print(f"{outcome.status:16} {outcome.model:45} {outcome.seconds:5.0f} s  {outcome.reason}", flush=True)
        if given.results is not None:
            with given.results.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    outcomes = [known[name] for name in ARCHITECTURES if name in known]
    passed = sum(o.status == "pass" for o in outcomes)
    print(f"{passed} of {len(outcomes)} pass")
    if given.results is not None or not given.only:
        PAGE.write_text(page(outcomes))
    return 0 if 100 * passed >= given.at_least * len(outcomes) else 1


def _read(results: Path | None) -> dict[str, Outcome]:
    """The outcomes of earlier walks, the latest of each architecture."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    return {o.model: o for o in (Outcome(**json.loads(line)) for line in lines) if o.model in ARCHITECTURES}


if __name__ == "__main__":
    sys.exit(main())
