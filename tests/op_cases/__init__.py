"""THE TABLE: one row puts an operator into every loop (inference, gradient rule, backends); rows by family."""

import importlib
import pkgutil

from op_cases.case import Case, Given

_FAMILIES = [
    importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if m.name != "case"
]
CASES: list[Case] = [row for family in _FAMILIES for row in family.CASES]

__all__ = ["CASES", "Case", "Given"]
