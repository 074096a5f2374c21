"""The work that builds topics/NAME: fits topics to a corpus, or infers the topics of its new passages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, passage_contents, save_array
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.indexing.topics.fitting import MIN_DOCUMENTS, fit_tree, tomotopy_version
from riptide.indexing.topics.topic_model_file import SUFFIX, read_topics, write_topics
from riptide.indexing.topics.topic_options import FitOptions
from riptide.indexing.topics.tree import build_topics
from riptide.indexing.work.growth import NextGenerationWork
from riptide.indexing.work.work import Progress, TaskStage, WorkUnit, check_same_config
from riptide.indexing.work.worker_tasks import ONE_CORE, PYTHON_CORE, Allocation, Report, Runner, WorkerResources
from riptide.retriever.topics.model import NO_TOPIC, TopicModel
from riptide.retriever.topics.words import topic_words

KIND = "topics"
MODEL, FITTED = "model", "fitted"  # parts of the fitted generation: the model, and the fitted passages' topics
_REPORT_EVERY = 500  # passages


class FitTopicsWork(NextGenerationWork):
    """The work that builds topics/NAME, or its next generation.

    The first generation is fitted and has the model. A later one has only the topics of the new passages, which are
    inferred; topics of earlier passages never change.
    """

    def __init__(self, store: Store, name: str, options: FitOptions, *, limit: int | None = None):
        """Checks the options, and that the existing generations were fitted with the same ones.

        Args:
            store: The store with the corpus.
            name: The name of the topics.
            options: The options of the fit.
            limit: Uses only the first passages of the corpus.

        Raises:
            InputError: If the corpus is too small, if the existing generations have other options or another corpus,
                or if tomotopy is needed and not installed.
        """
        self.options, self.corpus = options, Corpus.open(store)
        super().__init__(store, KIND, name, self.corpus.generations)
        self.config = options.config() | {"limit": limit}
        self.end = min(limit or self.corpus.num_rows, self.corpus.num_rows)
        if self.previous:
            check_same_config(self.previous[0], self.config)
            self.config["tomotopy"] = self.previous[0].config["tomotopy"]
        else:
            if self.end < MIN_DOCUMENTS:
                raise InputError(
                    f"{store.url}: the corpus has {self.end:,} passages, expected at least {MIN_DOCUMENTS} to fit "
                    "topics: import a larger corpus"
                )
            self.config["tomotopy"] = tomotopy_version()

    @property
    def parts(self) -> list[RowPart]:
        """Returns the parts of the corpus that have no topics yet."""
        return [part for part in self.corpus.parts if self.first_row <= part.first_row < self.end]

    @property
    def stages(self) -> list[TaskStage]:
        """Returns the stages: fit (for the first generation only) and assign.

        Fitting starts again if it is interrupted. Assigning takes the fitted topic of a passage, else infers it.
        """
        units = [
            WorkUnit((f"part-{number:05d}",), min(part.end, self.end) - part.first_row, part)
            for number, part in enumerate(self.parts)
        ]
        fitted = self.previous[0] if self.previous else None
        assign = TaskStage("assign", "passages", units, lambda drafts: AssignTask(drafts[0], fitted))
        if fitted is not None:
            return [assign]
        unit = WorkUnit((MODEL, FITTED), self.options.iterations, None)
        return [TaskStage("fit", "iterations", [unit], self._fit_task), assign]

    def _fit_task(self, drafts: Sequence[Draft]) -> FitTask:
        """Returns the task whose worker fits the topics."""
        return FitTask(drafts[0], self.corpus, self.options, self.end)

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the number of topics, and their sizes in this generation, to the notes."""
        [draft] = drafts
        committed = draft.committed_parts()
        model = read_model(self.previous[0] if self.previous else draft)
        topics = np.concatenate([np.load(draft.local_path(part)) for name, part in committed.items() if _is_part(name)])
        notes: dict[str, object] = {
            "topics": model.num_topics,
            "paths": len(model.path_topics),
            "sizes": np.bincount(topics[topics >= 0], minlength=model.num_topics).tolist(),
            "without_topic": int((topics == NO_TOPIC).sum()),
        }
        if not self.previous:
            notes["fitted"] = committed[FITTED].rows
        draft.add_notes(**notes)


def _is_part(name: str) -> bool:
    return name.startswith("part-")


