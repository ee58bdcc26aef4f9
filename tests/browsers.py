"""Browsers without a window, for pages that are looked at by tests."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_LOOK = Path(__file__).with_name("look.js")
LIMIT = 120  # seconds until a page that posts nothing is given up

Posted = queue.Queue[Any]


def installed(*programs: str) -> str:
    """The first of the programs that there is; skips where there is none, and says so."""
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        pytest.skip(f"none of these is installed: {', '.join(programs)}; `make javascript` gets what it can")
    return found


class _Site(http.server.SimpleHTTPRequestHandler):
    """Folders by the beginning of a path, and whatever a page posts."""

    def __init__(self, folders: dict[str, Path], posted: Posted, *given: Any) -> None:
        self.folders, self.posted = folders, posted
        super().__init__(*given, directory=str(folders["/"]))

    def translate_path(self, path: str) -> str:
        start = next((s for s in self.folders if s != "/" and path.startswith(s)), None)
        return super().translate_path(path) if start is None else str(self.folders[start] / path.removeprefix(start))

    def do_POST(self) -> None:
        self.posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@contextlib.contextmanager
def served(root: Path, **folders: Path) -> Iterator[tuple[str, Posted]]:
    """Serve ``root``, and each further folder under its name: the address, without a last slash, and what is posted."""
    posted: Posted = queue.Queue()
    places = {"/": root, **{f"/{name}/": folder for name, folder in folders.items()}}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Site, places, posted)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def look_at(browser: str, page: Path, root: Path, profile: Path, *, scheme: str = "light", width: int = 1200) -> Any:
    """What ``look.js`` says of a page: whether text stands out, controls have names, pictures have words.

    Args:
        browser: the program.
        page: a file of HTML below ``root``.
        root: what is served.
        profile: a folder for the browser.
        scheme: ``"light"`` or ``"dark"``, as a reader prefers it.
        width: of the window, in pixels.
    """
    script = f"<script>{_LOOK.read_text()}</script></body>"
    copy = page.with_name(f"looked_at_{page.name}")
    copy.write_text(page.read_text().replace("</body>", script))
    profile.mkdir(exist_ok=True)
    flags = (f"--window-size={width},1200", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    with served(root) as (address, posted):
        return visit(browser, f"{address}/{copy.relative_to(root).as_posix()}", posted, profile, *flags)


def visit(browser: str, address: str, posted: Posted, profile: Path, *flags: str) -> Any:
    """What the page posts first when a browser without a window opens it."""
    flags = (*FLAGS, "--remote-debugging-port=0", *flags)
    with (
        (profile / "log").open("w+") as log,
        subprocess.Popen(
            [browser, *flags, f"--user-data-dir={profile}", address], stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            return posted.get(timeout=LIMIT)
        except queue.Empty:
            log.seek(0)
            pytest.fail(f"the page posted nothing in {LIMIT} s; the browser said: {log.read()[-2000:]}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # a browser is many processes
