"""Browsers without a window, for pages that are looked at by tests."""

from __future__ import annotations

import shutil

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def installed(*programs: str) -> str:
    """The first of the programs that there is; skips where there is none, and says so."""
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        pytest.skip(f"none of these is installed: {', '.join(programs)}; `make javascript` gets what it can")
    return found
