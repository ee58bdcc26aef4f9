"""Walk the architectures of Transformers, timm, torchvision and other libraries; say which train as in eager PyTorch.

    python tests/coverage/architectures.py --jobs 2                      # all; writes architectures.md
    python tests/coverage/architectures.py --only LlamaForCausalLM ...   # some; prints only
    python tests/coverage/architectures.py --families timm               # those of a family, or of a library
    python tests/coverage/architectures.py --results walk.jsonl          # all that walk.jsonl does not have yet
    python tests/coverage/architectures.py --through torch.compile       # by torch.compile(backend="onnxtrain")
    python tests/coverage/architectures.py --device cuda                 # on a device

Each architecture is one training step of the torch backend beside the same step in eager PyTorch, in a process of its
own. A step that differs in float32 is repeated in float64: some models make rounding errors large.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
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
from libraries import load_torchvision, versions
from others import OTHERS, OtherModel
from vision import VISION, ImageModel

from onnxtrain import Options, ORTModule
from onnxtrain.errors import OnnxTrainError
from onnxtrain.torchdynamo import onnxtrain as backend

WAYS = ("ORTModule", "torch.compile")
OPTIONS = {"backend": "torch", "summary": False, "density_threshold": 0.95}
PAGE = Path(__file__).with_name("architectures.md")
RATE = 0.05
NOISIER = 10  # times as far from float64 as eager is: no more than rounding in another order
Model = Architecture | ImageModel | OtherModel
MODELS: dict[str, Model] = ARCHITECTURES | VISION | OTHERS


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one architecture fared.

    Args:
        model: the class.
        status: ``"pass"``, or the kind of failure: the error's class, ``"differs"``, ``"eager"`` where the model does
            not run at all, ``"time"``, ``"crash"``.
        reason: one line; for a pass the largest relative difference of a gradient.
        judged: the type that the comparison was made in.
        seconds: of the worker.
    """

    model: str
    status: str
    reason: str
    judged: str = "float32"
    seconds: float = 0.0


class Failure(Exception):
    """A kind of failure and its reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: its loss, and the model after it with the gradients on its parameters."""

    loss: float
    model: torch.nn.Module

    def gradients(self) -> dict[str, torch.Tensor]:
        """By the names of the parameters; zeros where a parameter has none."""
        parameters = self.model.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers after the step."""
        return dict((*self.model.named_parameters(), *self.model.named_buffers()))


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What counts as the same.

    Args:
        loss: of the loss.
        close: of a gradient's largest element.
        noise: of the largest gradient of all.
        value: of a parameter and of a buffer after the step.
    """

    loss: float
    close: float
    noise: float
    value: float


SINGLE = Tolerance(loss=1e-4, close=1e-3, noise=1e-5, value=1e-3)
DOUBLE = Tolerance(loss=1e-9, close=1e-6, noise=1e-11, value=1e-6)


def parity(architecture: Model, way: str = WAYS[0], device: str = "cpu") -> Outcome:
    """One step of the graph beside one of eager PyTorch: loss, gradients, parameters and buffers after it.

    Where float32 differs, float64 judges.
    """
    try:
        single = _steps(architecture, torch.float32, way, device)
        try:
            return Outcome(architecture.model, "pass", f"{_compare(*single, SINGLE):.0e}")
        except Failure as failure:
            if failure.status != "differs":
                raise
            reason = _in_double(architecture, single, str(failure), way, device)
            return Outcome(architecture.model, "pass", reason, "float64")
    except Failure as failure:
        return Outcome(architecture.model, failure.status, str(failure))


def _in_double(architecture: Model, single: tuple[Step, Step], reason: str, way: str, device: str) -> str:
    """The difference in float64 where this is all there is, and float32 is as far from it in eager as in the graph."""
    try:
        double = _steps(architecture, torch.float64, way, device)
        worst = _compare(*double, DOUBLE)
    except Failure as failure:
        raise Failure("differs", f"{reason}; in float64: {failure}") from failure
    eager, ours = (_difference(double[0], step, SINGLE)[0] for step in single)
    if not ours <= NOISIER * eager:
        raise Failure("differs", f"{reason}; from float64 by {ours:.0e}, eager by {eager:.0e}")
    return f"{worst:.0e}"


