"""Search by document in a corpus of split documents: a document ranks by its best piece (MaxP, Dai and Callan 2019)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow.compute as pc

from indexing.corpus.corpus import Corpus, open_table
from indexing.exact import Hits, nothing
from indexing.exact.hits import padded
from indexing.hit_sources.kind import HitSource
from indexing.hit_sources.query_encoder import SelectedTexts
from indexing.store.chain import RowPart
from indexing.work.tasks import Runner

By = Literal["document", "passage"]  # what the hits of a search are; the same unless the corpus is split

CELLS = 1 << 24  # hits of pieces that are in memory at once: about 600 MB with what is computed of them


def is_by_document(corpus: Corpus, by: By | None) -> bool:
    """Returns whether the hits of a search are documents, each as its best piece; None: if the corpus is split.

    Hits are passages if the corpus is not split: each passage is a document then.
    """
    return corpus.is_split and by != "passage"


class Documents:
    """The documents of pieces, by number: the number of a document is the row of its first piece.

    Args:
        parts: Parts of a corpus of split documents.
    """

    def __init__(self, parts: Sequence[RowPart]):
        self._parts = parts
        self.num_rows = parts[-1].end if parts else 0

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Returns the number of the document of each row of the parts, int64, any shape; -1 for a row of -1."""
        places = np.searchsorted(self._first_pieces, rows, side="right") - 1
        return np.where(rows >= 0, self._first_pieces[places], -1)

    @functools.cached_property
    def _first_pieces(self) -> np.ndarray:
        """The rows at which a document begins, int64, ascending."""
        rows = [np.empty(0, np.int64)]
        for part in self._parts:
            names = open_table(part).column("document").combine_chunks()
            changes = pc.not_equal(names[1:], names[:-1]).to_numpy(zero_copy_only=False)
            rows.append(part.first_row + np.concatenate([[0], 1 + np.flatnonzero(changes)]))
        return np.concatenate(rows)


def best_pieces(hits: Hits, documents: np.ndarray, k: int) -> Hits:
    """Returns the first k documents of each query, each as its best piece.

    Args:
        hits: Hits of pieces, [q, any]; missing hits may be anywhere.
        documents: The number of the document of each hit, int64 [q, any]; -1: no hit.
        k: Number of documents per query.

    Returns:
        The scores and rows of the best pieces, [q, k]. Equal scores of a document's pieces: the first one.
    """
    is_best = _is_first(documents)
    order = np.argsort(~is_best, axis=1, kind="stable")[:, :k]
    is_kept = np.take_along_axis(is_best, order, axis=1)
    scores, rows = (np.take_along_axis(column, order, axis=1) for column in hits)
    return padded(Hits(np.where(is_kept, scores, np.float32(-np.inf)), np.where(is_kept, rows, -1)), k)


def has_documents(hits: Hits, documents: np.ndarray, k: int) -> np.ndarray:
    """Returns whether the hits of each query have k documents, or are all that its source finds: bool [q]."""
    return (_is_first(documents).sum(axis=1) >= k) | (hits.rows[:, -1] < 0)


def _is_first(documents: np.ndarray) -> np.ndarray:
    """Returns which hits are the first of their document: bool [q, any]; missing hits are not."""
    order = np.argsort(documents, axis=1, kind="stable")
    in_order = np.take_along_axis(documents, order, axis=1)
    is_first = in_order >= 0
    is_first[:, 1:] &= in_order[:, 1:] != in_order[:, :-1]
    result = np.empty(documents.shape, bool)
    np.put_along_axis(result, order, is_first, axis=1)
    return result


def first_depth(k: int, rerank_depth: int) -> int:
    """Returns the number of pieces in which k documents are looked for first."""
    return max(2 * k, rerank_depth)


def search_documents(
    source: HitSource,
    texts: Sequence[str],
    k: int,
    runner: Runner,
    documents: Documents,
    *,
    rerank: Callable[[Hits, Sequence[str]], Hits] | None = None,
    rerank_depth: int = 0,
    excluded: np.ndarray | None = None,
) -> Hits:
    """Returns the best piece of the top k documents of each query.

    Queries whose pieces have fewer than k documents are searched again, twice as deep each time. So the hits of a query
    do not depend on the other queries.

    Args:
        source: Finds pieces.
        texts: The texts of the queries.
        k: Number of documents per query.
        runner: What spreads the search over workers.
        documents: The documents of the whole corpus.
        rerank: Re-ranks the pieces of some queries; None: they keep their order.
        rerank_depth: Number of pieces per query that `rerank` needs.
        excluded: The number of a document that is no hit of a query, int64 [q]; None: all can be hits.

    Returns:
        Scores and rows, [q, k]: those of the best pieces.
    """
    scores, rows = nothing(len(texts), k)
    most = max(1, documents.num_rows)
    wanted = k + (excluded is not None)
    pending, depth = np.arange(len(texts)), min(first_depth(wanted, rerank_depth), most)
    while len(pending):
        short = []
        for numbers in np.array_split(pending, -(-len(pending) * depth // CELLS)):
            some = texts if len(numbers) == len(texts) else SelectedTexts(texts, numbers)
            hits = source.search(some, depth, runner)
            of = documents.numbers(hits.rows)
            is_done = has_documents(hits, of, wanted) | (depth == most)
            short.append(numbers[~is_done])
            numbers, hits = numbers[is_done], Hits(hits.scores[is_done], hits.rows[is_done])
            if not len(numbers):
                continue
            if excluded is not None:
                hits = Hits(hits.scores, np.where(of[is_done] == excluded[numbers, None], -1, hits.rows))
            if rerank is not None:
                hits = rerank(hits, [texts[number] for number in numbers])
            scores[numbers], rows[numbers] = best_pieces(hits, documents.numbers(hits.rows), k)
        pending, depth = np.concatenate(short), min(2 * depth, most)
    return Hits(scores, rows)
