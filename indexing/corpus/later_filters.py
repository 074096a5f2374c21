"""Replaces the filters of an existing corpus: adds a generation that has only new typed columns for all passages.

Its part `filters-NNNNN` has the columns of the N-th part of passages, from their metadata; they replace those that the
passages had. Passages that are added later get the same columns when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, open_table, write_table
from riptide.indexing.corpus.filters import check_field_names
from riptide.indexing.corpus.importing import refuse_filters_without_values, unused_filter_facts
from riptide.indexing.files.columns import value_at
from riptide.indexing.formats.parse import FILTER_TYPES, check_filter_types, convert_field, convert_filter_value
from riptide.indexing.formats.registry import find_format
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store, generation
from riptide.indexing.work.work import ArtifactTarget, BaseStage, BaseWork, Committed, Progress, WorkUnit
from riptide.indexing.work.worker_tasks import PYTHON_CORE, Allocation, Report, Runner, WorkerResources


class AddFiltersWork(BaseWork):
    """The work that makes a corpus generation with new filters for all existing passages.

    Attributes:
        is_complete: Whether the corpus has exactly these filters already.
    """

    def __init__(self, store: Store, filters: Mapping[str, str]):
        """Checks the filters (field -> type). Raises InputError for an invalid filter, or if there is no corpus."""
        check_filter_types(filters)
        check_field_names(filters)
        self.filters, self.earlier_corpus = dict(filters), Corpus(store.generations("corpus"))
        if not self.earlier_corpus.generations:
            raise InputError(f"{store.url} has no corpus yet: import one, with its filters")
        latest = self.earlier_corpus.generations[-1]
        self.is_complete = latest.config["filters"] == self.filters
        self.config = {
            "format": None,
            "part_size": latest.config["part_size"],
            "filters": self.filters,
            "limit": None,
            "source": [],
            "delete": None,
        }

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the generation to make; [] if it is complete. After bad input, the next command starts it again."""
        if self.is_complete:
            return []
        generations = self.earlier_corpus.generations
        inputs = {"previous": generations[-1]}
        return [
            ArtifactTarget(
                "corpus", generation(len(generations)), inputs, self.config, by_content=True, fails_whole=True
            )
        ]

    @property
    def stages(self) -> list[FilterStage]:
        """Returns the only stage, which makes the typed columns from the metadata of all passages."""
        return [FilterStage(self.earlier_corpus, self.filters)]

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Raises InputError if no passage has a value for a filter; adds no notes."""
        refuse_filters_without_values([part.facts for part in drafts[0].committed_parts().values()], self.filters)


@dataclass(frozen=True)
class FilterStage(BaseStage):
    """The stage that makes the typed columns, one unit for each part of passages."""

    earlier_corpus: Corpus
    filters: Mapping[str, str]
    title: str = "read metadata"
    noun: str = "passages"

    @property
    def total(self) -> int:
        """The number of passages."""
        return self.earlier_corpus.num_rows

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns a unit for each part of passages."""
        parts = enumerate(self.earlier_corpus.parts)
        return [WorkUnit((f"filters-{number:05d}",), part.part.rows, part) for number, part in parts]

    def task(self, drafts: Sequence[Draft]) -> FilterTask:
        """Returns the task that each worker runs."""
        return FilterTask(drafts[0], self.filters)


@dataclass(frozen=True)
class FilterTask:
    """The task that makes and commits the typed columns of a part of passages."""

    draft: Draft
    filters: Mapping[str, str]
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns the function that processes a work unit."""
        return self._make

    def _make(self, unit: WorkUnit, report: Report) -> None:
        part: RowPart = unit.payload
        passages = open_table(part)
        table = pa.table(columns_of_metadata(part, passages, self.filters))
        facts = unused_filter_facts(table.append_column("metadata", passages["metadata"]), self.filters)
        self.draft.commit(unit.names[0], ".arrow", lambda path: write_table(table, path), rows=len(table), **facts)


def columns_of_metadata(part: RowPart, passages: pa.Table, filters: Mapping[str, str]) -> dict[str, pa.Array]:
    """Computes the typed columns of a part of passages from the metadata.

    Args:
        part: The part.
        passages: Its columns.
        filters: Metadata field -> type.

    Raises:
        InputError: With the id of the passage, for a value of another type.
    """
    format = find_format(str(part.artifact.config["format"]))
    is_text = format is not None and format.has_text_values
    columns: dict[str, list[Any]] = {name: [] for name in filters}
    for id, metadata in zip(passages["id"].to_pylist(), passages["metadata"].to_pylist(), strict=True):
        fields = orjson.loads(metadata) if metadata else {}
        for name, kind in filters.items():
            value = convert_field(value_at(fields, name), kind) if is_text else value_at(fields, name)
            columns[name].append(convert_filter_value(partial(_refused_value_error, id), name, kind, value))
    return {f"filter.{name}": pa.array(columns[name], FILTER_TYPES[kind]) for name, kind in filters.items()}


def _refused_value_error(id: str, actual: str, expected: str, remedy: str) -> InputError:
    return InputError(f"passage {id!r}: found {actual}, expected {expected}; {remedy}")