def _steps(architecture: Model, kind: torch.dtype, way: str, device: str) -> tuple[Step, Step]:
    """The step in eager PyTorch, and that of the graph."""
    torch.manual_seed(0)
    try:
        eager = architecture.build().to(device, kind)
        given = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(device, kind if t.is_floating_point() else None), architecture.batch()
        )
        ours = copy.deepcopy(eager)
        expected = _step(eager, given)
    except Exception as error:  # a configuration that the class does not take
        raise Failure("eager", _line(error)) from error
    try:
        found = _step(_through(way, ours), given)
    except OnnxTrainError as error:
        where = ", ".join(part for part in (error.node, error.source.rsplit("/", 1)[-1]) if part)
        raise Failure(type(error).__name__, f"{error.what} ({where})" if where else error.what) from error
    except Exception as error:
        raise Failure(type(error).__name__, _line(error)) from error
    return Step(expected, eager), Step(found, ours)


def _through(way: str, module: torch.nn.Module) -> Any:
    """The module as its graph runs it."""
    if way == "ORTModule":
        return ORTModule(module, options=Options(**OPTIONS))
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, options=OPTIONS, dynamic=True)


def _step(model: torch.nn.Module, given: dict[str, Any]) -> float:
    """Loss of one step of plain gradient descent; the gradients stay on the parameters."""
    torch.manual_seed(1)  # what both draw
    output = model(**copy.deepcopy(given))
    loss = getattr(output, "loss", None)
    if loss is None:
        leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        loss = torch.stack([t.square().mean() for t in leaves]).sum()
    loss.sum().backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    return loss.detach().sum().item()


def _compare(expected: Step, found: Step, tolerance: Tolerance) -> float:
    """The largest relative difference of a gradient; a failure where it or anything else differs."""
    if not abs(found.loss - expected.loss) <= tolerance.loss * (abs(expected.loss) + 1e-2):
        raise Failure("differs", f"the loss is {found.loss:.6g}, in eager {expected.loss:.6g}")
    largest = _largest(expected)
    if not largest > 0:
        raise Failure("eager", f"no gradient to compare: the largest is {largest}")
    worst, name = _difference(expected, found, tolerance)
    if not worst <= tolerance.close:
        raise Failure("differs", f"the gradient of {name} by {worst:.1e} of its largest element")
    values = found.values()
    for name, value in expected.values().items():
        near = tolerance.value * RATE * largest + tolerance.loss * 1e-3
        if not torch.allclose(values[name].double(), value.double(), rtol=tolerance.value, atol=near):
            raise Failure("differs", f"{name} after the step")
    return worst


def _difference(expected: Step, found: Step, tolerance: Tolerance) -> tuple[float, str]:
    """The largest difference of a gradient as a part of its largest element, and whose it is."""
    worst, worst_name, gradients = 0.0, "", found.gradients()
    floor = _largest(expected) * tolerance.noise / tolerance.close + 1e-30
    for name, gradient in expected.gradients().items():
        apart = gradients[name].to(gradient.dtype) - gradient
        error = float(apart.abs().max() / (gradient.abs().max() + floor)) if gradient.numel() else 0.0
        if not error <= worst:
            worst, worst_name = error, name
    return worst, worst_name


def _largest(step: Step) -> float:
    return max((float(g.abs().max()) for g in step.gradients().values() if g.numel()), default=0.0)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines[0] if lines else ''} ({Path(place.filename).name}:{place.lineno})"


def walk(names: Sequence[str], jobs: int, limit: float, way: str = WAYS[0], device: str = "cpu") -> Iterator[Outcome]:
    """The outcomes in the order they come; each architecture in a process of its own, ended after ``limit`` seconds."""
    ends = {"time": f"above {limit:.0f} s", "crash": "the process ended without an answer"}
    for done in workers.run(functools.partial(_work, way, device), names, jobs, limit):
        outcome = done.results[0] if done.results else Outcome(done.job, done.end, ends[done.end])
        yield dataclasses.replace(outcome, seconds=done.seconds)


def _work(way: str, device: str, name: str, send: Callable[[Outcome], None]) -> None:
    torch.set_num_threads(1)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 is what is compared
        send(parity(MODELS[name], way, device))


