"""Measures embeddings by category (Topic-DPR, Table 3): a passage is relevant if it has a category of the query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.measures.embedding_measures import (
    SAMPLE,
    EmbeddingMeasures,
    Form,
    VectorMeasures,
    check_sample,
    draw_sample,
    vector_forms,
)
from riptide.indexing.measures.vectors import uniformity, unit_vectors
from riptide.indexing.queries.category_relevance import CategoryRelevance
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Runner

_BLOCK = 512  # number of queries whose products with all passages are in memory at once


@dataclass(frozen=True)
class CategoryEmbeddingMeasures(EmbeddingMeasures):
    """The measures of embeddings if passages with a category of the query are relevant.

    Attributes:
        other_pairs: Number of pairs of a query and a passage that is not relevant.
    """

    other_pairs: int = 0


class MeasureByCategoryWork:
    """Measures all pairs of sampled queries and passages; the constructor opens and checks all inputs.

    Alignment is the mean squared distance of the relevant pairs (Topic-DPR, Eq. 8), and cosines are means over the
    relevant pairs and over all others.

    Attributes:
        embeddings: The embeddings.
        texts: Texts of the queries that are measured.
        passages: Rows of the passages that are measured, int64, ascending.
        num_pairs: Number of relevant pairs.

    Args:
        store: The store.
        name: Name of the embeddings; None if the store has only one.
        queries: The query set.
        split: A split, or "all".
        field: The metadata field with the categories.
        options: The encoder of the queries; None: the one that made the embeddings.
        limit: Use only the first N queries of the split; None: all.
        sample: Maximum number of queries, and of passages.
        seed: Seed of the samples.

    Raises:
        InputError: If an artifact is missing or does not fit the others, if a passage or a query has no categories, if
            no pair is relevant, or if there are too few vectors.
    """

    def __init__(
        self,
        store: Store,
        name: str | None,
        queries: Queries,
        split: str,
        field: str,
        options: SearchOptions | None = None,
        *,
        limit: int | None = None,
        sample: int = SAMPLE,
        seed: int = 0,
    ):
        check_sample(sample, seed)
        corpus = Corpus.open(store)
        self.embeddings = Embeddings.open(store, name, corpus)
        self._encoder = QueryEncoder[np.ndarray](store, self.embeddings, options or SearchOptions())
        draw = np.random.default_rng(seed)
        selected = queries.split(split, limit)
        chosen = draw_sample(draw, np.arange(len(selected.ids)), sample)
        self.passages = draw_sample(draw, np.setdiff1d(np.arange(self.embeddings.num_rows), corpus.deleted), sample)
        where = f"{queries.artifact.key} {split}, embeddings/{self.embeddings.name}"
        if len(chosen) < 2 or len(self.passages) < 2:
            raise InputError(
                f"{where}: {len(chosen)} queries and {len(self.passages)} passages, expected at least 2 of each, as "
                "uniformity is measured on pairs of them"
            )
        ids = [selected.ids[number] for number in chosen]
        self.texts = [selected.texts[number] for number in chosen]
        self._relevance = CategoryRelevance(corpus, field)
        qrels = None if split == ALL else queries.qrels(split)
        by_query = self._relevance.categories_of(queries, ids, qrels).by_query
        self._categories = [by_query[id] for id in ids]
        self.num_pairs = sum(int(self._relevance_of_block(n, n + 1).sum()) for n in range(len(ids)))
        if not self.num_pairs:
            raise InputError(
                f"{where}: none of the {len(ids):,} queries has a category of one of the {len(self.passages):,} "
                f"passages; measure more of them with {Parameter('sample')}, or name another field"
            )

    def describe(self) -> str:
        """Returns a text with the numbers of pairs, queries and passages that are measured."""
        num_queries, num_passages = len(self.texts), len(self.passages)
        return (
            f"alignment of {self.num_pairs:,} pairs with a common category, of all {num_queries * num_passages:,} of "
            f"{num_queries:,} queries and {num_passages:,} passages, and uniformity of both"
        )

    def run(self, runner: Runner) -> CategoryEmbeddingMeasures:
        """Encodes the queries and returns the measures.

        Raises:
            InputError: If the encoder is not the one that made the embeddings.
        """
        queries, passages = self._encoder.encode(self.texts, runner), self.embeddings.take(self.passages)
        return measures_by_category(queries, passages, self._relevance_of_block, vector_forms(self.embeddings))

    def _relevance_of_block(self, start: int, end: int) -> np.ndarray:
        """Returns whether each passage is relevant for each query in [start, end): bool [queries, passages]."""
        return np.stack([self._relevance.relevant(names)[self.passages] for names in self._categories[start:end]])


def measures_by_category(
    queries: np.ndarray,
    passages: np.ndarray,
    relevant: Callable[[int, int], np.ndarray],
    forms: Mapping[str, Form],
) -> CategoryEmbeddingMeasures:
    """Computes the measures over all pairs of the given queries and passages.

    Args:
        queries: Their vectors, float32 [q, dim].
        passages: Their vectors, float16 or float32 [n, dim].
        relevant: Called as relevant(start, end); returns which passages are relevant for the queries from `start` to
            `end`: bool [queries, n]. At least one pair is relevant.
        forms: The forms in which vectors are measured, "unit" among them (`vector_forms`).
    """
    num_pairs, distances = 0, dict.fromkeys(forms, 0.0)
    relevant_sum = other_sum = 0.0
    in_forms = {name: (form(queries).astype(float), form(passages).astype(float)) for name, form in forms.items()}
    directions = unit_vectors(queries), unit_vectors(passages)
    for start in range(0, len(queries), _BLOCK):
        rows = slice(start, start + _BLOCK)
        is_relevant = relevant(start, start + _BLOCK)
        num_pairs += int(is_relevant.sum())
        cosines = directions[0][rows] @ directions[1].T
        relevant_sum += float(cosines[is_relevant].sum())
        other_sum += float(cosines[~is_relevant].sum())
        for name, (some, others) in in_forms.items():
            squares = (some[rows] ** 2).sum(1)[:, None] + (others**2).sum(1)
            distances[name] += float((squares - 2 * (some[rows] @ others.T))[is_relevant].sum())
    num_others = len(queries) * len(passages) - num_pairs
    measures = {
        name: VectorMeasures(
            alignment=distances[name] / num_pairs,
            uniformity_queries=uniformity(some),
            uniformity_passages=uniformity(others),
            cosine_relevant=relevant_sum / num_pairs,
            cosine_other=other_sum / num_others if num_others else None,
        )
        for name, (some, others) in in_forms.items()
    }
    return CategoryEmbeddingMeasures(
        unit=measures["unit"],
        raw=measures.get("raw"),
        pairs=num_pairs,
        queries=len(queries),
        passages=len(passages),
        other_pairs=num_others,
    )
