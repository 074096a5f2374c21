"""Vectors of an encoder are compared with stored ones: their directions and lengths."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.embeddings.dense_embeddings import DENSE
from riptide.indexing.embeddings.drift import (
    CANARY_QUERIES,
    Drift,
    measure_drift,
    min_similarity,
    query_canaries,
    similarity,
    write_query_canaries,
)
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store


@pytest.mark.parametrize(
    ("second", "expected"),
    [((4, 3), 24 / 25), ((6, 8), 0.8), ((-4, 3), 0), ((0, 0), 0), ((3, 4, 0), 0), ((math.nan, 4), math.nan)],
)
def test_a_similarity_is_the_cosine_of_vectors_of_equal_length_and_less_for_others(
    second: tuple[float, ...], expected: float
) -> None:
    first, zero = np.array([3.0, 4.0]), np.zeros(2)
    assert similarity(first, np.array(second)) == pytest.approx(expected, nan_ok=True)
    assert min_similarity([zero, first], [zero, np.array(second)]) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("similarity", "shown", "bound", "is_refused"),
    [
        (1.0, "1.00000", None, False),
        (0.999, "0.99900", None, False),
        (0.99899999, "0.99899", 0.999, False),
        (0.99, "0.99000", 0.999, False),
        (0.98999999, "0.98999", 0.99, True),
        (math.nan, "nan", 0.99, True),
    ],
)
def test_a_drift_is_no_problem_a_warning_or_refused(
    similarity: float, shown: str, bound: float | None, is_refused: bool
) -> None:
    drift = Drift("store/embeddings/e/g0000", similarity, 8, "node-7")
    assert (drift.shown, drift.is_refused, drift.problem is None) == (shown, is_refused, bound is None)
    if bound is not None:
        expected = f"smallest similarity {shown} of 8 passages, expected at least {bound}: use the versions"
        assert (
            f"store/embeddings/e/g0000: the encoder on node-7 gives other vectors than those stored: {expected}"
            in str(drift.problem)
        )
    if is_refused:
        with pytest.raises(InputError, match="other vectors than those stored"):
            drift.refuse()
    else:
        drift.refuse()


class FixedEncoder:
    """An encoder that gives the same vectors for all queries."""

    def __init__(self, vectors: np.ndarray):
        self.vectors = vectors

    def tokenize(self, texts: list[str], *, side: str) -> list[str]:
        assert side == "query"
        self.texts = texts
        return texts

    def forward(self, tokens: list[str], *, side: str, task: str | None, topics: None) -> np.ndarray:
        return self.vectors


def test_a_model_of_queries_is_compared_with_the_vectors_of_its_fixed_queries(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((len(CANARY_QUERIES), 4)).astype(np.float32)
    (tmp_path / "folder").mkdir()
    write_query_canaries(tmp_path / "folder", vectors)
    store = Store(str(tmp_path / "store"))
    for name in ("mapped", "foreign", "trained"):
        with store.create("models", name) as draft:
            draft.add_notes(**({"map": {}} if name == "mapped" else {}))
            (tmp_path / "folder" / "config.json").write_text("{}")
            commit_files(draft, tmp_path / "folder")
        (tmp_path / "folder" / "canaries.json").write_text('{"birds": 1}')  # of the model of another program
        if name == "foreign":
            (tmp_path / "folder" / "canaries.json").unlink()
    canaries = query_canaries(store.open("models", "mapped"))
    for sign in (1, -1):
        encoder = FixedEncoder(sign * vectors)
        drift = measure_drift(canaries, encoder, DENSE)
        assert encoder.texts == list(CANARY_QUERIES)
        assert (drift.similarity, drift.num_canaries) == (pytest.approx(sign), len(CANARY_QUERIES))
    assert "models/mapped: the encoder on" in str(drift.problem)
    assert f"of {len(CANARY_QUERIES)} queries, expected at least 0.99" in str(drift.problem)
    assert "save the map under another" in str(drift.problem)
    for name in ("foreign", "trained"):
        assert measure_drift(query_canaries(store.open("models", name)), encoder, DENSE).num_canaries == 0
