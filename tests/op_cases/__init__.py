"""THE TABLE: one row puts an operator into every loop (inference, gradient rule, backends); rows by family."""

import importlib
import pkgutil

import onnx

from op_cases.case import Case, Given

_FAMILIES = [
    importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if m.name != "case"
]
_KNOWN = onnx.defs.onnx_opset_version()
CASES: list[Case] = [row for family in _FAMILIES for row in family.CASES if row.opset <= _KNOWN]

__all__ = ["CASES", "Case", "Given"]
