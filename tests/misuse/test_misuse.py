"""Every row of the table ends in a clear error, leaves nothing behind, and costs little.

All rows run in a process of their own, whose memory is limited: ``python -m misuse.test_misuse FOLDER`` prints a line
of JSON for each, and goes on after the last one that was begun where it ended too early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from misuse import api_calls, artifacts, blocks, commands, damaged, hostile, tools
from misuse.room import CommandFailed, Room, Row, shared
from onnxtrain.errors import OnnxTrainError

FAMILIES = {
    "artifacts": artifacts,
    "api": api_calls,
    "blocks": blocks,
    "commands": commands,
    "damaged": damaged,
    "hostile": hostile,
    "tools": tools,
}
TABLE: dict[str, Row] = {f"{name}: {row.name}": row for name, family in FAMILIES.items() for row in family.TABLE}
MEMORY, SECONDS = 4 << 30, 20.0  # of address space for all rows, and of time for each
WHOLE = 180.0


def result_of(row: Row, folder: Path) -> dict[str, Any]:
    """What came of a row."""
    room, started = Room(folder), time.perf_counter()
    found: dict[str, Any] = {"kind": "", "ours": False, "text": "accepted"}
    try:
        row.use(room)
    except BaseException as error:
        ours = isinstance(error, OnnxTrainError | CommandFailed)
        found = {"kind": type(error).__name__, "ours": ours, "text": str(error)}
    found["seconds"] = time.perf_counter() - started
    found["left"] = sorted(room.names() - room.written)
    return found


def main(folder: Path, first: int) -> None:
    """Run all rows from one on."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    shared()
    for index, (name, row) in enumerate(TABLE.items()):
        if index >= first:
            print(json.dumps({"name": name}), flush=True)
            place = folder / str(index)
            place.mkdir()
            print(json.dumps({"name": name, **result_of(row, place)}), flush=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of all rows; of one at which the process ended, its name alone."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + WHOLE
    folder = tmp_path_factory.mktemp("rooms")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    while len(found) < len(TABLE) and time.monotonic() < deadline:
        command = [sys.executable, "-m", "misuse.test_misuse", str(folder), str(len(found))]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
        before = len(found)
        for line in out.splitlines():
            one = json.loads(line)
            found[one["name"]] = one
        assert len(found) > before, "the table cannot be run"
    return found


def test_there_are_enough_kinds() -> None:
    assert len(TABLE) == sum(len(family.TABLE) for family in FAMILIES.values()), "two rows have one name"
    assert len(TABLE) >= 200


@pytest.mark.parametrize("name", TABLE)
def test_misuse_is_a_clear_error(results: dict[str, dict[str, Any]], name: str) -> None:
    import re

    found = results.get(name, {"name": name})
    assert "kind" in found, "the process ended, or never came to an end"
    text = found["text"]
    assert found["ours"], f"{found['kind']}: {text}"
    assert re.search(TABLE[name].match, text), text
    assert "cure: " in text or "usage: " in text, text
    assert "Traceback" not in text
    assert found["left"] == [], text
    assert found["seconds"] < SECONDS


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
