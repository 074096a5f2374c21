"""Measures arms: searches a split and evaluates the hits by running jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.hit_sources.modes import hybrid_source
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.measures.sparsity import sparsity_figures
from riptide.indexing.queries.queries import Queries
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.jobs.commands.steps import JobStep, make_step
from riptide.jobs.experiments.arms import DataSet, Experiment, Settings
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.results import RunValues
from riptide.jobs.experiments.trials import Trial, copy_prompt
from riptide.retriever.encoding.sparse_vectors import SparseVectors

ENCODING = ("pooling", "normalize", "query_prefix", "passage_prefix", "title", "query_length", "passage_length")
SPLADE = "splade"


@dataclass(frozen=True)
class ControlSearchRequest:
    """The search that a control function performs in place of a job.

    Attributes:
        store: The store of the set.
        queries: Name of the query set; None: the only one.
        split: The split.
        task: Name of the trained task.
        arm: Options of the arm, its chosen values too.
        seed: The seed of the training run.
        file: The TREC file to write.
    """

    store: str
    queries: str | None
    split: str
    task: str
    arm: Settings
    seed: int
    file: str


@dataclass(frozen=True)
class ControlFunctions:
    """The functions that train or search a control arm in place of the jobs.

    Attributes:
        train: Trains the task of a step; None: the job.
        search: Searches a split and writes the hits; None: the jobs.
    """

    train: Callable[[JobStep], None] | None = None
    search: Callable[[ControlSearchRequest], None] | None = None


@dataclass(frozen=True)
class MeasuredSource:
    """A source to search, and the embeddings that are measured with it.

    Attributes:
        name: Name of the run, without the split.
        source: The source, as `search` takes it.
        task: The task of the queries; None: that of the embeddings.
        embeddings: Embeddings that the arm has in a store; None: there are none.
        is_sparse: Whether they are sparse.
    """

    name: str
    source: str
    task: str | None = None
    embeddings: str | None = None
    is_sparse: bool = False


@dataclass(frozen=True)
class Measurement:
    """Measures the arms of an experiment on its sets.

    Attributes:
        experiment: The experiment.
        path: Its file.
        folder: Folder of the figures and of the runs that controls make.
        performer: Performs the steps.
    """

    experiment: Experiment
    path: str
    folder: Path
    performer: Performer

    def measure_untrained(self, arm: str, set_name: str) -> dict[str, RunValues]:
        """Returns the values of an arm that is not trained, on a set; those of an encoder as `measure_trial` does."""
        options, data_set = self.experiment.arms[arm], self.experiment.sets[set_name]
        name, split = f"floor-{arm}", self.experiment.split_of(set_name)
        if options.source is not None:
            return {"": self._search_and_evaluate(MeasuredSource(name, options.source), set_name, split)}
        common = dict(self.experiment.common)
        if common.get("pooling") == SPLADE:
            del common["pooling"]  # trained arms have a head for this pooling, an untrained encoder has none
        every = {**common, **data_set.train, **options.settings}
        self._encode_corpus(arm, data_set, name, every, encoder=self._encoder_folder(options.encoder or ""))
        return self._measure_fused(self._source_over(data_set.store, name, every), name, set_name, split)

    def measure_trial(self, trial: Trial, set_name: str, split: str) -> dict[str, RunValues]:
        """Returns the values of a trained task on a set: alone under "", fused with another source under its name."""
        return self._measure_fused(self._prepare_source(trial, set_name), trial.name, set_name, split)

    def _measure_fused(self, source: MeasuredSource, name: str, set_name: str, split: str) -> dict[str, RunValues]:
        """Returns the values of a source on a set: alone under "", fused with another source under its name."""
        values = {"": self._search_and_evaluate(source, set_name, split)}
        if other := self.experiment.hybrid:
            fused = MeasuredSource(
                f"{other}-{name}".replace(":", "-"), hybrid_source(other, source.source), source.task
            )
            values[other] = self._search_and_evaluate(fused, set_name, split)
        return values

    def measure_control(
        self, search: Callable[[ControlSearchRequest], None], trial: Trial, task: str, set_name: str, split: str
    ) -> dict[str, RunValues]:
        """Returns the values of a control arm on a set; searches only if the run file does not exist.

        Args:
            search: Makes the run.
            trial: The trial.
            task: Name of the trained task.
            set_name: Name of the set.
            split: The split.
        """
        data_set = self.experiment.sets[set_name]
        file = self.folder / f"{trial.name}-{set_name}-{split}.trec"
        if not self.performer.plan and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            search(
                ControlSearchRequest(
                    data_set.store, data_set.queries, split, task, trial.options, trial.seed, str(file)
                )
            )
        return {"": self._evaluate_run(str(file), set_name, split, file.stem)}

    def _prepare_source(self, trial: Trial, set_name: str) -> MeasuredSource:
        """Returns the source that searches a set for a training run; encodes the corpus if needed."""
        data_set, options = self.experiment.sets[set_name], {**trial.options, **self.experiment.sets[set_name].train}
        name, is_foreign = trial.name, trial.store != data_set.store
        if options.get("prompt") == "per-task" and set_name in trial.trained_on:
            name = f"{name}-{data_set.train.get('queries', data_set.queries)}"
        if trial.kind == "models":
            prompt = trial.own_prompt
            if prompt and options.get("prompt") != "synthesised":  # passages have this prompt too
                self._encode_corpus(trial.arm, data_set, name, {}, task=prompt)
                return self._source_over(data_set.store, name, trial.options)
            encoder = self._model_folder(trial) if is_foreign else f"models/{name}"
            self._encode_corpus(trial.arm, data_set, name, trial.options, encoder=encoder)
            return replace(self._source_over(data_set.store, name, trial.options), task=prompt)
        if is_foreign and not self.performer.plan:
            copy_prompt(trial.store, data_set.store, name)
        if trial.keeps_passages:
            embeddings = options["embeddings"]
            is_sparse = options.get("pooling") == SPLADE
            return MeasuredSource(name, f"{SPLADE if is_sparse else 'exact'}:{embeddings}", name, embeddings, is_sparse)
        self._encode_corpus(trial.arm, data_set, name, {}, task=name)
        return self._source_over(data_set.store, name, trial.options)

    def _encoder_folder(self, name: str) -> str:
        """Returns the folder of a model that another store has under STORE/models/NAME; other names are unchanged."""
        url, separator, model = name.rpartition("/models/")
        if not separator or self.performer.plan or model not in Store(url).names("models"):
            return name
        return str(model_folder(Store(url).open("models", model)))

    def _model_folder(self, trial: Trial) -> str:
        """Returns the folder of a trained model; with --plan, its future URL in the store."""
        if self.performer.plan:
            return f"{trial.store}/models/{trial.name}"
        return str(model_folder(Store(trial.store).open("models", trial.name)))

    def _encode_corpus(self, arm: str, data_set: DataSet, name: str, options: Settings, **encoder: str | None) -> None:
        """Encodes the corpus of a set as embeddings/NAME with the options of an arm."""
        encoding = {key: options[key] for key in ENCODING if key in options}
        settings = {"name": name, **encoder, **encoding, **self.experiment.encode, **data_set.encode}
        self._perform_job(arm, "encode_corpus", settings, data_set.store)

    def _source_over(self, store: str, embeddings: str, options: Settings) -> MeasuredSource:
        """Returns the source over some embeddings; builds the index that sparse embeddings need."""
        if options.get("pooling") != SPLADE:
            return MeasuredSource(embeddings, f"exact:{embeddings}", embeddings=embeddings)
        settings = {"embeddings": embeddings, "name": embeddings, "shards": 1}
        self._perform_job(embeddings, "build_index", settings, store)
        return MeasuredSource(embeddings, f"{SPLADE}:{embeddings}", embeddings=embeddings, is_sparse=True)

    def _search_and_evaluate(self, source: MeasuredSource, set_name: str, split: str) -> RunValues:
        """Searches a split with a source and evaluates the hits."""
        data_set = self.experiment.sets[set_name]
        run = "-".join(filter(None, (source.name, self.experiment.name_in_store(set_name), split)))
        hits = data_set.hits or self.experiment.hits
        settings: Settings = {"source": source.source, "split": split, "k": hits, "name": run}
        settings |= {"queries": data_set.queries, "task": source.task, "drop_self": self.experiment.drop_self}
        self._perform_job(source.name, "search", settings, data_set.store)
        of_test = split == self.experiment.split_of(set_name)
        return self._evaluate_run(run, set_name, split, run, source if of_test else None)

    def _evaluate_run(
        self, run: str, set_name: str, split: str, name: str, source: MeasuredSource | None = None
    ) -> RunValues:
        """Evaluates a run of the store or a run file, and measures the embeddings of its source."""
        data_set = self.experiment.sets[set_name]
        file = self.folder / f"{'-'.join(filter(None, (set_name, name)))}.json"
        settings: Settings = {"run": [run], "queries": data_set.queries, "split": split, "json": str(file)}
        settings |= {"overwrite": True, **self.experiment.evaluate, **data_set.evaluate}
        embeddings = source.embeddings if source is not None and self.experiment.measure_embeddings else None
        if embeddings:
            settings |= {"embeddings": [embeddings], "task": source.task if source else None}
        if not self.performer.plan:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._perform_job(name, "evaluate", settings, data_set.store)
        if self.performer.plan:
            return RunValues({}, {})
        document = json.loads(file.read_text(encoding="utf-8"))
        figures: dict[str, float] = {}
        if "median_length" in document:
            figures["median length"] = document["median_length"][run]["words"]
        figures |= {f"random ranking, {m}": value for m, value in document.get("random_ranking", {}).items()}
        if embeddings:
            vectors = "raw" if self.experiment.measure_embeddings == "raw" else "unit"
            figures |= document["embeddings"][embeddings][vectors]
        if source is not None and source.is_sparse and source.embeddings:
            figures |= measure_sparsity(data_set, source.embeddings, source.task, split)
        metrics = {metric: np.array(values) for metric, values in document["per_query"][run].items()}
        return RunValues(metrics, figures)

    def _perform_job(self, arm: str, job: str, settings: Mapping[str, Any], store: str) -> None:
        """Runs a job as a step of an arm."""
        self.performer.perform(make_step(f"{self.path}: {arm}", job, dict(settings), store))


def measure_sparsity(data_set: DataSet, name: str, task: str | None, split: str) -> dict[str, float]:
    """Returns `sparsity_figures` of the queries of a split and the passages of the corpus.

    Args:
        data_set: The set.
        name: The sparse embeddings of the corpus.
        task: The task of the queries; None: that of the embeddings.
        split: The split.
    """
    store = Store(data_set.store)
    embeddings = SparseEmbeddings.open(store, name, Corpus.open(store))
    texts = Queries.open(store, data_set.queries).split(split).texts
    queries: SparseVectors = QueryEncoder(store, embeddings, SearchOptions(task=task)).encode(texts, LocalRunner())
    return sparsity_figures([queries], [vectors for _, vectors in embeddings.read_range(0, embeddings.num_rows)])
