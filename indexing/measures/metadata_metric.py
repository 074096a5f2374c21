"""The interface of a metric that compares hits with metadata of the queries, in place of judgements."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries


class MetadataMetric(ABC):
    """A metric that compares hits with metadata of the queries. To add one, put an object of a subclass in the list
    METADATA_METRICS in `riptide.jobs.evaluation.measures`.

    Attributes:
        form: How it is written: its name, with @K if it counts the first K hits.
        summary: What it measures, for --help.
        metadata_name: What it needs of the queries, for messages.
    """

    form: str
    summary: str
    metadata_name: ClassVar[str]

    def matches(self, name: str) -> bool:
        """Returns whether a name has the form of this metric; its cutoff is not checked."""
        pattern = re.escape(self.form.removesuffix("@K")) + (r"@(0|[1-9]\d{0,49})" if self.form.endswith("@K") else "")
        return re.fullmatch(pattern, name, re.ASCII) is not None

    @abstractmethod
    def read(self, queries: Queries, ids: Sequence[str]) -> Mapping[str, Any]:
        """Returns the metadata by query id, in the order of `ids`; the value is empty for a query without metadata.

        Raises:
            InputError: If no query has it, or if that of a query is invalid.
        """

    @abstractmethod
    def values(
        self, run: pa.Table, metadata: Mapping[str, Any], corpus: Corpus, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Returns the values by name of the metric: float64 [queries] each, in the order of `metadata`.

        Args:
            run: Columns query_id, id of the passage, score; see `ranked_hits`.
            metadata: What `read` has returned.
            corpus: The corpus; some hits may be missing from it.
            names: The names of the metric that are measured, with different cutoffs.

        Raises:
            InputError: If a passage lacks what the metric needs.
        """


def cutoff_of(name: str) -> int:
    """Returns the cutoff K of a metric's name NAME@K."""
    return int(name.rpartition("@")[2])
