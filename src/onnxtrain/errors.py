"""Errors that say what failed, on which node, from which source line, and what to do."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from onnxtrain import processes

_NOTED: ContextVar[list[BaseException] | None] = ContextVar("_NOTED", default=None)


class OnnxTrainError(Exception):
    """Base of every error raised on purpose by onnxtrain.

    Args:
        what: one sentence saying what failed.
        node: the graph node concerned, printed as ``Op(name)``; empty where there is none.
        source: the user's source line, printed as ``file:line``; empty where it is not known.
        cure: one sentence saying what to do about it.

    Where several processes train together the text names the rank. Its last line names the class for ``onnxtrain
    errors``, which tells more.
    """

    def __init__(self, what: str, *, node: str = "", source: str = "", cure: str = "") -> None:
        self.what, self.node, self.source, self.cure = what, node, source, cure
        kind = self.kind()
        more = "" if kind is OnnxTrainError else f"onnxtrain errors {kind.__name__}"
        place = f"{processes.rank()} of {processes.count()}" if processes.count() > 1 else ""
        rows = [("node", node), ("source", source), ("rank", place), ("cure", cure), ("more", more)]
        super().__init__("\n".join([what] + [f"  {name}: {text}" for name, text in rows if text]))
        note(self)

    @classmethod
    def kind(cls) -> type[OnnxTrainError]:
        """The class by which ``onnxtrain errors`` tells more: the first that is defined here."""
        return next(c for c in cls.__mro__ if c.__module__ == __name__ and issubclass(c, OnnxTrainError))

    @classmethod
    def meaning(cls) -> str:
        """What the class means, and what mostly leads to it."""
        return inspect.cleandoc(cls.kind().__doc__ or "").partition("\n\nArgs:")[0]


@contextlib.contextmanager
def noted() -> Iterator[list[BaseException]]:
    """Collect the errors that are made within it, in this thread: the user's code may catch one."""
    made: list[BaseException] = []
    token = _NOTED.set(made)
    try:
        yield made
    finally:
        _NOTED.reset(token)


def note(error: BaseException) -> None:
    """Tell whoever collects errors of one."""
    if (made := _NOTED.get()) is not None:
        made.append(error)


def kinds() -> list[type[OnnxTrainError]]:
    """All classes of errors, in the order of their definition."""
    return [k for k in globals().values() if isinstance(k, type) and issubclass(k, OnnxTrainError)]


class OptionError(OnnxTrainError, ValueError):
    """An option or environment variable has a value that cannot be used.

    Nothing was built or written yet. The message says what there is to choose from.
    """


class ModuleError(OnnxTrainError, TypeError):
    """The object to be wrapped is not a module that can be trained through the graph.

    It is no ``torch.nn.Module``, or it has what a graph would lose, such as hooks of submodules where the graph cannot
    run them; or something was asked that needs a call before it, or for a call that runs in eager PyTorch.
    """


class UnsupportedDataError(OnnxTrainError, TypeError):
    """An input or output of the module has a type that cannot cross the graph's border.

    Tensors, numbers, texts, None, and lists, tuples, dicts and dataclasses of these can; classes of your own where
    ``torch.utils._pytree`` knows how to take them apart.
    """


class DeviceError(OnnxTrainError, RuntimeError):
    """The module's tensors or inputs are on more than one device.

    Mostly the batch was not moved to where the model is, or a buffer stayed behind.
    """


class CaptureError(OnnxTrainError, RuntimeError):
    """The forward pass could not be captured as one graph.

    It does something that a graph would not do again at each call. The source line is where; with
    ``Options(fallback="eager")`` such a module runs in eager PyTorch, which is said once.
    """


class ContentError(CaptureError):
    """A line steers the forward pass by what is in a tensor, and nothing was said of what it saw.

    An ORTModule follows such lines (``if y.sum() > 0``), each way a graph; the address of a tensor, or what torch
    cannot tell in a trace, it cannot follow.

    Args:
        source: the line.
    """

    def __init__(self, source: str) -> None:
        super().__init__(
            "the module's control flow depends on the content of a tensor",
            source=source,
            cure="replace the Python branch by torch.where or torch.cond, or keep that part outside the wrapped module",
        )


class HostRandomError(CaptureError):
    """A forward pass draws random numbers from a generator of Python or numpy, or sets a seed; a graph does neither.

    Such calls run in eager PyTorch, which is said once.

    Args:
        generator: which; the function that sets the seed.
        source: the line.
        is_seed: whether a seed is set.
        cure: what to do about it, where that is something else than usually.
    """

    def __init__(self, generator: str, source: str = "", is_seed: bool = False, cure: str = "") -> None:
        does = f"calls {generator}" if is_seed else f"draws random numbers from {generator}"
        draws = "draw them by torch: torch.rand(()) < p decides on a path, torch.where on numbers"
        super().__init__(
            f"the forward pass {does}, which a graph does not",
            source=source,
            cure="set the seed outside of forward, or pass the random numbers as an input"
            if is_seed
            else cure or draws,
        )
        self.generator = generator


