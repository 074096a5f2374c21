"""The raw data of the tables: what is known of their sizes, and which data are missing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from riptide.base.yaml_files import read_yaml
from riptide.indexing.queries.hold_out import HoldOut
from riptide.indexing.store.store import Store
from riptide.jobs.commands.steps import JobStep
from riptide.jobs.planning.sizes import DEFAULTS, PART_SIZE, Sizes, planned_corpus
from riptide.jobs.reproduction.table import TABLES

IMPORTS = ("import_corpus", "import_queries")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RawData(_Strict):
    """A data set.

    Attributes:
        files: The files of its folder that must exist; empty: it is a file itself.
        download: Where to get it.
        licence: Its licence.
        passages: The number of passages.
        queries: The number of queries by split.
    """

    files: list[str] = Field(default_factory=list)
    download: str
    licence: str
    passages: int = 0
    queries: dict[str, int] = Field(default_factory=dict)


class Facts(_Strict):
    """What is known of data sets, by their path under the folder of raw data."""

    sets: dict[str, RawData]


@functools.cache
def read_facts() -> Facts:
    """Reads the file of the data sets of all tables."""
    return Facts.model_validate(read_yaml(str(TABLES / "data.yaml"), "expected the file of data sets"))


def data_of(step: JobStep, raw: str) -> tuple[str, RawData] | None:
    """Returns the path under the folder of raw data and the description of what a step imports; None: unknown data."""
    source = getattr(step.options, "source", None)
    if step.job not in IMPORTS or source is None:
        return None
    path = str(source).removeprefix(f"{raw.rstrip('/')}/")
    return (path, read_facts().sets[path]) if path in read_facts().sets else None


def add_sizes(sizes: Sizes, step: JobStep, raw: str) -> None:
    """Adds the passages and queries that a step imports; other steps change nothing."""
    if (known := data_of(step, raw)) is None:
        return
    path, data = known
    store, options = step.options.store, step.options
    if data.passages:
        sizes.corpora[store] = planned_corpus(data.passages, DEFAULTS["passage_bytes"], None, PART_SIZE)
    held_out = getattr(options, "hold_out", None)
    hold_out = HoldOut(held_out, getattr(options, "hold_out_split", "train")) if held_out else None
    sizes.add_queries(store, getattr(options, "queries", None) or path, data.queries, hold_out)


def missing_data(steps: Iterable[JobStep], raw: str) -> list[str]:
    """Returns a line for each data set that has to be downloaded: what is missing, from where, and its licence.

    Args:
        steps: The steps that import data.
        raw: Folder of the raw data.
    """
    lines: dict[str, None] = {}
    for step in steps:
        if (known := data_of(step, raw)) is None:
            continue
        path, data = known
        place = f"{raw.rstrip('/')}/{path}"
        if "://" in raw or is_imported(step):
            continue
        folder = Path(place)
        if data.files:
            # Text files may be compressed.
            absent = [name for name in data.files if not any(folder.glob(f"{name}*"))]
        else:
            absent = [] if folder.exists() else [folder.name]
        if absent:
            lines[f"{place}: no {', '.join(absent)}: get {data.download} and put it there; licence: {data.licence}"] = (
                None
            )
    return [*lines]


def is_imported(step: JobStep) -> bool:
    """Returns whether the store of a step has the data that the step imports."""
    store = Store(step.options.store)
    if step.job == "import_corpus":
        return bool(store.generations("corpus"))
    return step.label in store.names("queries")
