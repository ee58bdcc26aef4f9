"""Python data as text that is the same in every process where the data is: what a stored graph is found by."""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import logging
import re
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, slice, range)
_STAMPS = frozenset(("_original_object_hash",))  # of Transformers: Python's hash, another one in each process
_LARGEST = 50_000  # values
_TRACES = str(Path(__file__).parent)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
)


class TooMuchError(Exception):
    """What can be seen is too much to be described, or a tensor whose elements cannot be read."""


@functools.lru_cache(8192)
def code_digest(code: types.CodeType) -> str:
    """SHA-256 of what a function's code does: neither its place nor its lines are part of it."""
    inner = [code_digest(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
    counts = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount)
    return hashlib.sha256(repr((code.co_code, inner, names, counts)).encode()).hexdigest()


def _constant(value: Any) -> str:
    return repr(sorted(map(_constant, value))) if isinstance(value, frozenset) else repr(value)


class Describer:
    """Describes values; one that comes again is named by its number.

    Args:
        named: values that have a name of their own, by identity: submodules, parameters.
        while_traced: whether tensors without content and sizes are too much: a trace notes what is asked of them.
    """

    def __init__(self, named: Mapping[int, str], while_traced: bool = False) -> None:
        self._named, self._while_traced = named, while_traced
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity comes again

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with content that were described, in this order."""
        return [x for x in self._kept if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]

    def text(self, value: Any) -> str:
        """The text of a value.

        Raises:
            TooMuchError: there is too much to describe.
        """
        if self._while_traced and isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TooMuchError("a tensor or a size of a trace")
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name}={value.value!r}"
        if type(value) in PLAIN or isinstance(value, _NAMED):
            return f"{type(value).__name__}:{value!r}"
        if id(value) in self._named:
            return f"<{self._named[id(value)]}>"
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        if len(self._kept) > _LARGEST:
            raise TooMuchError(f"more than {_LARGEST} values")
        return f"{_name(type(value))}({self._content(value)})"

    def _content(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return content_of_tensor(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self._all((value.__func__, value.__self__))
        if isinstance(value, type):
            return _name(value) + self._all(_constants(value).items())
        if isinstance(value, functools.partial):
            return self._all((value.func, value.args, value.keywords))
        if isinstance(value, (*_BUILTINS, types.ModuleType, logging.Logger)):
            names = (getattr(value, n, "") for n in ("__module__", "__qualname__", "__name__", "name"))
            return ".".join(map(str, names))
        if isinstance(value, dict | types.MappingProxyType):
            return self._all(x for item in value.items() for x in item) + self._state(value)
        if isinstance(value, set | frozenset):
            return "|".join(sorted(Describer(self._named).text(x) for x in value))
        if isinstance(value, list | tuple | collections.deque):
            return self._all(value) + self._state(value)
        if _is_array(value):
            return f"{value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        return self._state(value) or _shown(value)

    def _function(self, function: types.FunctionType) -> str:
        if function.__code__.co_filename.startswith(_TRACES):  # in the place of a function of torch while it is traced
            return f"{function.__module__}.{function.__qualname__}"
        cells = [_content_of_cell(c) for c in function.__closure__ or ()]
        marks = [item for item in vars(function).items() if not item[0].startswith("_torchdynamo")]
        given = (function.__defaults__, function.__kwdefaults__, *cells, *marks)
        return f"{function.__module__}.{function.__qualname__} {code_digest(function.__code__)} {self._all(given)}"

    def _state(self, value: Any) -> str:
        fields = getattr(value, "__dict__", None)
        found = dict(fields) if isinstance(fields, dict) else {}
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    found[name] = getattr(value, name)
        found = {name: value for name, value in found.items() if name not in _STAMPS}
        return self._all(x for item in found.items() for x in item) if found else ""

    def _all(self, values: Iterable[Any]) -> str:
        return "[" + ",".join([self.text(x) for x in values]) + "]"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor as they lie in memory when they are in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def content_of_tensor(tensor: torch.Tensor) -> str:
    """Type, sizes and a digest of the elements."""
    with torch._C.DisableTorchFunction():
        kind = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.device}{tensor.requires_grad}"
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return kind
    try:
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            content = bytes_of(tensor)
    except (RuntimeError, NotImplementedError) as error:
        raise TooMuchError(f"the elements of a {tensor.layout} tensor") from error
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def _constants(kind: type) -> dict[str, Any]:
    """What a class and those above it say beside methods; none of torch's or Python's own."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing", "collections", "enum"):
            own = {n: v for n, v in vars(one).items() if not n.startswith("__") and _is_data(v)}
            found |= {n: v for n, v in own.items() if n not in found}
    return found


def _is_data(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    return isinstance(value, (*PLAIN, *_NAMED, torch.Tensor))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _content_of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return None


def _shown(value: Any) -> str:
    """What an object without attributes says of itself, where that is no address."""
    if type(value).__repr__ is object.__repr__:
        return ""
    text = repr(value)
    return "" if re.search(r" at 0x|\bid=", text) else text


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