def as_raised_by(own: Exception, error: CaptureError) -> CaptureError:
    """A capture error that is also of the class of what the module itself raises: who expects that catches it.

    Args:
        own: what the module raises in eager PyTorch.
        error: the capture error.
    """
    try:
        kind = type(type(own).__name__, (CaptureError, type(own)), {"__module__": type(own).__module__})
        return kind(error.what, node=error.node, source=error.source, cure=error.cure)
    except TypeError:  # a class whose objects are made of something else
        return error


class NumberError(CaptureError):
    """A forward pass changes a number that it reads, or that a dict or list of the module holds: it counts.

    Numbers in attributes become inputs of the graph by themselves; those in arrays, queues and the like do not.

    Args:
        places: the attributes that hold such numbers; empty where a dict or list holds one.
    """

    def __init__(
        self, what: str, *, node: str = "", source: str = "", cure: str = "", places: Sequence[Any] = ()
    ) -> None:
        super().__init__(what, node=node, source=source, cure=cure)
        self.places = tuple(places)

    @classmethod
    def of_all(cls, errors: Sequence[NumberError]) -> NumberError:
        """The first of several with the places of all; the first that has none, where there is one."""
        first = next((e for e in errors if not e.places), errors[0])
        places = [place for e in errors for place in e.places] if first.places else []
        return cls(first.what, node=first.node, source=first.source, cure=first.cure, places=places)


class SetUpError(CaptureError):
    """A forward pass sets up its module, by layers or parameters that it makes, by what it lets be trained or counts.

    A graph would not do that again; a first call in eager PyTorch does, if later ones leave it alone.

    Args:
        labels: of what is set, by which it is known again.
        what: it does.
        source: the line that does it.
        cure: what to do about it.
    """

    def __init__(self, labels: Sequence[str], what: str, source: str = "", cure: str = "") -> None:
        super().__init__(
            f"the forward pass {what}, at every call",
            source=source,
            cure=cure
            or "do it in __init__, or only where it is not done yet: the first call in eager PyTorch does it then",
        )
        self.labels = tuple(labels)


class ShapeError(OnnxTrainError, ValueError):
    """The shapes or types of a node's inputs contradict each other.

    The model is wrong, or was exported for other sizes than it is given.
    """


class GraphError(OnnxTrainError, RuntimeError):
    """A graph is malformed, or a file is no graph that can be read.

    ``onnxtrain check model.onnx`` says all that is in the way of an ``.onnx`` file at once.
    """


class GradientError(OnnxTrainError, RuntimeError):
    """The graph cannot be differentiated: a rule is missing or a value is not differentiable.

    Or a step cannot go backward any more: its saved values are freed, or were written to in place.
    """


class RuleError(OnnxTrainError, RuntimeError):
    """A gradient rule has a fault: it raised what is not an error of ours.

    Where it is one of your own (``register_gradient``), the exception below is its own; else report it.
    """


class BackendError(OnnxTrainError, RuntimeError):
    """A backend cannot run the plan.

    It has no kernel for an operator or a type, or cannot tell what is asked of it; ``onnxtrain ops`` lists what runs
    where.
    """


class BudgetError(OnnxTrainError, MemoryError):
    """No step fits into the memory budget.

    The message says the least that would do, and what is in use there.
    """


class OptimizerError(OnnxTrainError, RuntimeError):
    """An optimizer cannot step within the backward pass, or is asked for what it cannot do.

    Parameters are as they were before.
    """


class VerificationError(OnnxTrainError, AssertionError):
    """Loss, outputs, gradients or buffers differ from eager PyTorch by more than the tolerance.

    The module computes from something that differs between two calls, such as the time; or the graph is wrong: report
    it.
    """


class ArtifactError(OnnxTrainError, ValueError):
    """Training artifacts cannot be made of a model, or a file of theirs cannot be used.

    Nothing was written; files that were there are as they were.
    """


class CheckpointError(OnnxTrainError, ValueError):
    """A checkpoint cannot be read, or is not one of this model.

    The state that was loaded before stays as it is.
    """


class WriteError(OnnxTrainError, OSError):
    """A file cannot be written; what was there is still there."""


class DataError(OnnxTrainError, ValueError):
    """A batch cannot be trained on: wrong type or shape, no rows, labels out of range.

    No parameter was changed by it.
    """


class HookError(OnnxTrainError, RuntimeError):
    """A subscriber asks for something that its place in the step does not allow.

    See the page on hooks for what each may do.
    """


def close_to(name: str, known: Iterable[str]) -> str:
    """``; close names: a, b`` for an error about a name that is not known, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"; close names: {', '.join(found)}" if found else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something; its type where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
