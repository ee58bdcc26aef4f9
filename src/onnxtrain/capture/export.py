"""nn.Module → ExportedProgram: ``torch.export``, every input dimension dynamic, training semantics kept."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Collection, Iterator, Sequence

import sympy
import torch

from onnxtrain.capture import (  # noqa: F401  (substitutes)
    autocast_functions,
    gradient_hooks,
    indexing,
    inference_regions,
    loss_functions,
    node_hooks,
    normalization_layers,
    quantized_layers,
)
from onnxtrain.capture.changed_parameters import ChangedParametersError
from onnxtrain.capture.flat_module import FlatModule, Result
from onnxtrain.capture.found_elsewhere import AdoptedError
from onnxtrain.capture.left_outside import LeftOutsideError, take_out_of_others, take_out_refused
from onnxtrain.capture.recorder import recorder, recording, take_out_raised
from onnxtrain.capture.replay import MoreLooksError, lacks_content
from onnxtrain.capture.rewritten import Copied, is_trained_leaf, lines_of_changes, may_be_changed
from onnxtrain.capture.size_guards import size_guards, taken_for_content
from onnxtrain.capture.source_lines import line_of_error
from onnxtrain.capture.symbolic_sizes import Axis, ConstantSizesError, axes_of, expression_of
from onnxtrain.errors import (
    CaptureError,
    ContentError,
    HostRandomError,
    NumberError,
    OnnxTrainError,
    SetUpError,
    first_line,
)

_AS_THEY_ARE = (  # what others than the user take
    AdoptedError,
    ChangedParametersError,
    ContentError,
    HostRandomError,
    LeftOutsideError,
    NumberError,
    SetUpError,
)
_LARGER = 4  # the least size that an axis of size 1 is traced at: what is one or two less is no 1 either


def export(
    module: FlatModule,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    constant: Collection[Axis] = (),
) -> torch.export.ExportedProgram:
    """Capture the forward pass with all dimensions dynamic but those that are to be constant.

    A dimension of size 1 would be taken for a constant, so it is captured as if it were larger; where the module
    needs it to be 1 (a mask broadcast over heads), it stays 1. Dimensions that make overgrown sizes (the image's
    height and width in Swin) become constants, and only those: a new height then makes a new graph, a new batch not.

    Raises:
        CaptureError: the module's control flow depends on data, or it cannot be traced; names the source line.
        LeftOutsideError: it leaves a tensor outside of itself, where a call in eager PyTorch may leave it for good.
    """
    fixed = frozenset(constant)
    while True:
        try:
            program = _export_any(module, tensors, fixed)
        except ConstantSizesError as sizes:
            fixed |= sizes.axes
        except AdoptedError as written:
            module.adopt(written.tensor)
        except ChangedParametersError:
            continue
        except CaptureError as error:
            if not (changed := may_be_changed(tensors, error) - module.copied.keys()):
                raise
            module.copied |= {i: Copied(error.source, is_trained_leaf(tensors[i])) for i in changed}
        else:
            if module.result.assumed.gradients and torch.is_grad_enabled() != module.gradients:
                module.gradients = False  # what it asked has another answer in this call
            elif changed := module.result.changed - module.copied.keys():
                lines = lines_of_changes(program, changed)
                module.copied |= {i: Copied(line, is_trained_leaf(tensors[i])) for i, line in lines.items()}
            elif not module.finds_state(program):
                return program


def _export_any(
    module: FlatModule, tensors: Sequence[torch.Tensor], constant: frozenset[Axis]
) -> torch.export.ExportedProgram:
    errors: list[Exception] = []
    for example, kept in _examples(tensors, constant):
        try:
            program = _export(module, example, kept)
            while ones := _mistaken(program, tensors, example, module.result):
                kept |= ones
                example = _enlarged(tensors, kept)
                program = _export(module, example, kept)
            if module.result.outside is not None and not module.result.outside.is_cache:
                raise module.result.outside
            return program
        except _AS_THEY_ARE:
            raise
        except MoreLooksError as error:  # once for each element, of which the example has more than the call
            errors.append(error)
        except CaptureError as error:
            raise CaptureError(error.what, source=error.source or line_of_error(error), cure=error.cure) from None
        except (OnnxTrainError, ConstantSizesError):
            raise
        except Exception as error:  # torch.export raises many types
            errors.append(error)
    told = errors[-1] if isinstance(errors[-1], CaptureError) else _explain(errors[-1])
    is_of_sizes = not isinstance(errors[-1], CaptureError) and not isinstance(told, ContentError) and told.source
    if is_of_sizes and (sizes := axes_of(tensors) - constant):  # perhaps: what takes no symbol takes a number
        raise ConstantSizesError(sizes)
    raise told from errors[-1]


def _examples(
    tensors: Sequence[torch.Tensor], constant: frozenset[Axis]
) -> Iterator[tuple[list[torch.Tensor], frozenset[Axis]]]:
    """Examples with size-1 dimensions enlarged: all of them, those of the first two axes, of the batch axis, none.

    With each come the axes that are constant in it.
    """
    seen: set[tuple[torch.Size, ...]] = set()
    for axes in (8, 2, 1, 0):
        kept = constant | {(i, a) for i, t in enumerate(tensors) for a in range(axes, t.dim()) if t.shape[a] == 1}
        example = _enlarged(tensors, kept)
        sizes = tuple(t.shape for t in example)
        if sizes not in seen:
            seen.add(sizes)
            yield example, kept


def _enlarged(tensors: Sequence[torch.Tensor], kept: frozenset[Axis]) -> list[torch.Tensor]:
    """The tensors with other axes of size 1 larger: by a size that no axis has."""
    taken = {size for t in tensors for size in t.shape}
    larger = next(size for size in itertools.count(_LARGER) if size not in taken)
    return [_enlarge(t, {a for a in range(t.dim()) if (i, a) not in kept}, larger) for i, t in enumerate(tensors)]


def _mistaken(
    program: torch.export.ExportedProgram,
    tensors: Sequence[torch.Tensor],
    example: Sequence[torch.Tensor],
    result: Result,
) -> frozenset[Axis]:
    """The axes of size 1 that must stay 1.

    Enlarged they became a constant, the same symbol as another size or a part of one that 1 does not give, were kept
    where 1 would have been squeezed, met a size that depends on content, or gave another answer to a question than 1
    would have given; and all where a call raised, as 1 might not.
    """
    assumed = result.assumed
    users = set(program.graph_signature.user_inputs)
    traced = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in users]
    sizes = [(i, a, expression_of(d)) for i, x in enumerate(traced) for a, d in enumerate(x.shape)]
    larger = {d for i, a, d in sizes if tensors[i].shape[a] != 1 and not d.is_number} | assumed.not_one
    ones = [(i, a, d) for i, a, d in sizes if tensors[i].shape[a] == 1 and example[i].shape[a] != 1]
    broken = size_guards(program, assumed).broken_by([t.shape for t in tensors]) if ones else frozenset()
    real = {d: sympy.Integer(tensors[i].shape[a]) for i, a, d in sizes if d.is_Symbol}
    unequal = {s for i, a, d in sizes if d.xreplace(real) != tensors[i].shape[a] for s in d.free_symbols}
    larger |= {d for _, _, d in ones if d.free_symbols & unequal}
    larger |= taken_for_content(program) if ones else frozenset()
    return frozenset(
        (i, a) for i, a, d in ones if result.recorded.raised or d.is_number or d in larger or (i, a) in broken
    )


def _enlarge(tensor: torch.Tensor, axes: set[int], larger: int) -> torch.Tensor:
    """The tensor with some axes of size 1 larger, and others farther apart for them in memory."""
    sizes = [larger if size == 1 and axis in axes else size for axis, size in enumerate(tensor.shape)]
    if sizes == list(tensor.shape):
        return tensor
    if tensor.is_contiguous():  # an axis of size 1 may have any step
        return _laid_out(tensor, sizes, torch.empty(sizes, device="meta").stride())
    steps, factor = list(tensor.stride()), 1
    for axis in sorted(range(tensor.dim()), key=lambda axis: (steps[axis], tensor.shape[axis] != 1, -axis)):
        steps[axis] *= factor
        factor *= larger if sizes[axis] != tensor.shape[axis] else 1
    return _laid_out(tensor, sizes, steps)


def _laid_out(tensor: torch.Tensor, sizes: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """A copy of a tensor in memory of its own, expanded to sizes, with steps between its elements there."""
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if all(sizes) else -1
    with torch.no_grad():
        memory = tensor.new_empty(last + 1)
        made = tensor.new_empty(0).set_(memory.untyped_storage(), 0, tuple(sizes), tuple(steps))
        parts = tuple(slice(0, 1 if step == 0 else None) for step in steps)
        made[parts].copy_(tensor.detach().expand(tuple(sizes))[parts])
    return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _without_hooks_left() -> Iterator[None]:
    """Take away torch's own hooks of buffers that are set, which torch 2.11 leaves where a trace raises."""
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = {*hooks}
    try:
        yield
    finally:
        for key in {*hooks} - before:
            del hooks[key]


