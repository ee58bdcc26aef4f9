"""Which of the processes that train together this one is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's rank among those that train together; 0 where it trains alone.

    Launchers put it into ``RANK``; processes that were started without one know it from their process group.
    """
    return _told("RANK", "get_rank", environ, 0)


def count(environ: Mapping[str, str] | None = None) -> int:
    """How many processes train together, by ``WORLD_SIZE`` or their process group; 1 where this one trains alone."""
    return _told("WORLD_SIZE", "get_world_size", environ, 1)


def _told(name: str, method: str, environ: Mapping[str, str] | None, alone: int) -> int:
    text = (os.environ if environ is None else environ).get(name, "")
    group: Any = sys.modules.get("torch.distributed")  # where nobody imported it, there is no group
    if not text and group and group.is_available() and group.is_initialized():
        return getattr(group, method)()
    return int(text) if text.isdigit() else alone
