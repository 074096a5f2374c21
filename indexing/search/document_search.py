"""Searches a corpus of split documents, and ranks each document by its best passage.

A document ranks by its best passage (MaxP, Dai and Callan 2019), after fusion and re-ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from riptide.indexing.corpus.corpus import Corpus, DocumentNumbers
from riptide.indexing.exact import Hits, empty_hits, pad_hits
from riptide.indexing.hit_sources.fusion import Fusion, source_depth
from riptide.indexing.hit_sources.query_encoder import SelectedTexts
from riptide.indexing.hit_sources.search_options import By
from riptide.indexing.hit_sources.source_kind import HitSource
from riptide.indexing.work.worker_tasks import Runner

DEEPER = 4  # the first search finds DEEPER * k passages for k documents; each next search is deeper by this factor
CELLS = 1 << 24  # maximum number of hits in memory at once: about 600 MB with derived arrays


def is_by_document(corpus: Corpus, by: By | None) -> bool:
    """Returns whether the hits of a search are documents, each represented by its best passage.

    They are if the corpus is split, unless `by` is "passage". Otherwise hits are passages.
    """
    return corpus.is_split and by != "passage"


def best_passages(hits: Hits, documents: np.ndarray, k: int) -> Hits:
    """Returns the first k documents of each query, each represented by its best passage.

    Args:
        hits: Hits of passages, [q, any]; missing hits may be anywhere.
        documents: The number of the document of each hit, int64 [q, any]; -1: no hit.
        k: Number of documents per query.

    Returns:
        The scores and rows of the best passages, [q, k]. Equal scores of a document's passages: the first one.
    """
    is_best = _is_first_of_document(documents)
    order = np.argsort(~is_best, axis=1, kind="stable")[:, :k]
    is_kept = np.take_along_axis(is_best, order, axis=1)
    scores, rows = (np.take_along_axis(column, order, axis=1) for column in hits)
    return pad_hits(Hits(np.where(is_kept, scores, np.float32(-np.inf)), np.where(is_kept, rows, -1)), k)


def has_enough_documents(documents: np.ndarray, k: int, rerank_depth: int = 0) -> np.ndarray:
    """Returns whether each query has enough hits: bool [q].

    Args:
        documents: The number of the document of each hit, int64 [q, any]; -1: no hit, or one that is excluded.
        k: Number of documents that are enough.
        rerank_depth: Number of passages that are enough.
    """
    has_documents: np.ndarray = _is_first_of_document(documents).sum(axis=1) >= k
    return has_documents & ((documents >= 0).sum(axis=1) >= rerank_depth)


def _is_first_of_document(documents: np.ndarray) -> np.ndarray:
    """Returns whether each hit is the first one of its document: bool [q, any]; False for missing hits."""
    order = np.argsort(documents, axis=1, kind="stable")
    in_order = np.take_along_axis(documents, order, axis=1)
    is_first = in_order >= 0
    is_first[:, 1:] &= in_order[:, 1:] != in_order[:, :-1]
    result = np.empty(documents.shape, bool)
    np.put_along_axis(result, order, is_first, axis=1)
    return result


def passages_to_rerank(hits: Hits, documents: np.ndarray, k: int, rerank_depth: int) -> Hits:
    """Returns the hits of one query to re-rank, so that `reranked_documents` can then return k documents.

    They are the first `rerank_depth` ones, and below them the best passage of each of the first k documents.

    Args:
        hits: Hits of passages, [1, any].
        documents: The number of the document of each hit, int64 [1, any]; -1: no hit.
        k: Number of documents.
        rerank_depth: Number of passages to re-rank.
    """
    is_needed = _is_first_of_document(documents)
    is_needed &= np.cumsum(is_needed, axis=1) <= k
    is_needed[:, :rerank_depth] = documents[:, :rerank_depth] >= 0
    return Hits(hits.scores[is_needed][None], hits.rows[is_needed][None])


def reranked_documents(hits: Hits, documents: np.ndarray, k: int) -> Hits:
    """Returns `best_passages` of re-ranked hits; the score of a document below the re-ranked passages is -rank."""
    scores, rows = best_passages(hits, documents, k)
    ranks = np.arange(1, rows.shape[1] + 1, dtype=np.float32)
    return Hits(np.where((rows >= 0) & (scores < 0), -ranks, scores), rows)


def first_search_depth(k: int, rerank_depth: int, num_sources: int) -> int:
    """Returns the depth of the first search for k documents; at least FUSION_DEPTH if several sources are fused."""
    return source_depth(max(DEEPER * k, rerank_depth), num_sources)


def search_documents(
    source: HitSource,
    texts: Sequence[str],
    k: int,
    runner: Runner,
    documents: DocumentNumbers,
    *,
    allowed_rows: np.ndarray | None = None,
    rerank: Callable[[Hits, Sequence[str]], Hits] | None = None,
    rerank_depth: int = 0,
    excluded: np.ndarray | None = None,
) -> Hits:
    """Searches documents: returns the best passage of each of the top k documents per query.

    Queries with fewer than k documents, or than `rerank_depth` passages, are searched again, DEEPER times as deep each
    time. So the hits of a query do not depend on the other queries.

    Args:
        source: Finds passages.
        texts: The texts of the queries.
        k: Number of documents per query.
        runner: What spreads the search over workers.
        documents: The documents of the whole corpus.
        allowed_rows: The rows of the passages that can be hits, int64 ascending; None: all.
        rerank: Re-ranks the passages of some queries; None: they keep their order.
        rerank_depth: Number of passages per query that `rerank` needs.
        excluded: The number of a document that is no hit of a query, int64 [q]; None: all can be hits.

    Returns:
        Scores and rows, [q, k]: those of the best passages.
    """
    scores, rows = empty_hits(len(texts), k)
    most = max(1, documents.num_rows)
    num_sources = len(source.sources) if isinstance(source, Fusion) else 1
    pending, depth = np.arange(len(texts)), min(first_search_depth(k, rerank_depth, num_sources), most)
    while len(pending):
        short = []
        for numbers in np.array_split(pending, -(-len(pending) * depth // CELLS)):
            some = texts if len(numbers) == len(texts) else SelectedTexts(texts, numbers)
            hits = source.search(some, depth, runner, allowed_rows)
            hit_documents = documents.numbers(hits.rows)
            if excluded is not None:
                is_excluded = hit_documents == excluded[numbers, None]
                hit_documents = np.where(is_excluded, -1, hit_documents)
            has_all_hits = (hits.rows[:, -1] < 0) | (depth == most)
            is_done = has_enough_documents(hit_documents, k, rerank_depth) | has_all_hits
            short.append(numbers[~is_done])
            numbers, hit_documents = numbers[is_done], hit_documents[is_done]
            if not len(numbers):
                continue
            hits = Hits(hits.scores[is_done], np.where(hit_documents < 0, -1, hits.rows[is_done]))
            if rerank is None:
                scores[numbers], rows[numbers] = best_passages(hits, hit_documents, k)
            else:
                hits = rerank(hits, [texts[number] for number in numbers])
                scores[numbers], rows[numbers] = reranked_documents(hits, documents.numbers(hits.rows), k)
        pending, depth = np.concatenate(short), min(DEEPER * depth, most)
    return Hits(scores, rows)
