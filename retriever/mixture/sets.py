"""Training sets of several tasks over one corpus, joined into the training data of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retriever.errors import InputError
from retriever.mixture.schedule import Batches, Mixture
from retriever.reranker_data import TeacherScores, TrainingData


@dataclass(frozen=True)
class TrainingSet:
    """Queries of one task.

    Attributes:
        task: The name of the task.
        data: The queries with their passages.
        weight: How often a query comes, relative to queries of other sets.
        similarity: The similarity that the task is trained for; None: that of the encoder.
    """

    task: str
    data: TrainingData
    weight: float = 1.0
    similarity: Literal["cosine", "dot"] | None = None


def mix(sets: Sequence[TrainingSet], batches: Batches = "mixed") -> TrainingData:
    """Returns the queries of all sets, one set after the other, with the mixture that decides about batches.

    A single set is returned as it is.

    Args:
        sets: The training sets, at least one. All are over the same passages.
        batches: "mixed": each batch holds queries of all sets; "one-task": queries of one set.

    Raises:
        InputError: If the sets are of different corpora, if a weight is not positive, or if tasks of different
            similarities would share a batch.
    """
    first = sets[0].data
    for each in sets:
        if not (each.weight > 0 and math.isfinite(each.weight)):
            raise InputError(f"training set {each.task}: weight {each.weight:g}, expected more than 0")
        if each.data.num_passages != first.num_passages or not np.array_equal(each.data.deleted, first.deleted):
            raise InputError(
                f"training sets {sets[0].task} and {each.task} are of different corpora ({first.num_passages:,} and "
                f"{each.data.num_passages:,} passages): train on sets of one corpus"
            )
        if batches == "mixed" and each.similarity != sets[0].similarity:
            raise InputError(
                f"training sets {sets[0].task} (similarity {sets[0].similarity or 'of the encoder'}) and {each.task} "
                f"({each.similarity or 'of the encoder'}) in one batch: expected one similarity; use parameter batches "
                "one-task, or leave a set out"
            )
    if len(sets) == 1:
        return first
    all_data = [each.data for each in sets]
    weights = [data.weights for data in all_data]
    teachers = [data.teacher for data in all_data if data.teacher is not None]
    return TrainingData(
        [query for data in all_data for query in data.queries],
        [rows for data in all_data for rows in data.positives],
        [rows for data in all_data for rows in data.negatives],
        first.num_passages,
        first.passages,
        deleted=first.deleted,
        copies=[rows for data in all_data for rows in data.copies or [np.empty(0, np.int64)] * len(data.queries)],
        teacher=None if len(teachers) < len(sets) else TeacherScores(
            [scores for own in teachers for scores in own.positives],
            [scores for own in teachers for scores in own.negatives],
        ),
        weights=None if None in weights else [each for own in weights for each in own or ()],
        mixture=Mixture(
            tuple(each.task for each in sets),
            tuple(len(data.queries) for data in all_data),
            tuple(float(each.weight) for each in sets),
            batches,
        ),
    )
