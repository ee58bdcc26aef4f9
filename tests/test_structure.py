"""What the sources may import of each other, wherever in a file they do, and what the engine may not know."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest
import yaml

import onnxtrain

PACKAGE = Path(onnxtrain.__file__).parent


def test_no_import_circle() -> None:
    """Imports in functions count, too; a table that is filled by ``importlib`` does not know what fills it."""
    assert (found := _circles(_imports())) == [], "\n".join(" ".join(group) for group in found)


def test_the_engine_knows_no_module() -> None:
    """``torch.nn`` stays above it: the engine has a forward graph and tensors."""
    files = sorted((PACKAGE / "engine").rglob("*.py"))
    assert files
    found = {str(f.relative_to(PACKAGE)): _uses_of_nn(ast.parse(f.read_text())) for f in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch.nn",
        "import torch.nn.functional as F",
        "from torch import Tensor, nn",
        "from torch.nn import Module",
        "from torch.nn.functional import linear",
        "isinstance(x, torch.nn.Module)",
        "def f():\n    from torch import nn as layers",
    ],
)
def test_uses_of_nn_are_found(line: str) -> None:
    assert len(_uses_of_nn(ast.parse(line))) == 1
    assert _uses_of_nn(ast.parse("import torch\nfrom torch.utils import data\ny = self.nn + torch.relu(x)")) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_what_is_imported_of_the_package_is_there(folder: str) -> None:
    """What lies outside the package is not type checked: a name that moved would be found by its own test alone."""
    files = sorted((Path(__file__).parents[1] / folder).rglob("*.py"))
    assert files
    names = {(m, n): f.name for f in files for m, n in _names_of_package(ast.parse(f.read_text()))}
    assert [f"{file}: {m}.{n}" for (m, n), file in names.items() if not _is_there(m, n)] == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"e", "f"}, "f": set()}
    assert _circles(graph) == [["a", "b", "c"], ["e"]]
    files = {"p": "", "p.a": "def f():\n    from p import b", "p.b": "import p.a\nif TYPE_CHECKING:\n    import p.c"}
    files |= {"p.c": "from p.b import name\nfrom . import a\nimport os"}
    found = {name: _imported(name, name == "p", ast.parse(text), set(files)) for name, text in files.items()}
    assert found == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.a"}, "p.c": {"p.b", "p.a"}}


def test_pages_of_a_release_name_its_version() -> None:
    """The newest changes and the citation; forms for issues are read as GitHub reads them."""
    root = Path(__file__).parents[1]
    assert root.joinpath("CHANGELOG.md").read_text().split("\n## ")[1].startswith(onnxtrain.__version__)
    citation = yaml.safe_load(root.joinpath("CITATION.cff").read_text())
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", onnxtrain.__version__)
    assert {"title", "authors", "message"} <= set(citation)
    forms = sorted(root.joinpath(".github", "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(content), form.name
        assert len({field["id"] for field in content["body"]}) == len(content["body"]), form.name


def _imports() -> dict[str, set[str]]:
    """For each module of the package the others that it imports."""
    files = {_name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        name: _imported(name, path.name == "__init__.py", ast.parse(path.read_text()), files.keys())
        for name, path in files.items()
    }


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, is_package: bool, tree: ast.AST, known: Set[str]) -> set[str]:
    """The modules that a module imports, of those that are known; ``from a import b`` is of ``a.b`` where it is one."""
    found: set[str] = set()
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= inner if inner <= known else {*inner, base}
    return found & known


def _names_of_package(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The module and the name of each ``from onnxtrain.module import name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "onnxtrain":
            yield from ((node.module, alias.name) for alias in node.names)


def _is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a source but those that only a type checker reads."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _executed(other)
        else:
            yield from _executed(child)


def _circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all of the group, itself too."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(m for m in reached[n] if n in reached[m])) for n in graph if n in reached[n]}
    return [list(group) for group in sorted(groups)]


def _reached(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def _uses_of_nn(tree: ast.AST) -> list[int]:
    """The lines that import ``torch.nn`` or read it of torch."""
    return [node.lineno for node in ast.walk(tree) if _names_nn(node)]


def _names_nn(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "torch.nn"
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    return any(f"{name}.".startswith("torch.nn.") for name in names)