def _export(
    module: FlatModule, example: Sequence[torch.Tensor], constant: frozenset[Axis]
) -> torch.export.ExportedProgram:
    kinds = (torch.export.Dim.AUTO, torch.export.Dim.STATIC)
    fixed = constant | {(i, a) for i, t in enumerate(example) for a in range(t.dim()) if t.shape[a] == 0}
    dynamic = tuple({a: kinds[(i, a) in fixed] for a in range(t.dim())} for i, t in enumerate(example))
    module.take_back()
    try:
        with _without_hooks_left(), recording(module.gradients), recorder() as module.result.recorded:
            example = [_ordinary(t) for t in example]
            shapes = (dynamic,) if dynamic else None  # what has no inputs (``torch.full``) has no sizes
            program = torch.export.export(module, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        take_out_refused(error, module.result.forget())
        module.result.names.give_back()
        raise
    module.result.recorded.raised = take_out_raised(program)
    module.result.outside = take_out_of_others(*module.result.tracked, program)
    module.result.names.give_back()
    return program


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy where it is of ``torch.inference_mode``, or a view, whose base torch.export would look for."""
    if not tensor.is_inference() and not tensor._is_view():
        return tensor
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return _laid_out(tensor, tensor.shape, tensor.stride())
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _explain(error: Exception) -> CaptureError:
    if lacks_content(error):
        return ContentError(line_of_error(error))
    what = f"the forward pass cannot be captured: {first_line(error)}"
    if isinstance(error, TypeError) and _is_of_the_call(error):
        return CaptureError(what, cure="call it with the arguments that its forward takes")
    cure = (
        "if eager PyTorch runs this line, leave it out of the graph: wrap what is before and after it, each as an "
        'ORTModule; or all runs in eager PyTorch with Options(fallback="eager")'
    )
    return CaptureError(what, source=line_of_error(error), cure=cure)


def _is_of_the_call(error: BaseException) -> bool:
    """Whether it was raised where the module is called: before its first line."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1] is FlatModule.called.__code__
