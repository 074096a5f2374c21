"""docs/python.md and examples/quickstart.ipynb: their code runs in order, and prints what they show."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "python.md", ROOT / "examples" / "quickstart.ipynb"
TOLERANCE = 0.02  # of figures with a decimal point: types and orders of sums differ by CPU
CELL_KEYS = {
    "code": {"id", "cell_type", "metadata", "source", "outputs", "execution_count"},
    "markdown": {"id", "cell_type", "metadata", "source"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the examples of the checkout, and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def are_alike(printed: str, expected: str) -> bool:
    """Whether two texts have the same words, and figures within the tolerance."""
    words, others = printed.split(), expected.split()
    return len(words) == len(others) and all(map(_is_same, words, others))


def _is_same(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return "." in word and math.isclose(float(word), float(other), abs_tol=TOLERANCE)
    except ValueError:
        return False


def test_the_page_prints_what_it_shows(folder: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {"__name__": "page"}
    printed, compared = "", 0
    for language, text in blocks:
        if language == "python":
            assert not printed, f"the page does not show {printed!r}"
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, str(PAGE), "exec"), names)
            printed = out.getvalue()
        else:
            assert are_alike(printed, text), f"printed:\n{printed}\nthe page shows:\n{text}"
            printed, compared = "", compared + 1
    assert compared >= 10
    assert not printed
    assert (folder / "results" / "bm25-hybrid.html").stat().st_size > 10_000


def test_the_page_can_be_read_at_once() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_notebook_is_valid_and_its_cells_run(folder: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len(cells) <= 25
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(set(cell) == CELL_KEYS[cell["cell_type"]] for cell in cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in code:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK} {cell['id']}", "exec"), names)
    assert names["trained"].key == "prompts/quickstart"
    assert len(names["hits"]) == 3
    assert sum(bool(cell["outputs"]) for cell in code) >= 8
    assert os.listdir("data") == ["quickstart"]


def test_a_difference_is_found() -> None:
    assert are_alike("hits 3\n0.851  p1", "hits 3 0.86 p1")
    assert not are_alike("hits 3 0.851 p1", "hits 3 0.89 p1")
    assert not are_alike("hits 3", "hits 4")
    assert not are_alike("hits 3", "hits 3 more")


WITHOUT_TORCH = """
import sys

import riptide

store = riptide.Store("data/small")
store.import_corpus([{"id": "a", "text": "a white whale"}, {"id": "b", "text": "a count"}])
store.import_queries([{"id": "q", "query": "whale", "passage_id": "a"}], name="mine", split="test")
store.build_bm25()
assert [hit.id for hit in store.search("bm25")("whale")] == ["a"]
assert store.evaluate("bm25", split="test", metrics="RR@10").mean == {"bm25": {"RR@10": 1.0}}
print([name for name in ("torch", "ray") if name in sys.modules])
"""


def test_nothing_but_models_needs_torch_and_nothing_here_needs_ray(folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    imported = "imported 2 passages: id = id, title = none, text = text, metadata = none\n"
    assert (done.stdout, done.stderr) == ("[]\n", imported)
