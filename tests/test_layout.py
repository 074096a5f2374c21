"""The layout of packages and tests.

No test module imports another one: what several of them need is in helper modules and fixtures.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = ("indexing", "retriever", "serve", "jobs", "riptide")
FILES = (file for top in FOLDERS for file in (TESTS.parent / top).glob("*/__init__.py"))
PACKAGES = sorted(file.parent for file in FILES if not file.parent.is_symlink())


def imported_tests(source: str) -> Iterator[str]:
    """Yields "line N: NAME" for each test module or conftest that a source imports, within functions too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module] if is_test(module) else [f"{module}.{alias.name}" for alias in node.names]
        yield from (f"line {node.lineno}: {name}" for name in names if is_test(name))


def is_test(name: str) -> bool:
    """Returns whether a dotted name contains a test module, or conftest, of which there are several."""
    return any(part == "conftest" or part.startswith("test_") for part in name.split("."))


def test_no_module_of_the_tests_imports_a_test_module_or_conftest() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    imports = [f"{path.relative_to(TESTS)}, {place}" for path in files for place in imported_tests(path.read_text())]
    assert imports == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import test_bm25", ["line 1: test_bm25"]),
        ("import os, tests.indexing.test_bm25 as other", ["line 1: tests.indexing.test_bm25"]),
        ("from test_bm25 import build, extend", ["line 1: test_bm25"]),
        ("from tests.indexing import test_bm25", ["line 1: tests.indexing.test_bm25"]),
        ("from . import test_bm25", ["line 1: .test_bm25"]),
        ("def test_it():\n    from test_bm25 import build", ["line 2: test_bm25"]),
        ("from conftest import Outcome", ["line 1: conftest"]),
        ("import pytest\nfrom tiny import save_bert\nfrom kernels import latest_result", []),
    ],
)
def test_imports_of_test_modules_are_found(source: str, expected: list[str]) -> None:
    assert list(imported_tests(source)) == expected


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: f"{package.parent.name}/{package.name}")
def test_the_docstring_of_a_package_lists_its_modules(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = {line.split()[0] for line in docstring.splitlines()[2:] if "   " in line}
    assert listed == {file.stem for ending in ("*.py", "*.pyi") for file in package.glob(ending)} - {"__init__"}
