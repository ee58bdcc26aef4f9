"""Errors that say what failed, on which node, from which source line, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class OnnxTrainError(Exception):
    """Base of every error raised on purpose by onnxtrain.

    Args:
        what: one sentence saying what failed.
        node: the graph node concerned, printed as ``Op(name)``; empty where there is none.
        source: the user's source line, printed as ``file:line``; empty where it is not known.
        cure: one sentence saying what to do about it.
    """

    def __init__(self, what: str, *, node: str = "", source: str = "", cure: str = "") -> None:
        self.what, self.node, self.source, self.cure = what, node, source, cure
        rows = [("node", node), ("source", source), ("cure", cure)]
        super().__init__("\n".join([what] + [f"  {name}: {text}" for name, text in rows if text]))


class OptionError(OnnxTrainError, ValueError):
    """An option or environment variable has a value that cannot be used."""


class ModuleError(OnnxTrainError, TypeError):
    """The object to be wrapped is not a module that can be trained through the graph."""


class UnsupportedDataError(OnnxTrainError, TypeError):
    """An input or output of the module has a type that cannot cross the graph's border."""


class DeviceError(OnnxTrainError, RuntimeError):
    """The module's tensors or inputs are on more than one device."""


class CaptureError(OnnxTrainError, RuntimeError):
    """The forward pass could not be captured as one graph."""


class ContentError(CaptureError):
    """A line steers the forward pass by what is in a tensor, and nothing was said of what it saw.

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

    Args:
        generator: which; the function that sets the seed.
        source: the line.
        is_seed: whether a seed is set.
    """

    def __init__(self, generator: str, source: str = "", is_seed: bool = False) -> None:
        does = f"calls {generator}" if is_seed else f"draws random numbers from {generator}"
        draws = "draw them by torch: torch.rand(()) < p decides on a path, torch.where on numbers"
        super().__init__(
            f"the forward pass {does}, which a graph does not",
            source=source,
            cure="set the seed outside of forward, or pass the random numbers as an input" if is_seed else draws,
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
    """The shapes or types of a node's inputs contradict each other."""


class GraphError(OnnxTrainError, RuntimeError):
    """A graph is malformed: found by ``verify`` between two passes."""


class GradientError(OnnxTrainError, RuntimeError):
    """The graph cannot be differentiated: a rule is missing or a value is not differentiable."""


class RuleError(OnnxTrainError, RuntimeError):
    """A gradient rule has a fault: it raised what is not an error of ours."""


class BackendError(OnnxTrainError, RuntimeError):
    """A backend cannot run the plan."""


class BudgetError(OnnxTrainError, MemoryError):
    """No step fits into the memory budget."""


class OptimizerError(OnnxTrainError, RuntimeError):
    """An optimizer cannot step within the backward pass, or is asked for what it cannot do there."""


class VerificationError(OnnxTrainError, AssertionError):
    """Loss, outputs, gradients or buffers differ from eager PyTorch by more than the tolerance."""


class ArtifactError(OnnxTrainError, ValueError):
    """Training artifacts cannot be made of a model, or a file of theirs cannot be used."""


class CheckpointError(OnnxTrainError, ValueError):
    """A checkpoint cannot be read, or is not one of this model."""


class WriteError(OnnxTrainError, OSError):
    """A file cannot be written; what was there is still there."""


class DataError(OnnxTrainError, ValueError):
    """A batch cannot be trained on: wrong type or shape, no rows, labels out of range."""


class HookError(OnnxTrainError, RuntimeError):
    """A subscriber asks for something that its place in the step does not allow."""


def close_to(name: str, known: Iterable[str]) -> str:
    """``; close names: a, b`` for an error about a name that is not known, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"; close names: {', '.join(found)}" if found else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something; its type where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
