"""The site as readers find it: its links lead somewhere, its pages can be read, and need nothing from elsewhere."""

from __future__ import annotations

import html.parser
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pages
import pytest
import tour_pictures
from browsers import BROWSERS, installed, look_at

pytestmark = pytest.mark.slow
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
PLACES = {"link": ("stylesheet", "icon", "preconnect", "preload")}


class Page(html.parser.HTMLParser):
    """What a page says of itself, leads to, and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set[str](), list[str](), list[str]()
        self.headings, self.wordless, self.language = list[str](), list[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "html":
            self.language = given.get("lang", "")
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        is_loaded = tag != "link" or given.get("rel", "") in PLACES["link"]
        if tag in LOADED and LOADED[tag] in given and is_loaded:
            self.loads.append(given[LOADED[tag]])
        if tag == "img" and not given.get("alt"):
            self.wordless.append(given.get("src", ""))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=pages.ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_say_what_they_are_and_lead_somewhere(site: Path) -> None:
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 30
    for path, page in found.items():
        name, text = path.relative_to(site).as_posix(), path.read_text()
        assert page.language and re.search(r"<title>[^<]+</title>", text) and 'name="viewport"' in text, name
        assert not page.wordless, f"{name}: pictures without words: {page.wordless}"
        if name != "404.html":
            assert page.headings.count("h1") == 1, f"{name}: {page.headings}"
            depths = [int(h[1]) for h in page.headings]
            jumps = [(a, b) for a, b in itertools.pairwise(depths) if b > a + 1]
            assert not jumps, f"{name}: headings leave out a level: {jumps}"
        for address in (*page.links, *page.loads):
            assert _leads_somewhere(site, path, address, found), f"{name}: {address} leads nowhere"
        away = [address for address in page.loads if urlsplit(address).netloc]
        assert not away, f"{name} loads {away}"


def _leads_somewhere(site: Path, path: Path, address: str, found: dict[Path, Page]) -> bool:
    """Whether there is what an address within the site names; addresses elsewhere are not asked."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    target = path
    if parts.path:
        base = site if parts.path.startswith("/") else path.parent
        target = Path(os.path.normpath(base / unquote(parts.path).lstrip("/")))
        target = target / "index.html" if target.is_dir() else target
    known = found.get(target)
    return target.is_file() and (not parts.fragment or known is None or unquote(parts.fragment) in known.ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", ["", "tutorial", "tour", "operators", "reference", "errors", "draw"])
def test_a_browser_shows_it(site: Path, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    """Text stands out, nothing is wider than the window, controls have names and pictures words."""
    browser = installed(*BROWSERS)
    found = look_at(browser, site / name / "index.html", site, tmp_path / "profile", scheme=scheme, width=width)
    assert found["texts"] > 10 and found["wide"] <= 0, found
    assert not found["faint"] and not found["nameless"] and not found["wordless"], found
    assert (found["paper"] > 0.5) == (scheme == "light"), found


def test_pictures_of_the_tour_are_of_its_graphs() -> None:
    """``make tour`` draws them again."""
    for name, drawing in tour_pictures.drawings().items():
        picture = (tour_pictures.FOLDER / f"{name}.svg").read_text()
        assert tour_pictures.operators(picture) == tour_pictures.operators(drawing), name
        assert sum(tour_pictures.operators(drawing).values()) >= 12


def test_messages_of_the_page_of_troubles_are_messages_of_ours() -> None:
    text = (pages.ROOT / "docs" / "troubleshooting.md").read_text()
    source = "".join(path.read_text() for path in (pages.ROOT / "src").rglob("*.py"))
    messages = [m for row in re.findall(r"^\| (`.+?) \|", text, re.M) for m in re.findall("`([^`]+)`", row) if " " in m]
    assert len(messages) >= 10
    assert not [m for m in messages if m not in source]
