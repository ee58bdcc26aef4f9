"""Shape rules by family; importing the package fills the table in ``ir.shapes``."""

import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
