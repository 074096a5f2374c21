"""Reads the scores of the teacher, a re-ranker, that negatives/NAME stores for its positives and negatives.

The columns are `positive_probability` and `probability`, list<float32>, in the order of `positives` and `negatives`.
`mine_negatives --teacher-scores` fills them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.artifact import Artifact
from riptide.retriever.training.training_data import TeacherScores

_REMEDY = f"mine the negatives with a re-ranker and {Parameter('teacher_scores')}"


def read_teacher(
    artifact: Artifact, query_ids: Sequence[str], positives: Sequence[np.ndarray], negatives: Sequence[np.ndarray]
) -> TeacherScores:
    """Reads the teacher's probabilities for all pairs of negatives/NAME; NaN for a pair without a score.

    Args:
        artifact: The negatives.
        query_ids: The ids of its queries.
        positives: Rows of the positives of each query, int64 [any].
        negatives: Rows of the negatives of each query, int64 [any].

    Raises:
        InputError: If there are no scores, or if they are of other pairs or of several re-rankers, or no probabilities.
    """
    sources = {entry["artifact"].rpartition("/")[0] for role, entry in artifact.inputs.items() if role[:7] == "scores/"}
    if len(sources) > 1:
        raise InputError(
            f"{artifact.url}: has teacher scores of several re-rankers, {' and '.join(sorted(sources))}: "
            "mine the negatives again, with one of them"
        )
    scores = TeacherScores(_read_lists(artifact, "positive_probability"), _read_lists(artifact, "probability"))
    for side, rows, known in (("positives", positives, scores.positives), ("negatives", negatives, scores.negatives)):
        for query_id, own, values in zip(query_ids, rows, known, strict=True):
            if len(own) != len(values):
                raise InputError(
                    f"{artifact.url}: has teacher scores for other pairs: {len(values)} scores for the {len(own)} "
                    f"{side} of the query {query_id!r}; {_REMEDY}"
                )
            if ((values < 0) | (values > 1)).any():
                raise InputError(
                    f"{artifact.url}: has the teacher scores {np.nanmin(values)} to {np.nanmax(values)} for {side} of "
                    f"the query {query_id!r}, expected probabilities, 0 to 1; {_REMEDY}"
                )
    return scores


def check_teacher(
    artifact: Artifact,
    corpus: Corpus,
    query_ids: Sequence[str],
    positives: Sequence[np.ndarray],
    negatives: Sequence[np.ndarray],
    scores: TeacherScores,
) -> None:
    """Raises InputError, with the query and the passage, if a pair that training may draw has no teacher score.

    Args:
        artifact: The negatives.
        corpus: The corpus.
        query_ids: The ids of the queries of training.
        positives: Rows of the positives of each query, int64 [any].
        negatives: Rows of the negatives of each query, int64 [any].
        scores: The scores of both.
    """
    for side, rows, known in (("positive", positives, scores.positives), ("negative", negatives, scores.negatives)):
        for query_id, own, values in zip(query_ids, rows, known, strict=True):
            if len(unknown := own[np.isnan(values)]):
                [passage] = corpus.ids(unknown[:1])
                raise InputError(
                    f"{artifact.url}: has teacher scores for other pairs: none for the query {query_id!r} and its "
                    f"{side} {passage!r}; {_REMEDY}"
                )


def _read_lists(artifact: Artifact, name: str) -> list[np.ndarray]:
    """Reads a column of lists of probabilities: float32 [any] per query, NaN for null."""
    lists: list[np.ndarray] = []
    for part in artifact.numbered_parts("part"):
        table = pq.read_table(artifact.local_path(part))
        if name not in table.column_names:
            raise InputError(f"{artifact.url}: has no teacher scores (column {name}); {_REMEDY}")
        try:
            column = table[name].cast(pa.large_list(pa.float32()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"{artifact.url}/{part.file}: expected lists of probabilities in the column {name}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        for chunk in column.chunks:
            starts, values = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
            lists.extend(values[a:b] for a, b in itertools.pairwise(starts))
    return lists