def model_part(artifact: Artifact | Draft) -> ArtifactPart:
    """Returns the part that holds the topic model. Raises InputError if it is missing."""
    parts = artifact.committed_parts().values() if isinstance(artifact, Draft) else artifact.parts
    for part in parts:
        if part.name == MODEL:
            return part
    raise InputError(f"{artifact.url}: holds no topic model: fit topics under another name")


def read_model(artifact: Artifact | Draft) -> TopicModel:
    """Reads the topic model of the fitted generation."""
    return read_topics(artifact.local_path(model_part(artifact))).model


def sample_rows(corpus: Corpus, end: int, sample: int, seed: int) -> np.ndarray:
    """Draws at most `sample` rows to fit on from the rows below `end` that are not deleted: int64, ascending."""
    rows = np.setdiff1d(np.arange(end, dtype=np.int64), corpus.deleted)
    if len(rows) > sample:
        rows = np.sort(np.random.default_rng(seed).choice(rows, sample, replace=False))
    return rows


def passage_words(parts: Iterable[RowPart], rows: np.ndarray) -> list[list[str]]:
    """Returns the words of title and text for those of `rows` (int64, ascending) that are in the parts."""
    words: list[list[str]] = []
    for part in parts:
        rows_here = set(rows[(rows >= part.first_row) & (rows < part.end)].tolist())
        if rows_here:
            texts = passage_contents([part], part.first_row, part.end)
            words += [topic_words(text) for row, text in enumerate(texts, part.first_row) if row in rows_here]
    return words


@dataclass(frozen=True)
class FitTask:
    """A worker task that fits the topics and commits the model and the topics of the fitted passages."""

    draft: Draft
    corpus: Corpus
    options: FitOptions
    end: int
    resources: WorkerResources = ONE_CORE
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns a function that fits and commits the topics."""
        return lambda unit, report: self._fit_topics(report)

    def _fit_topics(self, report: Report) -> None:
        pinned, version = self.draft.config["tomotopy"], tomotopy_version()
        if version != pinned:
            raise InputError(
                f"{self.draft.url} is fitted with tomotopy {pinned}, the worker has {version}: install the same version"
            )
        rows = sample_rows(self.corpus, self.end, self.options.sample, self.options.seed)
        tree = fit_tree(passage_words(self.corpus.parts, rows), self.options, report)
        topics, assigned = build_topics(tree, self.options)
        has_topic = assigned >= 0
        fitted = np.stack([rows[has_topic], assigned[has_topic]], axis=1)
        self.draft.commit(FITTED, ".npy", functools.partial(save_array, fitted), rows=len(fitted))
        self.draft.commit(MODEL, SUFFIX, functools.partial(write_topics, topics), rows=topics.model.num_topics)


@dataclass(frozen=True)
class AssignTask:
    """A worker task that commits the topics of the passages of a part, fitted or inferred: int64 [rows].

    Attributes:
        draft: The generation that is made.
        fitted: The generation that was fitted; None: the one that is made.
    """

    draft: Draft
    fitted: Artifact | None
    resources: WorkerResources = PYTHON_CORE
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Reads the model and returns a function that commits the topics of a part."""
        model = read_model(self.fitted or self.draft)
        known = np.empty((0, 2), np.int64)
        if self.fitted is None:
            known = np.load(self.draft.local_path(self.draft.committed_parts()[FITTED]))
        return lambda unit, report: self._assign_topics(model, known, unit, report)

    def _assign_topics(self, model: TopicModel, fitted_topics: np.ndarray, unit: WorkUnit, report: Report) -> None:
        [name], part = unit.names, unit.payload
        if self.draft.find_part(name):  # an earlier attempt, whose acknowledgement was lost, has committed the part
            return
        first, end = part.first_row, part.first_row + unit.rows
        topics = np.full(unit.rows, NO_TOPIC, np.int64)
        is_known = np.zeros(unit.rows, bool)
        here = fitted_topics[(fitted_topics[:, 0] >= first) & (fitted_topics[:, 0] < end)]
        topics[here[:, 0] - first] = here[:, 1]
        is_known[here[:, 0] - first] = True
        for row, text in enumerate(passage_contents([part], first, end)):
            if not is_known[row]:
                [topics[row]] = model.infer([text])
            if row % _REPORT_EVERY == 0:
                report(row)
        self.draft.commit(name, ".npy", functools.partial(save_array, topics), rows=unit.rows, first_row=first)
