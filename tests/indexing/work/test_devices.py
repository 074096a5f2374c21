"""Models are opened on the device that a runner assigned: no call below the public API leaves it out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODELS = ("Encoder", "Reranker")
FILES = sorted(path for folder in ("indexing", "serve", "jobs") for path in (ROOT / folder).rglob("*.py"))


def calls_without_device(source: str) -> list[int]:
    """Returns the lines of calls that construct a model without `device`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in MODELS]
    return [call.lineno for call in made if "device" not in {keyword.arg for keyword in call.keywords}]


def test_the_check_finds_a_call_without_a_device() -> None:
    assert calls_without_device("Encoder('a')\nReranker('a', device=d)\n") == [1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_model_is_opened_on_an_assigned_device(path: Path) -> None:
    assert calls_without_device(path.read_text(encoding="utf-8")) == []


def test_a_spec_cannot_be_opened_without_a_device() -> None:
    from riptide.indexing.embeddings.named_encoders import EncoderSpec
    from riptide.indexing.store.store import Store
    from riptide.retriever.options import EncoderOptions

    with pytest.raises(TypeError, match="device"):
        EncoderSpec(Store("/tmp/none"), "model", EncoderOptions()).open()  # type: ignore[call-arg]
