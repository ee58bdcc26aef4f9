"""Which forward hooks only compute on tensors, or set flags of them: told from their code, without running it.

Such a hook leaves nothing behind but tensors, so it can be part of a graph. What is not known here is not such a hook.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional

_LOCAL = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT")
_HARMLESS = (
    *_LOCAL,
    *("BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "TO_BOOL", "BUILD_", "UNPACK_", "FORMAT_", "CONVERT_"),
    *("CALL", "PRECALL", "KW_NAMES", "PUSH_NULL", "RETURN_", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "YIELD_VALUE"),
    *("POP_TOP", "POP_ITER", "POP_JUMP", "JUMP_", "GET_ITER", "FOR_ITER", "END_FOR", "COPY", "SWAP", "NOP", "RESUME"),
    *("CACHE", "EXTENDED_ARG", "NOT_TAKEN", "LIST_", "SET_ADD", "SET_UPDATE", "DICT_", "MAP_ADD", "MAKE_CELL"),
    *("LOAD_ASSERTION_ERROR", "RAISE_VARARGS", "END_SEND"),
)
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NAMESPACES = (torch, torch.nn, torch.nn.functional, torch.linalg, torch.special, torch.fft)
_BUILTINS = (
    *(isinstance, len, tuple, list, dict, slice, range, zip, enumerate, reversed, int, float, bool, abs, min, max, sum),
    *(any, all, round, pow, torch.Tensor, torch.nn.Parameter, torch.is_tensor, torch.is_floating_point, torch.Size),
)
_PROPERTIES = (
    "H T mH mT device dtype imag is_cuda is_leaf is_sparse itemsize layout nbytes ndim real requires_grad shape"
)
_REFUSED = (  # what takes a number out of a tensor, or leaves something on it
    *("apply_", "backward", "data", "data_ptr", "item", "map_", "numpy", "pin_memory", "record_stream", "rename_"),
    *("register_hook", "register_post_accumulate_grad_hook", "resize_", "resize_as_", "retain_grad", "set_"),
    *("share_memory_", "storage", "storage_type", "tolist", "untyped_storage"),
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_of_tensors_only(hook: Any, module: torch.nn.Module) -> bool:
    """Whether a forward hook or pre-hook of a module is a function that only computes on tensors or sets their flags.

    It stores nothing but local names, reads nothing of the module but its own parameters and buffers, holds no
    object that can change, and calls nothing but methods of tensors, functions of torch and a few of Python's own.
    """
    if (
        not isinstance(hook, types.FunctionType)
        or inspect.isgeneratorfunction(hook)
        or inspect.iscoroutinefunction(hook)
    ):
        return False
    defaults = [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    try:
        held = [cell.cell_contents for cell in hook.__closure__ or ()]
    except ValueError:  # a cell that is not filled yet
        return False
    if not all(map(_is_constant, [*defaults, *held])):
        return False
    own = {*module._parameters, *module._buffers}
    return _is_harmless(hook.__code__, hook, own, _modules_names(hook.__code__))


def _modules_names(code: types.CodeType) -> frozenset[str]:
    """The arguments in which a hook gets its module: the first, or all."""
    count = code.co_argcount + code.co_kwonlyargcount
    rest = code.co_varnames[count : count + 1] if code.co_flags & inspect.CO_VARARGS else ()
    return frozenset((*code.co_varnames[: min(code.co_argcount, 1)], *rest))


def _is_harmless(code: types.CodeType, hook: types.FunctionType, own: Collection[str], module: frozenset[str]) -> bool:
    """Whether a function's code is, with the code of functions inside of it.

    Args:
        code: the code.
        hook: the hook that it is of.
        own: names of the module's parameters and buffers.
        module: names of the arguments that hold the module.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    following = [*steps[1:], steps[-1]]
    of_module = [n for n, step in enumerate(steps) if step.opname.startswith("LOAD_FAST") and _names(step) & module]
    read = [following[n] for n in of_module]
    if module & {*code.co_cellvars, *code.co_freevars} or any(len(_names(steps[n])) > 1 for n in of_module):
        return False
    if any(step.opname not in _ATTRIBUTE or step.argval not in own for step in read):
        return False
    changes_in_place = any(map(_changes_in_place, steps))
    others = [step for step in steps if not any(step is r for r in read)]
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (
        not (changes_in_place and read)
        and all(_is_known(step, code, hook) for step in others)
        and all(_is_harmless(c, hook, own, module) for c in inner)
    )


def _names(step: dis.Instruction) -> frozenset[str]:
    """The names that an instruction loads; one instruction may load two."""
    return frozenset(step.argval if isinstance(step.argval, tuple) else (step.argval,))


def _changes_in_place(step: dis.Instruction) -> bool:
    if step.opname in _ATTRIBUTE:
        return step.argval.endswith("_")
    return step.opname.startswith(("BINARY_OP", "INPLACE_")) and step.argrepr.endswith("=")


def _is_known(step: dis.Instruction, code: types.CodeType, hook: types.FunctionType) -> bool:
    """Whether an instruction leaves nothing behind: what it loads is known, and it stores local names only."""
    if step.opname == "LOAD_GLOBAL":
        return _is_torchs(_global(hook, step.argval))
    if step.opname in _ATTRIBUTE:
        return step.argval in _attributes()
    if step.opname in ("LOAD_DEREF", "LOAD_CLOSURE", "COPY_FREE_VARS"):  # held values were looked at
        return True
    if step.opname == "STORE_DEREF":
        return step.argval in code.co_cellvars
    return step.opname.startswith(_HARMLESS)


def _global(hook: types.FunctionType, name: str) -> Any:
    builtins = hook.__globals__.get("__builtins__", {})
    found = builtins if isinstance(builtins, dict) else vars(builtins)
    return hook.__globals__.get(name, found.get(name))


def _is_constant(value: Any) -> bool:
    """Whether a held value cannot change."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_is_constant, value))
    return isinstance(value, _PLAIN) or _is_torchs(value)


def _is_torchs(value: Any) -> bool:
    """Whether it is a module or function of torch that computes, or one of Python's functions without effects."""
    if isinstance(value, types.ModuleType):
        return any(value is namespace for namespace in _NAMESPACES)
    return any(value is known for known in _BUILTINS) or id(value) in _functions()


@functools.cache
def _functions() -> frozenset[int]:
    """Functions of torch that take tensors, by identity: some cannot be hashed."""
    return frozenset(
        id(function)
        for namespace, functions in torch.overrides.get_overridable_functions().items()
        if namespace in _NAMESPACES
        for function in functions
        if getattr(function, "__name__", "") not in _REFUSED
    )


@functools.cache
def _attributes() -> frozenset[str]:
    """Names that may follow a dot: methods and properties of tensors, functions and constants of torch."""
    return frozenset(_attribute_names()).difference(_REFUSED)


def _attribute_names() -> Iterator[str]:
    yield from _PROPERTIES.split()
    yield from ("nn", "functional", "linalg", "special", "fft", "finfo", "iinfo", "eps", "inf", "nan", "pi")
    yield from (
        "zeros",
        "ones",
        "full",
        "arange",
        "tensor",
        "is_tensor",
        "is_floating_point",
        "requires_grad_",
        "Tensor",
    )
    yield from (name for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.memory_format))
    for namespace, functions in torch.overrides.get_overridable_functions().items():
        if namespace in (*_NAMESPACES, torch.Tensor):
            yield from (name for f in functions if not (name := getattr(f, "__name__", "_")).startswith("_"))
