"""Reads mined negatives as training data: negatives/NAME holds the positives and negatives of each query."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.teacher import check_teacher, read_teacher
from riptide.indexing.queries.judged_pairs import positive_weights
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.retriever.training.training_data import TeacherScores, TrainingData


class NegativeGroups(NamedTuple):
    """Queries by id, with the rows (int64 [any]) of each one's positives, negatives and copies of positives."""

    query_ids: list[str]
    positives: list[np.ndarray]
    negatives: list[np.ndarray]
    copies: list[np.ndarray]


def read_groups(artifact: Artifact) -> NegativeGroups:
    """Reads all parts of negatives/NAME, in order. Imported negatives may lack the column of copies.

    Raises:
        InputError: If the columns are not the expected ones.
    """
    groups = NegativeGroups([], [], [], [])
    for part in artifact.numbered_parts("part"):
        table = pq.read_table(artifact.local_path(part))
        rows = pa.large_list(pa.int64())
        if "copies" not in table.column_names:
            table = table.append_column("copies", pa.array([[]] * len(table), rows))
        try:
            columns = table.select(["query_id", "positives", "negatives", "copies"]).combine_chunks()
            groups.query_ids.extend(columns["query_id"].cast(pa.string()).to_pylist())
            for name in ("positives", "negatives", "copies"):
                for chunk in columns[name].cast(rows).chunks:
                    starts = chunk.offsets.to_numpy()
                    values = chunk.values.to_numpy()
                    getattr(groups, name).extend(values[a:b] for a, b in itertools.pairwise(starts))
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"{artifact.url}/{part.file}: expected columns query_id, positives and negatives (lists "
                f"of rows): {str(error).splitlines()[0]}"
            ) from error
    return groups


def mined_corpus(store: Store, negatives: Artifact) -> Corpus:
    """Opens the corpus from which negatives were mined, up to the last later generation that deletes passages.

    For a query set, it is the corpus that the judgements need, up to that generation.

    Raises:
        InputError: If the corpus of the store is another one.
    """
    generations = Corpus.open(store).generations
    done, remedy = ("mined from", "mine the negatives")
    if negatives.key.startswith("queries/"):
        done, remedy = ("judged on", "import the queries")
    mined_from = negatives.inputs.get("corpus", {}).get("fingerprint")
    fingerprints = [artifact.fingerprint for artifact in generations]
    if mined_from not in fingerprints:
        raise InputError(
            f"{negatives.url} was {done} the corpus {str(mined_from)[:12]}, the store's is {fingerprints[-1][:12]}: "
            f"{remedy} again"
        )
    last = fingerprints.index(mined_from)
    for number in range(last + 1, len(generations)):
        if generations[number].find_part("deleted") is not None:
            last = number
    return Corpus(generations[: last + 1])


def read_training_data(
    corpus: Corpus,
    queries: Queries,
    split: str,
    negatives: Artifact,
    limit: int | None,
    *,
    teacher: bool = False,
    weighted: bool = False,
) -> TrainingData:
    """Reads the mined queries with a positive among the split's first `limit` queries, in the split's order.

    Deleted passages are neither positives nor negatives. With `weighted`, the scores of the judgements are the sampling
    weights of the positives.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split.
        negatives: The mined negatives.
        limit: Use only the first N queries; None: all.
        teacher: Whether the scores of a re-ranker are read too, for distillation.

    Raises:
        InputError: If there are none, or if the negatives are of other queries, name rows that the corpus lacks, or
            lack a score of the teacher.
    """
    mined_for = negatives.inputs.get("queries", {}).get("fingerprint")
    if mined_for != queries.artifact.fingerprint:
        raise InputError(
            f"{negatives.url} was mined for the queries {str(mined_for)[:12]}, {queries.artifact.key} are "
            f"{queries.artifact.fingerprint[:12]}: name those queries, or mine again"
        )
    selected = queries.split(split, limit)
    groups = read_groups(negatives)
    places = {query_id: place for place, query_id in enumerate(groups.query_ids)}
    chosen = [(places[query_id], text) for query_id, text in zip(*selected, strict=True) if query_id in places]
    rows, lists = [*groups[1:]], [*groups[1:]]
    if teacher:
        rows += rows[:2]
        lists += read_teacher(negatives, *groups[:3])
    lists = [_without_deleted(own, corpus.deleted, of) for own, of in zip(lists, rows, strict=True)]
    chosen = [(place, text) for place, text in chosen if len(lists[0][place])]
    if not chosen:
        raise InputError(
            f"{negatives.url}: none of the {len(selected.ids):,} queries of the split {split!r} has "
            "positives and negatives there"
        )
    positives, mined, copies, *scores = ([own[place] for place, _ in chosen] for own in lists)
    query_ids = [groups.query_ids[place] for place, _ in chosen]
    check_has_negatives(corpus, negatives.url, query_ids, positives, copies)
    every = np.concatenate([*positives, *mined, *copies])
    if every.min() < 0 or every.max() >= corpus.num_rows:
        raise InputError(f"{negatives.url}: names rows {every.min()} to {every.max()} of a corpus of {corpus.num_rows}")
    teacher_scores = TeacherScores(*scores) if teacher else None
    if teacher_scores is not None:
        check_teacher(negatives, corpus, query_ids, positives, mined, teacher_scores)
    weights = positive_weights(corpus, queries, split, query_ids, positives) if weighted else None
    return TrainingData(
        [text for _, text in chosen],
        positives,
        mined,
        corpus.num_rows,
        passage_reader(corpus),
        deleted=corpus.deleted,
        copies=copies,
        weights=weights,
        teacher=teacher_scores,
    )


def check_has_negatives(
    corpus: Corpus, url: str, query_ids: Sequence[str], positives: Sequence[np.ndarray], copies: Sequence[np.ndarray]
) -> None:
    """Raises InputError if a query has no possible negative, as all passages of the corpus are its positives.

    Args:
        corpus: The corpus.
        url: Where the positives are from, for the message.
        query_ids: Ids of the queries.
        positives: Rows of each query's positives.
        copies: Rows of the copies of each query's positives.
    """
    for query, rows, same in zip(query_ids, positives, copies, strict=True):
        if len(rows) + len(same) + len(corpus.deleted) >= corpus.num_rows:
            deletion_note = " or deleted" if len(corpus.deleted) else ""
            raise InputError(
                f"{url}: each of the {corpus.num_rows} passages is a positive of the query {query!r}"
                f"{deletion_note}, so none is left for a negative"
            )


def passage_reader(corpus: Corpus) -> Callable[[np.ndarray], tuple[list[str], list[str]]]:
    """Returns a function that maps rows int64 [n] to n titles and n texts."""

    def passages(rows: np.ndarray) -> tuple[list[str], list[str]]:
        records = corpus.passages(rows)
        return [passage.title for passage in records], [passage.text for passage in records]

    return passages


def _without_deleted(lists: list[np.ndarray], deleted: np.ndarray, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Removes the values of deleted rows from lists; `rows` has the row of each value."""
    if not rows or not len(deleted):
        return lists
    kept = np.split(~np.isin(np.concatenate(rows), deleted), np.cumsum([len(own) for own in rows])[:-1])
    return [values[mask] for values, mask in zip(lists, kept, strict=True)]