def page(outcomes: Sequence[Outcome]) -> str:
    """The report: counts by family, then each architecture, failures first."""
    passed = sum(o.status == "pass" for o in outcomes)
    lines = [
        "# Architectures",
        "",
        "Written by `python tests/coverage/architectures.py`: one training step of a small random model on the torch",
        "backend beside eager PyTorch: loss, gradients, and parameters after it.",
        f"{versions('transformers', 'timm', 'torchvision', 'torch', 'onnxtrain')}.",
        "",
        f"**{passed} of {len(outcomes)} pass ({100 * passed / max(len(outcomes), 1):.0f} %).** {_families(outcomes)}",
        "",
        "| family | pass | of |",
        "|---|---|---|",
    ]
    total = Counter(MODELS[o.model].family for o in outcomes)
    good = Counter(MODELS[o.model].family for o in outcomes if o.status == "pass")
    lines += [f"| {family} | {good[family]} | {count} |" for family, count in total.items()]
    if unseen := [name for name in MODELS if name not in {o.model for o in outcomes}]:
        lines += ["", f"Of the catalogue {len(unseen)} were not walked this time: {', '.join(unseen)}."]
    failures = [o for o in outcomes if o.status != "pass"]
    if failures:
        lines += ["", "## Failures", "", "| model | kind | reason |", "|---|---|---|"]
        lines += [f"| {o.model} | {o.status} | {_cell(o.reason)} |" for o in sorted(failures, key=_by_kind)]
    lines += [
        "",
        "## Passes",
        "",
        "The number is the largest difference of a gradient, as a part of its largest element: at most "
        f"{SINGLE.close:.0e}.",
        "Where float32 differs by more, float64 judges: there the difference is at most "
        f"{DOUBLE.close:.0e}, and the graph in",
        f"float32 is no more than {NOISIER} times as far from float64 as eager PyTorch in float32 is.",
    ]
    lines += ["", "| model | family | difference |", "|---|---|---|"]
    order = list(MODELS)
    for o in sorted((o for o in outcomes if o.status == "pass"), key=lambda o: order.index(o.model)):
        judged = "" if o.judged == "float32" else f" in {o.judged}"
        lines.append(f"| {o.model} | {MODELS[o.model].family} | {o.reason}{judged} |")
    return "\n".join(lines) + "\n"


def _families(outcomes: Sequence[Outcome]) -> str:
    """How many families of timm there are, each a module of it, and all models of how many of them pass."""
    timm = [(o.model.split(".")[1], o.status) for o in outcomes if o.model.startswith("timm.")]
    families, failed = {name for name, _ in timm}, {name for name, status in timm if status != "pass"}
    return f"Of timm's families {len(families - failed)} of {len(families)}." if timm else ""


def _by_kind(outcome: Outcome) -> tuple[str, str]:
    return outcome.status, outcome.model


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the walk; the exit status is 1 where fewer pass than ``--at-least`` per cent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="run these; without --results no page is written")
    parser.add_argument("--families", nargs="+", metavar="FAMILY", help="run those whose family begins so")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are read from here, and new ones added")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each architecture")
    parser.add_argument("--at-least", type=float, default=90, help="per cent that must pass")
    parser.add_argument("--through", choices=WAYS, default=WAYS[0], help="other ways than ORTModule write no page")
    parser.add_argument("--device", default="cpu", help="where both train; others than the CPU write no page")
    given = parser.parse_args(arguments)
    if unknown := [n for n in given.only or () if n not in MODELS]:
        parser.error(f"{unknown[0]} is not in the catalogue")
    prepare()
    known = _read(given.results)
    names = given.only or [n for n in MODELS if n not in known and _among(MODELS[n].family, given.families)]
    for outcome in walk(names, given.jobs, given.limit, given.through, given.device):
        known[outcome.model] = outcome
        print(f"{outcome.status:16} {outcome.model:45} {outcome.seconds:5.0f} s  {outcome.reason}", flush=True)
        if given.results is not None:
            with given.results.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    outcomes = [known[name] for name in MODELS if name in known]
    passed = sum(o.status == "pass" for o in outcomes)
    print(f"{passed} of {len(outcomes)} pass")
    usual = given.through == WAYS[0] and given.device == "cpu"
    if usual and (given.results is not None or not (given.only or given.families)):
        PAGE.write_text(page(outcomes))
    return 0 if 100 * passed >= given.at_least * len(outcomes) else 1


def _among(family: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or family.startswith(tuple(wanted))


def prepare() -> None:
    """Import what is imported once for all processes, quietly."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    load_torchvision()
    if importlib.util.find_spec("timm") is not None:
        importlib.import_module("timm")


def _read(results: Path | None) -> dict[str, Outcome]:
    """The outcomes of earlier walks, the latest of each architecture."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    return {o.model: o for o in (Outcome(**json.loads(line)) for line in lines) if o.model in MODELS}


if __name__ == "__main__":
    sys.exit(main())
