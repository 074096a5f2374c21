"""The layout of packages and tests.

No test module imports another one: what several of them need is in helper modules and fixtures.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = ("indexing", "retriever", "serve", "jobs", "riptide")
FILES = (file for top in FOLDERS for file in (TESTS.parent / top).glob("*/__init__.py"))
PACKAGES = sorted(file.parent for file in FILES if not file.parent.is_symlink())
# Names of two files, with what they have in common.
DOUBLES = {
    "building.py": "builds an index, of dense and of sparse embeddings",
    "index.py": "an index as an artifact, of dense and of sparse embeddings",
    "loop.py": "the training loop, and its options",
    "lora.py": "a LoRA adapter, and its options",
    "registry.py": "where a format and a kind of hit source is registered",
}
SOURCES = ("indexing", "retriever", "serve", "jobs", "riptide/base", "riptide/process", "riptide/telemetry")


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


def module_files() -> dict[str, Path]:
    """Returns the file of each module of the packages, by its full name."""
    root = TESTS.parent
    files = [file for source in SOURCES for file in (root / source).rglob("*.py")]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    full_names = [name if name.startswith("riptide.") else f"riptide.{name}" for name in names]
    return dict(zip((name.removesuffix(".__init__") for name in full_names), files, strict=True))


def imported_modules(source: str, modules: Collection[str]) -> set[str]:
    """Returns the modules that a source imports, within functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules}


def test_no_modules_import_one_another() -> None:
    """Not even within functions or for types: each module can be read after those that it imports."""
    files = module_files()
    assert len(files) > 300
    imports = {name: imported_modules(file.read_text(), files) - {name} for name, file in files.items()}
    # A package names what its modules offer, which some of them import from one another.
    packages = {name for name, file in files.items() if file.name == "__init__.py"}
    order = TopologicalSorter({name: found - packages for name, found in imports.items()})
    order.prepare()  # raises CycleError with the modules of a cycle


def test_no_file_name_occurs_twice() -> None:
    """Except names that mirror each other, as DOUBLES says, and those of jobs, which are commands."""
    files = [file.relative_to(TESTS.parent) for file in module_files().values()]
    names = Counter(file.name for file in files if len(file.parts) > 2 and file.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} == set(DOUBLES)


def function_bodies(source: str) -> dict[str, str]:
    """Returns the body of each function of a module, without its docstring, by the name of the function."""
    bodies = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            bodies[node.name] = "".join(map(ast.dump, node.body[has_docstring:]))
    return bodies


def test_no_name_of_a_test_module_occurs_twice() -> None:
    """pytest refuses to collect the second one."""
    counts = Counter(file.name for file in TESTS.rglob("*.py") if file.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_function_is_a_copy_of_another_one() -> None:
    """Except `main` of jobs, and bodies that are shorter than a call with an argument."""
    places: dict[str, list[str]] = {}
    for module, file in module_files().items():
        for name, body in function_bodies(file.read_text()).items():
            if name != "main" and len(body) > 100:
                places.setdefault(body, []).append(f"{module}.{name}")
    assert len(places) > 1_000
    assert [names for names in places.values() if len(names) > 1] == []
