"""Measures embeddings on a split: alignment, uniformity, and mean cosines of relevant and irrelevant pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.measures.vectors import alignment, mean_cosine, uniformity, unit_vectors
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Runner

SAMPLE = 10_000  # vectors in the sample for uniformity: 50 million pairs, some seconds
_BLOCK = 65_536  # number of pairs whose vectors are in memory at once

Form = Callable[[np.ndarray], np.ndarray]  # transforms vectors before they are measured, float [n, dim] both


@dataclass(frozen=True)
class VectorMeasures:
    """Measures of vectors that are scaled to length 1, or as they are. Lower is better, except `cosine_relevant`.

    Attributes:
        alignment: Mean squared distance of a query and a relevant passage (Topic-DPR, Eq. 8).
        uniformity_queries: Uniformity of the queries (Topic-DPR, Eq. 9).
        uniformity_passages: Uniformity of the passages.
        cosine_relevant: Mean cosine of a query and a relevant passage (Topic-DPR, Table 3).
        cosine_other: Mean cosine of a query and a random passage that is not judged relevant for it;
            None if all passages are relevant.
    """

    alignment: float
    uniformity_queries: float
    uniformity_passages: float
    cosine_relevant: float
    cosine_other: float | None


@dataclass(frozen=True)
class EmbeddingMeasures:
    """The measures of embeddings on the queries of a split.

    Attributes:
        unit: The measures of vectors of length 1, as Topic-DPR reports them.
        raw: The measures of the vectors as they are, as DPTDR reports them; None if the encoder normalises them.
        pairs: Number of pairs of a query and a relevant passage.
        queries: Number of queries whose uniformity is measured, over all pairs of them.
        passages: Number of passages whose uniformity is measured, over all pairs of them.
    """

    unit: VectorMeasures
    raw: VectorMeasures | None
    pairs: int
    queries: int
    passages: int

    def document(self) -> dict[str, Any]:
        """Returns the measures as a JSON-able dictionary."""
        return asdict(self)


class MeasureEmbeddingsWork:
    """Measures embeddings on the judged pairs of a split; the constructor opens and checks all inputs.

    Attributes:
        embeddings: The embeddings.
        query_rows: For each pair, the number of its query among `texts`, int64 [pairs].
        passage_rows: For each pair, the row of its passage, int64 [pairs].
        texts: Texts of the queries that have a relevant passage among the embeddings.
        queries: Numbers of the queries whose uniformity is measured, int64, ascending.
        passages: Rows of the passages whose uniformity is measured, int64, ascending.

    Args:
        store: The store.
        name: Name of the embeddings; None if the store has only one.
        queries: The query set.
        split: A split with judgements.
        options: The encoder of the queries; None: the one that made the embeddings.
        limit: Use only the first N queries of the split; None: all.
        sample: Maximum number of queries, and of passages, whose uniformity is measured.
        seed: Seed of the samples.

    Raises:
        InputError: If an artifact is missing or does not fit the others, or if there are too few vectors.
    """

    def __init__(
        self,
        store: Store,
        name: str | None,
        queries: Queries,
        split: str,
        options: SearchOptions | None = None,
        *,
        limit: int | None = None,
        sample: int = SAMPLE,
        seed: int = 0,
    ):
        check_sample(sample, seed)
        if split == ALL:
            have = ", ".join(queries.splits) or "none"
            raise InputError(
                f"{Parameter('split', ALL)}: it has no judgements, and alignment is measured on judged pairs; "
                f"name a split of {queries.artifact.key} with judgements ({have})"
            )
        corpus = Corpus.open(store)
        self.embeddings = Embeddings.open(store, name, corpus)
        self._encoder = QueryEncoder[np.ndarray](store, self.embeddings, options or SearchOptions())
        pairs = read_judged_pairs(corpus, queries, split, limit)
        encoded = [rows[rows < self.embeddings.num_rows] for rows in pairs.rows]
        numbers = [number for number, rows in enumerate(encoded) if len(rows)]
        where = f"{queries.artifact.key} {split}"
        if not numbers:
            raise InputError(
                f"{where}: none of its {pairs.num_queries:,} queries has a relevant passage among the "
                f"{self.embeddings.num_rows:,} passages of embeddings/{self.embeddings.name}: name another split or "
                "query set, or encode the whole corpus"
            )
        relevant = [encoded[number] for number in numbers]
        # The other passages of a relevant document count as relevant, so none is drawn as an irrelevant one.
        others = [pairs.others[number] for number in numbers]
        self._relevant = [
            np.concatenate([rows, same[same < self.embeddings.num_rows]])
            for rows, same in zip(relevant, others, strict=True)
        ]
        self.texts = [pairs.texts[number] for number in numbers]
        self.query_rows = np.repeat(np.arange(len(numbers)), [len(rows) for rows in relevant])
        self.passage_rows = np.concatenate(relevant)
        alive = np.setdiff1d(np.arange(self.embeddings.num_rows), corpus.deleted)
        if len(numbers) < 2 or len(alive) < 2:
            raise InputError(
                f"{where}, embeddings/{self.embeddings.name}: {len(numbers)} queries and {len(alive)} passages, "
                "expected at least 2 of each, as uniformity is measured on pairs of them"
            )
        self._draw = np.random.default_rng(seed)
        self.queries = draw_sample(self._draw, np.arange(len(numbers)), sample)
        self.passages = draw_sample(self._draw, alive, sample)
        self._others = self._draw_others(alive)

    def describe(self) -> str:
        """Returns a text with the numbers of pairs, queries and passages that are measured."""
        return (
            f"alignment of {len(self.query_rows):,} pairs, uniformity of {len(self.queries):,} queries and of "
            f"{len(self.passages):,} passages"
        )

    def _draw_others(self, alive: np.ndarray) -> np.ndarray:
        """Draws an irrelevant passage for the query of each pair: int64 [pairs], -1 if all passages are relevant."""
        others = self._draw.choice(alive, len(self.query_rows))
        for pair, query in enumerate(self.query_rows):
            relevant = self._relevant[query]
            if len(relevant) >= len(alive):
                others[pair] = -1
            while others[pair] in relevant:
                others[pair] = self._draw.choice(alive)
        return others

    def run(self, runner: Runner) -> EmbeddingMeasures:
        """Encodes the queries and returns the measures.

        Raises:
            InputError: If the encoder is not the one that made the embeddings.
        """
        queries = self._encoder.encode(self.texts, runner)
        passages = self.embeddings.take(self.passages)
        forms = vector_forms(self.embeddings)
        sums = dict.fromkeys([*forms, "relevant", "other"], 0.0)
        for start in range(0, len(self.query_rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            asking, relevant = queries[self.query_rows[block]], self._read_vectors(self.passage_rows[block])
            for name, form in forms.items():
                sums[name] += len(asking) * alignment(form(asking), form(relevant))
            sums["relevant"] += len(asking) * mean_cosine(asking, relevant)
            has_other = self._others[block] >= 0
            if has_other.any():
                others = self._read_vectors(self._others[block][has_other])
                sums["other"] += len(others) * mean_cosine(asking[has_other], others)
        num_pairs, num_others = len(self.query_rows), int((self._others >= 0).sum())
        measures = {
            name: VectorMeasures(
                alignment=sums[name] / num_pairs,
                uniformity_queries=uniformity(form(queries[self.queries])),
                uniformity_passages=uniformity(form(passages)),
                cosine_relevant=sums["relevant"] / num_pairs,
                cosine_other=sums["other"] / num_others if num_others else None,
            )
            for name, form in forms.items()
        }
        return EmbeddingMeasures(
            unit=measures["unit"],
            raw=measures.get("raw"),
            pairs=num_pairs,
            queries=len(self.queries),
            passages=len(self.passages),
        )

    def _read_vectors(self, rows: np.ndarray) -> np.ndarray:
        """Reads the vectors of rows, which may be in any order and repeated: float16 [n, dim]."""
        distinct, inverse = np.unique(rows, return_inverse=True)
        return self.embeddings.take(distinct)[inverse]


def vector_forms(embeddings: Embeddings) -> dict[str, Form]:
    """Returns the forms of the vectors to measure: "unit", and "raw" unless the encoder normalises vectors."""
    return (
        {"unit": unit_vectors}
        if embeddings.similarity == "cosine"
        else {"unit": unit_vectors, "raw": _unchanged_vectors}
    )


def check_sample(sample: int, seed: int) -> None:
    """Raises InputError for a sample of fewer than two vectors, or a seed below 0."""
    if sample < 2 or seed < 0:
        raise InputError(
            f"{Parameter('sample', sample)} {Parameter('seed', seed)}: expected at least 2, and at least 0"
        )


def draw_sample(draw: np.random.Generator, numbers: np.ndarray, size: int) -> np.ndarray:
    """Returns a random sample of `size` numbers, ascending; all numbers if there are at most `size`."""
    return numbers if len(numbers) <= size else np.sort(draw.choice(numbers, size, replace=False))


def _unchanged_vectors(vectors: np.ndarray) -> np.ndarray:
    return vectors
