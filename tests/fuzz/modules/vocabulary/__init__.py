"""What people write, as templates, by family; a template with lines of ``__init__`` is a pair."""

from __future__ import annotations

from fuzz.modules.vocabulary import functions, layers, places, values

Template = str | tuple[str, ...]
FAMILIES: dict[str, tuple[Template, ...]] = {
    **values.FAMILIES, **places.FAMILIES, **layers.FAMILIES, **functions.FAMILIES
}  # fmt: skip
