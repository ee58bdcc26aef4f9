"""Symbolic dimensions and Python names as they are written in generated source."""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from sympy.printing.str import StrPrinter

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import SIZE


class _Printer(StrPrinter):
    """Integer expressions as Python: exact division and floor become ``//``."""

    def exact(self, expr: Any) -> str:
        """A size: where it is a quotient, that is a whole number."""
        numerator, denominator = sympy.fraction(sympy.together(expr))
        top = self.doprint(numerator)
        return top if denominator == 1 else f"({top}) // ({self.doprint(denominator)})"

    def _print_floor(self, expr: Any) -> str:
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"(({self._print(numerator)}) // ({self._print(denominator)}))"

    def _print_ceiling(self, expr: Any) -> str:
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"(-((-({self._print(numerator)})) // ({self._print(denominator)})))"

    def _print_Max(self, expr: Any) -> str:
        return f"max({', '.join(self.exact(a) for a in expr.args)})"

    def _print_Min(self, expr: Any) -> str:
        return f"min({', '.join(self.exact(a) for a in expr.args)})"

    def _print_Mod(self, expr: Any) -> str:
        return f"(({self._print(expr.args[0])}) % ({self._print(expr.args[1])}))"


def dim_text(dim: shapes.Dim) -> str:
    """A dimension as a Python integer expression over its symbols."""
    if isinstance(dim, int):
        return str(dim)
    text = str(dim.value)
    if text.isidentifier():
        return text
    return _text(shapes.as_expression(dim))


@functools.lru_cache(4096)  # a few sizes are those of most tensors
def _text(size: sympy.Expr) -> str:
    return _Printer().exact(size)


def data_text(data: shapes.Data) -> str:
    """The content of a shape tensor as Python: an int expression, or a tuple of them."""
    if not isinstance(data, tuple):
        return dim_text(data)
    parts = [dim_text(d) for d in data]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def symbols_of(data: shapes.Data) -> set[str]:
    """The symbols that occur in a dimension or in the content of a shape tensor."""
    parts = data if isinstance(data, tuple) else (data,)
    return set().union(*(d.free_symbols() for d in parts if isinstance(d, ir.SymbolicDim)), set())


def sizes_of(value: ir.Value) -> set[str]:
    """The sizes that a value's shape names, or that it is itself."""
    return {str(d.value) for d in shapes.dims_of(value) or () if isinstance(d, ir.SymbolicDim)}.union(itself_of(value))


def itself_of(value: ir.Value) -> list[str]:
    """The sizes that a number is."""
    is_number = value.dtype == ir.DataType.INT64 and value.shape == []
    return value.metadata_props.get(SIZE, "").split() if is_number else []


def is_known(data: shapes.Data | None) -> bool:
    """Whether every part of the content can be written as an expression."""
    if data is None:
        return False
    parts = data if isinstance(data, tuple) else (data,)
    return all(isinstance(d, int) or d.value is not None for d in parts)


class Names:
    """Python identifiers for value names, unique and stable."""

    def __init__(self, reserved: set[str]) -> None:
        self._used = set(reserved)
        self._names: dict[str, str] = {}

    def nested(self) -> Names:
        """Names for the function of a body: they are not used outside of it, nor the outer ones in it."""
        made = Names(set())
        made._used = self._used
        return made

    def known(self) -> dict[str, str]:
        """The name of the value of each identifier."""
        return {identifier: name for name, identifier in self._names.items()}

    def unique(self, text: str) -> str:
        """An identifier like that text that no value has."""
        text = re.sub(r"\W", "_", text)
        if not text.isidentifier() or keyword.iskeyword(text):
            text = f"v_{text}"
        unique, count = text, 1
        while unique in self._used:
            unique, count = f"{text}_{count}", count + 1
        self._used.add(unique)
        return unique

    def __call__(self, value: ir.Value) -> str:
        name = str(value.name)
        if name not in self._names:
            self._names[name] = self.unique(name)
        return self._names[name]


def constant_text(array: np.ndarray) -> str:
    """A constant as Python's number or tuple."""
    if array.dtype.name == "bfloat16":  # whose own text is rounded
        array = array.astype(np.float32)
    return repr(array.item() if array.ndim == 0 else tuple(array.tolist()))


def _host(value: torch.Tensor) -> Any:
    """A tensor as a Python number or tuple: the way shapes known only at run time reach an operator."""
    content = value.tolist()
    return tuple(content) if isinstance(content, list) else content


def _tensor(content: Any, code: int) -> torch.Tensor:
    """Numbers as a tensor on the host, of the type that ONNX's code names."""
    return torch.tensor(content, dtype=torch_dtype(code))


def _apart(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy where it lies in the memory of one of the others, or some of its elements in one place."""
    is_expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.clone() if is_expanded or any(torch._C._is_alias_of(tensor, x) for x in others) else tensor


def _in_order(tensor: torch.Tensor, *axes: int) -> torch.Tensor:
    """The tensor; a copy where its axes do not lie in memory in their order, or in the one that is given."""
    if axes:
        back = sorted(range(len(axes)), key=axes.__getitem__)
        return _in_order(tensor.permute(axes)).permute(back)
    if tensor.is_contiguous():
        return tensor
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return tensor if steps == sorted(steps, reverse=True) else tensor.contiguous()


NAMES: Mapping[str, Any] = {
    "apart": _apart,
    "host": _host,
    "in_order": _in_order,
    "tensor": _tensor,
    "inf": math.inf,
    "nan": math.nan,
}  # what the texts of expressions call
