"""Benchmarks import names that exist: they run seldom, and neither other tests nor mypy read them."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
def test_benchmarks_import_what_exists() -> None:
    missing, count = list[str](), 0
    for file in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "riptide":
                continue
            count += 1
            assert node.module is not None
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError:
                missing.append(f"{file.name}:{node.lineno}: {node.module}")
                continue
            for name in (alias.name for alias in node.names):
                is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}") is not None
                if not (hasattr(module, name) or is_module):
                    missing.append(f"{file.name}:{node.lineno}: {node.module}.{name}")
    assert count > 100
    assert not missing, "\n".join(["", *missing])
