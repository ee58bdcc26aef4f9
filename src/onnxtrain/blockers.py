"""What keeps a model from being trained: everything at once and before any step, not the first error of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from onnxtrain.compiler import Report as Compilation
from onnxtrain.compiler import compile_graph
from onnxtrain.errors import GradientError, GraphError, OnnxTrainError
from onnxtrain.execute import backend
from onnxtrain.files import check_file
from onnxtrain.gradient import build_gradient, gradient_errors, tracked_outputs
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.reading import read_forward
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.options import Options


@dataclasses.dataclass(frozen=True)
class Blocker:
    """One thing that keeps a model from being trained.

    Args:
        kind: the class of the error that a step would raise, such as ``"GradientError"``.
        what: one sentence saying what is wrong.
        node: the graph node concerned, ``Op(name)``; empty where there is none.
        source: the user's source line, ``file:line``; empty where it is not known.
        cure: one sentence saying what to do about it.
    """

    kind: str
    what: str
    node: str
    source: str
    cure: str

    @classmethod
    def of(cls, error: OnnxTrainError) -> Blocker:
        """The blocker that an error stands for."""
        return cls(type(error).__name__, error.what, error.node, error.source, error.cure)


@dataclasses.dataclass(frozen=True)
class Check:
    """What was found; prints well, and is true where nothing blocks.

    Args:
        subject: the model or module.
        backend: the backend that was asked.
        blockers: all that was found, in the order of the stages.
        notes: what does not block and is worth knowing.
    """

    subject: str
    backend: str
    blockers: tuple[Blocker, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.blockers

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"trainable": bool(self), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        if self.blockers:
            head = f"{self.subject} cannot be trained on the {self.backend} backend: {_count(len(self.blockers))}"
        else:
            head = f"{self.subject} can be trained on the {self.backend} backend"
        groups: dict[tuple[str, str], list[Blocker]] = {}
        for found in self.blockers:
            groups.setdefault((found.what, found.cure), []).append(found)
        lines = [head]
        for (what, cure), members in groups.items():
            lines.append(f"\n  {what}")
            places = dict.fromkeys("  ".join(p for p in (m.node, m.source) if p) for m in members)
            lines += [f"    at {place}" for place in places if place]
            lines += [f"    cure: {cure}"] if cure else []
        return "\n".join([*lines, *(f"\n  note: {note}" for note in self.notes)])


def _count(number: int) -> str:
    return f"{number} thing{'s' if number != 1 else ''} in the way"


def make_check(subject: str, options: Options, errors: Iterable[OnnxTrainError], notes: Sequence[str] = ()) -> Check:
    """The result for a list of errors; one that is found twice is told once."""
    found = tuple(dict.fromkeys(Blocker.of(error) for error in errors))
    return Check(subject, backend(options.backend).name, found, tuple(notes))


def graph_errors(
    graph: ForwardGraph, options: Options, device: str = "cpu", outputs: Sequence[str] | None = None
) -> list[OnnxTrainError]:
    """All errors that differentiating and compiling an optimized graph would raise; the graph is not changed.

    Args:
        graph: the forward pass; what is trained is ``signature.differentiable``.
        options: says which backend.
        device: where it would run.
        outputs: the outputs that receive a gradient; None is all of them.
    """
    chosen = backend(options.backend)
    if not tracked_outputs(graph):
        return [GradientError("no output depends on what is trained", cure="train parameters that the outputs read")]
    model, errors = gradient_errors(graph, outputs)
    if errors:  # of the backward pass there are at least the nodes of the rules that exist
        return errors + chosen.unsupported(list(model.graph))
    training = build_gradient(graph, outputs)
    optimize_training(training, check=False)
    errors += chosen.unsupported(list(training.model.graph))
    if not errors:
        try:
            named = graph.signature.outputs if outputs is None else outputs
            compile_graph(graph, graph.signature.differentiable, named, options, Compilation(), device)
        except OnnxTrainError as error:
            errors.append(error)
    return errors


def check_model(path: Path | str, *, options: Options | None = None, parameters: Sequence[str] = ()) -> Check:
    """Whether an ``.onnx`` file can be trained, and all that is in the way.

    Args:
        path: the file.
        options: says which backend.
        parameters: names or patterns of the initializers to train; all floating ones where there is none.

    Raises:
        BackendError: the package of the backend is not installed.
        GraphError: there is no such file.
    """
    options = options or Options()
    subject = Path(path).name
    check_file(path, GraphError, "give the path of an .onnx file")
    try:
        graph = read_forward(path, parameters)
        optimize(graph, options, check=False)
        errors = graph_errors(graph, options)
    except OnnxTrainError as error:
        return make_check(subject, options, [error])
    return make_check(subject, options, errors, [f"{len(graph.signature.parameters)} initializers would be trained"])
