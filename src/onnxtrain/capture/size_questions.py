"""What is asked of sizes while a module is traced, and which answers decide on the result."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch._export import non_strict_utils
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, RuntimeAssert
from torch.utils._traceback import CapturedTraceback

from onnxtrain import errors
from onnxtrain.capture import looks, sizes_as_numbers, substitutes, tensor_questions
from onnxtrain.capture.assertions import expected, tell
from onnxtrain.capture.looks import place_of, user_frame
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import is_caught, is_users

# Functions of torch that ask about sizes only to choose between equal results: how a tensor lies in memory
_ABOUT_MEMORY = frozenset(
    (
        *("check_contiguous_sizes_strides", "is_contiguous", "is_contiguous_or_false", "suggest_memory_format"),
        *("are_strides_like_channels_last", "are_strides_like_channels_last_or_false"),
        *("is_channels_last_contiguous_2d", "is_channels_last_contiguous_3d", "compute_elementwise_output_strides"),
        *("is_non_overlapping_and_dense", "is_non_overlapping_and_dense_or_false"),
    )
)
# Functions of torch that choose the size of a result
_ABOUT_SIZES = frozenset(("_compute_slice_index", "slice_forward"))
ASKED = "propagate_real_tensors"  # how torch marks a question that it answered with a number it was told
CAUGHT = "caught at "  # how a requirement is marked that is to be asked, and the line of the user's code
_ANSWERING = (substitutes.__file__, tensor_questions.__file__, looks.__file__)  # in the place of functions of torch
_LAYERS = tuple(str(Path(torch.__file__).parent / part) for part in ("nn", "distributions", "functional.py"))


def decides(found: sympy.Basic, name: str, file: str) -> bool:
    """Whether the answer to a question about sizes decides on the result.

    Where operators of torch find that two sizes differ, it is for broadcasting, which a graph does again, or about
    memory; its layers choose what they compute, as the user does.

    Args:
        found: what was found to be so.
        name: the function that asked.
        file: where it is written.
    """
    return _chooses(file) or (not isinstance(found, sympy.Ne) and name not in _ABOUT_MEMORY)


def _chooses(file: str) -> bool:
    """Whether a file's code chooses what is computed: the user's, layers of torch, and what stands in their place."""
    return is_users(file) or file in _ANSWERING or file.startswith(_LAYERS)


@contextlib.contextmanager
def noted_answers(
    tensors: Sequence[torch.Tensor], found: set[sympy.Basic], of_memory: set[sympy.Basic]
) -> Iterator[None]:
    """Note what torch answers without a guard because it takes each symbol to be 2 or more.

    Args:
        tensors: the inputs, as torch.export passes them to the forward pass.
        found: receives what holds from 2 on, perhaps not below, and decides on the result.
        of_memory: receives what was answered about how tensors lie in memory (``apart_from_memory``).
    """
    sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    if not sizes:
        yield
        return
    environment = sizes[0].node.shape_env
    ask = _apart(environment, of_memory)

    def note(question: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = ask(question, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if (passes := _that_passes()) is None:
                errors.note(error)
                raise
            return passes
        if (relation := _deciding(question, answer, sys._getframe(1))) is not None:
            found.add(relation)
        return answer

    with replaced(
        (environment, "evaluate_expr", note),
        (environment, "guard_or_defer_runtime_assert", _caught_or_deferred(environment)),
        (symbolic_shapes, "uninteresting_files", _machinery),  # a guard was asked for there, not here
    ):
        yield


def _caught_or_deferred(environment: Any) -> Callable[..., bool]:
    """What torch requires of numbers that depend on content is required where a graph runs.

    Where the user's code catches an error it is asked instead: the answer decides what is computed. Not of a size that
    an operator is about to make, which is what it has to be.
    """
    defer = environment.guard_or_defer_runtime_assert

    def require(relation: Any, message: str, *args: Any, **kwargs: Any) -> bool:
        frame = None if message.startswith(ASKED) else user_frame()
        is_made = not relation.free_symbols.isdisjoint(environment.pending_fresh_unbacked_symbols)
        if frame is None or is_made or not is_caught(frame):
            return defer(relation, message, *args, **kwargs)
        try:
            holds = bool(environment.evaluate_expr(relation))
        except GuardOnDataDependentSymNode:
            return defer(relation, f"{CAUGHT}{place_of(frame)}", *args, **kwargs)
        for size in relation.free_symbols & environment.size_like if not holds else ():  # torch takes it for 2 or more
            is_other: Any = sympy.Ne(size, 1)
            assertion = RuntimeAssert(is_other, ASKED, CapturedTraceback.extract())
            environment.deferred_runtime_asserts.setdefault(size, []).append(assertion)
        return holds

    return require


def apart_from_memory(environment: Any, found: set[sympy.Basic]) -> contextlib.AbstractContextManager[None]:
    """Within it answers about how tensors lie in memory are no guards: torch would take them to hold from then on.

    A size that is 1 makes a tensor contiguous, say; results are of that size then, whatever it is in the next call.

    Args:
        environment: of the sizes, torch's; None where all are numbers.
        found: receives what was answered.
    """
    return replaced(*([(environment, "evaluate_expr", _apart(environment, found))] if environment is not None else []))


def _apart(environment: Any, found: set[sympy.Basic]) -> Callable[..., Any]:
    ask = environment.evaluate_expr

    def answer(question: Any, *args: Any, **kwargs: Any) -> Any:
        if _asking(sys._getframe(1)).f_code.co_name not in _ABOUT_MEMORY:
            return ask(question, *args, **kwargs)
        with environment.suppress_guards():
            given = ask(question, *args, **kwargs)
        if isinstance(question, Boolean):
            found.add(question if given else sympy.Not(question))
        return given

    return answer


def _that_passes() -> sympy.Basic | None:
    """The answer that lets a check of a number pass, which a tensor holds; None where it is more than a check."""
    frame = user_frame()
    answer = None if frame is None else expected(frame)
    if frame is None or answer is None:
        return None
    tell(place_of(frame))
    return sympy.true if answer else sympy.false


def _deciding(question: Any, answer: Any, frame: Any) -> sympy.Basic | None:
    """What an answer says that decides on the result and may be no guard; None where there is nothing.

    Args:
        question: about sizes.
        answer: torch's.
        frame: that asked.
    """
    if (relation := _beyond_ones(question, answer)) is None:  # broadcasting may have asked, which decided nothing
        different = _different(question, answer)
        return different if different is not None and _chooses(_asking(frame).f_code.co_filename) else None
    asking = _asking(frame).f_code
    is_number = not isinstance(question, Boolean) and asking.co_name not in _ABOUT_MEMORY
    is_chosen = _chooses(asking.co_filename) or asking.co_name in _ABOUT_SIZES
    is_of_composites = _is_empty(question) and asking.co_filename == torch._ops.__file__
    return relation if is_number or is_chosen or is_of_composites else None


@functools.lru_cache(4096)
def _beyond_ones(question: Any, answer: Any) -> sympy.Basic | None:
    """What an answer says, a number or whether something is so; None where it says the same if one of the sizes is 1.

    Whatever the others are.
    """
    answer = sympy.sympify(answer)
    if not isinstance(question, sympy.Basic) or not isinstance(answer, sympy.Basic):
        return None
    ones = [settled(question, {symbol: sympy.Integer(1)}) for symbol in question.free_symbols]
    if all(one == answer for one in ones):
        return None
    if answer.is_number:
        return sympy.Eq(question, answer, evaluate=False)
    return question if answer else sympy.Not(question)


def _is_empty(question: Any) -> bool:
    """Whether it is asked if there is nothing in a tensor, of which operators made of others compute something else."""
    return isinstance(question, sympy.Eq) and question.rhs == 0


@functools.lru_cache(4096)
def _different(question: Any, answer: Any) -> sympy.Basic | None:
    """That two sizes differ, where an answer says so."""
    if not isinstance(question, Boolean) or not question.free_symbols:
        return None
    relation = question if answer else sympy.Not(question)
    return relation if isinstance(relation, sympy.Ne) else None


def settled(relation: sympy.Basic, values: Mapping[Any, sympy.Basic]) -> sympy.Basic | None:
    """What a relation says of these sizes, or None where it says nothing.

    torch's arithmetic of sizes raises there: a division by a size that is 0 now, the remainder of one below 0.
    """
    try:
        return relation.xreplace(values)
    except (ZeroDivisionError, AssertionError):
        return None


def _asking(frame: Any) -> Any:
    """The innermost frame that is not torch's machinery of sizes."""
    machinery = _machinery()
    while frame.f_back is not None and frame.f_code.co_filename in machinery:
        frame = frame.f_back
    return frame


_UNINTERESTING = symbolic_shapes.uninteresting_files


@functools.cache
def _machinery() -> set[str]:
    """The files of torch's machinery of sizes, and those that stand in between; none that may be the user's.

    These are this one, what answers the user in a size's place, and what torch.export has one call for ``max``.
    """
    ours = __file__, sizes_as_numbers.__file__
    return {file for file in _UNINTERESTING() if not is_users(file)} | {*ours, non_strict_utils.__file__}
