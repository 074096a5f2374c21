"""Compares prompts of topics (Topic-DPR) with one prompt for all texts (DPTDR), by the categories of the passages.

    python benchmarks/topic_prompts.py --data ../shared/data --folder W --backbone examples/backbone --json R.json
    python benchmarks/topic_prompts.py --only serve --json R.json

A query is a title and a passage the text below it; a passage is relevant if it has a category of the query. The
backbones are frozen: all-MiniLM-L6-v2 (`minilm`), and the one in the folder of --backbone (`small`). The parts:

choose    trains with several settings, one after the other; the mean MAP@50 over the dev splits of the sets
          chooses, for topics by the protocol `own`. As many words of a topic make its prompt as fill its length
main      on the test splits, with each of --seeds: `dptdr`, one prompt for all texts, trained with the loss of queries
          and passages alone; `topic`, a prompt of equal length for each topic, with all losses. Also `bm25`, the
          backbone without a prompt (`none`), and the expected values of a random ranking
controls  with the first seed: `random`: random topics of equal sizes, in training and in search; `shuffled`: those of
          passages and of queries are shuffled after training; `swapped`: each topic has the prompt of another one
          after training; `alpha-0`: `topic` without the loss of pairs of queries and that of topics; `no-topic-loss`:
          without the latter; `lda`: topics of LDA, as many of them; `dptdr-queries`: `dptdr` with the loss of pairs of
          queries
text      with the first seed, all weights are trained: `fine-tune`; `words`: the words of its topic are in front of
          each query and passage; `random-words`: those of a random topic, drawn for each text (Topic-DPR, Table 2)
serve     random prompts: 20 tasks with topics beside 20 fixed and 20 computed ones in mixed batches of one encoder

There are two protocols, in training and in search: `own`, the topic of a query is inferred from its text; `judged`, it
is that of its judged passage, as in the paper, which tells the query where its passage is.

The file of figures is written after each run, and a run that it holds is not repeated. Intervals are of the mean
difference of MAP@50 over queries, which are resampled; the values of a query are means over the seeds that both arms
have. The metrics of each query are in a second file, .queries.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.bootstrap import interval_over_sets
from benchmarks.common.files import read_documents, write_documents, write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM

ROOT = Path(__file__).resolve().parents[1]

SETS = ("reuters-topics", "arxiv-topics")
PARTS = ("choose", "main", "controls", "text", "serve")
PROTOCOLS = ("own", "judged")
WITH_TOPICS = ("topic", "random", "shuffled", "swapped", "alpha-0", "no-topic-loss", "lda", "words")
CONTROLS = ("random", "shuffled", "swapped", "alpha-0", "no-topic-loss", "lda")
METRICS = ("Acc@1", "Acc@10", "MRR@100", "MAP@10", "MAP@50")
CHOSEN_BY = "MAP@50"
HITS = 100  # per query
# What the choice begins with, and the values that it then tries in this order. DPTDR has the length of the topics.
START = {"lr": 1e-3, "temperature": 0.05, "alpha": 0.1, "margin": 0.1, "length": 32}
CANDIDATES: dict[str, dict[str, tuple[float, ...]]] = {
    "topic": {
        "lr": (1e-3, 3e-3, 3e-4),
        "temperature": (0.05, 0.1, 0.02),
        "alpha": (0.1, 0.03, 0.3),
        "margin": (0.1, 0.3),
        "length": (32, 16),
    },
    "dptdr": {"lr": (1e-2, 3e-2, 3e-3), "temperature": (0.05, 0.1, 0.02)},
    "fine-tune": {"lr": (1e-4, 2e-5, 5e-4)},
}
SERVED = 20  # tasks of each kind
# Options that shape all figures of a file.
SHAPING = ("steps", "choose_steps", "batch", "passage_length", "topic_sample", "words", "iterations", "text_words",
           "limit")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A measurement of an arm.

    Attributes:
        name: Its name, also of what is trained.
        arm: The arm.
        data: The set.
        model: minilm or small; "" for bm25.
        seed: The seed of the training run.
        protocol: own or judged; None for an arm without topics.
        split: dev or test.
        steps: Steps of the training run.
        settings: lr, temperature, alpha, margin and length.
    """

    name: str
    arm: str
    data: str
    model: str
    seed: int
    protocol: str | None
    split: str
    steps: int
    settings: Mapping[str, float]


@dataclass(frozen=True)
class Values:
    """The metrics of each query by name, float64 [queries], and the measures of the vectors, if there are any."""

    metrics: dict[str, np.ndarray]
    vectors: dict[str, Any] | None


def write_part(data: Path, folder: Path, limit: int | None) -> Path:
    """Returns a BEIR folder of `limit` passages of a set, drawn at random, and their queries; None: of all.

    Args:
        data: The BEIR folder of the whole set.
        folder: The folder to write to; its name becomes the name of the queries.
        limit: Number of passages.
    """
    if limit is None or (folder / "queries.jsonl").exists():  # written last
        return data if limit is None else folder
    documents = list(read_documents(data / "corpus.jsonl.gz"))
    chosen = np.sort(np.random.default_rng(0).permutation(len(documents))[:limit])
    kept = {documents[place]["_id"] for place in chosen}
    judged = set()
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for file in sorted((data / "qrels").glob("*.tsv")):
        header, *lines = file.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if line.split("\t")[1] in kept]
        judged |= {line.split("\t")[0] for line in lines}
        (folder / "qrels" / file.name).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    write_documents(folder / "corpus.jsonl", [documents[place] for place in chosen])
    queries = [query for query in read_documents(data / "queries.jsonl.gz") if query["_id"] in judged]
    write_documents(folder / "queries.jsonl", queries)
    return folder


class Data:
    """A set: its store with BM25 and the topics of its passages, by hLDA and by LDA.

    Args:
        name: The set.
        options: The options of the benchmark.
    """

    def __init__(self, name: str, options: argparse.Namespace):
        from jobs import build_bm25, fit_topics, import_corpus

        from indexing.categories.relevance import CategoryRelevance
        from indexing.corpus import Corpus
        from indexing.queries import Queries
        from indexing.store import Store
        from indexing.topics.reader import Topics

        folder = Path(options.folder)
        self.name, self.url = name, str(folder / "stores" / name)
        self.options = options
        self.source = write_part(Path(options.data).resolve() / name, folder / "sets" / name, options.limit)
        import_corpus.main(import_corpus.ImportCorpus(store=self.url, source=str(self.source)))
        build_bm25.main(build_bm25.BuildBm25(store=self.url))
        common: dict[str, Any] = {"store": self.url, "words": options.words, "iterations": options.iterations}
        page = str(folder / f"{name}.html")
        fit_topics.main(fit_topics.FitTopicsOptions(name="topics", page=page, overwrite=True, **common))
        self.store = Store(self.url)
        number = Topics.open(self.store, "topics").model.num_topics
        fit_topics.main(fit_topics.FitTopicsOptions(name="lda", method="lda", topics=number, **common))
        self.topics = {key: Topics.open(self.store, key) for key in ("topics", "lda")}
        self.corpus = Corpus.open(self.store)
        self.queries = Queries.open(self.store, None)
        self.relevance = CategoryRelevance(self.corpus, "categories")

    def judged(self, split: str) -> np.ndarray:
        """Returns the row of the judged passage of each query of a split, int64 [queries]."""
        qrels = self.queries.qrels(split)
        first = dict(zip(qrels["query_id"].to_pylist()[::-1], qrels["corpus_id"].to_pylist()[::-1], strict=True))
        rows: np.ndarray = self.corpus.rows_of([first[id] for id in self.queries.split(split).ids])
        return rows

    def of_passages(self, fitted: str) -> np.ndarray:
        """Returns the topic of each passage, int64 [n]; one without a known word has the most probable topic."""
        from retriever.topics.model import with_default

        topics = self.topics[fitted]
        return with_default(topics.of_rows(), topics.model)

    def of_queries(self, fitted: str, split: str, protocol: str | None) -> np.ndarray:
        """Returns the topic of each query of a split, int64 [queries], by a protocol."""
        from retriever.topics.model import with_default

        if protocol == "judged":
            return self.of_passages(fitted)[self.judged(split)]
        model = self.topics[fitted].model
        return with_default(model.infer(self.queries.split(split).texts), model)

    def passages(self) -> tuple[list[str], list[str]]:
        """Returns the titles and the texts of the passages."""
        passages = self.corpus.passages(np.arange(self.corpus.num_rows))
        return [passage.title for passage in passages], [passage.text for passage in passages]

    def described(self) -> dict[str, Any]:
        """Returns sizes and words of the topics, and the share of queries whose own topic is that of their passage."""
        described: dict[str, Any] = {}
        for fitted, topics in self.topics.items():
            splits = {split: self.queries.split(split).texts for split in ("train", "dev", "test")}
            described[fitted] = {
                "topics": topics.model.num_topics,
                "sizes": topics.sizes().tolist(),
                "words": [list(words[:10]) for words in topics.model.words],
                "agreement": {split: self.agreement(fitted, split) for split in splits},
                "queries_without_known_word": {
                    split: int((topics.model.infer(texts) < 0).sum()) for split, texts in splits.items()
                },
            }
        return described

    def agreement(self, fitted: str, split: str) -> float:
        """Returns the share of queries of a split whose own topic is that of their passage."""
        own, judged = (self.of_queries(fitted, split, protocol) for protocol in PROTOCOLS)
        return float((own == judged).mean())

    def with_words(self, arm: str, protocol: str | None) -> str:
        """Returns the store of the set with words in front of each query and passage, which is made if needed.

        Args:
            arm: words: those of its topic; random-words: those of a topic that is drawn for each text.
            protocol: How the topic of a query is found.
        """
        from jobs import import_corpus

        name = f"{self.name}-{arm}" + (f"-{protocol}" if protocol else "")
        folder = Path(self.options.folder) / "sets" / name
        store = str(Path(self.options.folder) / "stores" / name)
        if not (folder / "queries.jsonl").exists():  # written last
            self._write_with_words(folder, protocol, is_random=arm == "random-words")
        import_corpus.main(import_corpus.ImportCorpus(store=store, source=str(folder)))
        return store

    def _write_with_words(self, folder: Path, protocol: str | None, *, is_random: bool) -> None:
        """Writes a BEIR folder with the words of topics in front of each query and passage."""
        model, random = self.topics["topics"].model, np.random.default_rng(0)
        words = [" ".join(words[: self.options.text_words]) for words in model.words]

        def put_words(documents: Sequence[dict[str, Any]], ids: Sequence[str], topics: np.ndarray) -> list[dict]:
            if is_random:
                topics = random.integers(model.num_topics, size=len(topics))
            of_id = dict(zip(ids, topics.tolist(), strict=True))
            return [
                document | {"text": f"{words[of_id[document['_id']]]} {document['text']}"}
                for document in documents
                if document["_id"] in of_id
            ]

        (folder / "qrels").mkdir(parents=True, exist_ok=True)
        for file in (self.source / "qrels").glob("*.tsv"):
            (folder / "qrels" / file.name).write_bytes(file.read_bytes())
        ids = self.corpus.ids(np.arange(self.corpus.num_rows)).tolist()
        corpus = put_words(self._source_documents("corpus"), ids, self.of_passages("topics"))
        write_documents(folder / "corpus.jsonl", corpus)
        splits = self.queries.splits
        query_ids = [id for split in splits for id in self.queries.split(split).ids]
        topics = np.concatenate([self.of_queries("topics", split, protocol) for split in splits])
        write_documents(folder / "queries.jsonl", put_words(self._source_documents("queries"), query_ids, topics))

    def _source_documents(self, name: str) -> list[dict[str, Any]]:
        if (self.source / f"{name}.jsonl").exists():
            return [json.loads(line) for line in (self.source / f"{name}.jsonl").read_text().splitlines()]
        return list(read_documents(self.source / f"{name}.jsonl.gz"))


class Measurement:
    """Trains and measures arms.

    Args:
        options: The options of the benchmark.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.models = {"minilm": MINILM, "small": options.backbone and str(Path(options.backbone).resolve())}
        self.data = {name: Data(name, options) for name in options.sets}
        self.random_rankings: dict[str, dict[str, float]] = {}

    def measure(self, run: Run) -> Values:
        """Trains an arm, unless it is trained, and measures it."""
        from jobs import encode_corpus

        data = self.data[run.data]
        if run.arm == "bm25":
            return self.by_jobs(run, data.url, "bm25", None)
        if run.arm == "none":
            name = f"none-{run.model}"
            encode_corpus.main(
                encode_corpus.EncodeCorpus(store=data.url, encoder=self.models[run.model], name=name, **self.form())
            )
            return self.by_jobs(run, data.url, f"exact:{name}", name)
        if run.arm in ("fine-tune", "words", "random-words"):
            store = data.url if run.arm == "fine-tune" else data.with_words(run.arm, run.protocol)
            self.train(run, store)
            encode_corpus.main(
                encode_corpus.EncodeCorpus(store=store, encoder=f"models/{run.name}", name=run.name, **self.form(run))
            )
            return self.by_jobs(run, store, f"exact:{run.name}", run.name)
        if run.arm in ("shuffled", "swapped"):
            return self.by_vectors(run, self.trained_name(run), *self.controlled(run))
        self.train(run, data.url)
        if run.arm == "random":
            return self.by_vectors(run, run.name, *self.controlled(run))
        encode_corpus.main(encode_corpus.EncodeCorpus(store=data.url, task=run.name, name=run.name))
        if run.protocol == "judged":
            return self.by_vectors(run, run.name, None, data.of_queries(fitted_of(run), run.split, "judged"))
        return self.by_jobs(run, data.url, f"exact:{run.name}", run.name)

    def form(self, run: Run | None = None) -> dict[str, Any]:
        """Returns how texts become vectors, as options of jobs; words in front of a text make it longer."""
        more = 2 * self.options.text_words if run is not None and run.arm in ("words", "random-words") else 0
        return {"pooling": "mean", "normalize": True, "passage_length": self.options.passage_length + more}

    def train(self, run: Run, store: str) -> None:
        """Trains prompts/NAME or models/NAME of a run, unless the store has it."""
        from jobs import train_retriever
        from jobs.tuning.opening import open_all
        from jobs.tuning.options import TrainRetriever

        from indexing.store import Store

        settings, options = run.settings, self.options
        special: dict[str, Any] = {"train": "prompts", "prompt": "matrix", "length": int(settings["length"])}
        has_alpha = run.arm not in ("dptdr", "alpha-0", "fine-tune", "words", "random-words")
        if run.arm in ("fine-tune", "words", "random-words"):
            special = {"train": "all"}
        elif run.arm in WITH_TOPICS:
            special |= {
                "prompt": "topics",
                "topics": fitted_of(run),
                "query_topics": run.protocol,
                "wordless_queries": "prior",
                "topic_loss": run.arm != "no-topic-loss",
            }
            if run.arm != "no-topic-loss":
                special |= {"topic_sample": options.topic_sample or None, "topic_margin": settings["margin"]}
        train = TrainRetriever(
            store=store, task=run.name, backbone=self.models[run.model], positives="categories", negatives="none",
            category_weight=settings["alpha"] if has_alpha else 0.0, temperature=settings["temperature"],
            lr=settings["lr"], steps=run.steps, batch=options.batch, seed=run.seed, cpus=options.cpus,
            checkpoint_every=100, **special, **self.form(run),
        )  # fmt: skip
        if run.arm != "random":
            train_retriever.main(train)
            return
        opened = open_all(Store(store), train)
        values = {field.name: getattr(opened.maker, field.name) for field in fields(opened.maker)}
        config = opened.config | {"control": "random topics"}
        train_retriever.train(
            Store(store), train, replace(opened, maker=random_topics_maker()(**values), config=config)
        )

    def trained_name(self, run: Run) -> str:
        """Returns the name of the run of `topic` whose prompts a control of it uses."""
        return name_of(run.model, run.data, "topic", run.protocol, run.seed)

    def controlled(self, run: Run) -> tuple[np.ndarray, np.ndarray]:
        """Returns the topics of the passages and of the queries of a control, int64."""
        from retriever.topics.controls import random_topics, shuffled_topics

        data = self.data[run.data]
        passages = data.of_passages("topics")
        queries = data.of_queries("topics", run.split, run.protocol)
        if run.arm == "shuffled":
            return shuffled_topics(passages, 0), shuffled_topics(queries, 1)
        if run.arm == "swapped":
            return passages, queries
        number = data.topics["topics"].model.num_topics
        passages = random_topics(len(passages), number, run.seed)
        own = random_topics(len(queries), number, run.seed + 2_000)
        return passages, passages[data.judged(run.split)] if run.protocol == "judged" else own

    def by_jobs(self, run: Run, store: str, source: str, embeddings: str | None) -> Values:
        """Measures a search source by `search` and `evaluate`."""
        from jobs import search

        name = f"{run.name}-{run.split}"
        search.main(search.Search(store=store, source=source, split=run.split, k=HITS, name=name))
        return self.evaluate(run, store, name, embeddings if run.split == "test" else None)

    def by_vectors(self, run: Run, task: str, of_passages: np.ndarray | None, of_queries: np.ndarray) -> Values:
        """Measures prompts of topics whose texts have other topics than in a job.

        Args:
            run: The run.
            task: The name of the prompts.
            of_passages: The topic of each passage, int64 [n]; None: those of the embeddings of this name.
            of_queries: The topic of each query, int64 [q].
        """
        from indexing.embeddings import Embeddings
        from indexing.exact.search import exact_search
        from indexing.measures.embeddings_by_category import measures_by_category
        from indexing.measures.vectors import unit
        from indexing.models import model_folder
        from indexing.runs import hits_table, write_trec
        from retriever.prompts import load_prompt

        data = self.data[run.data]
        prompt = load_prompt(model_folder(data.store.open("prompts", task)))
        assert prompt.topics is not None
        if run.arm == "swapped":
            prompt = replace(prompt, topics=prompt.topics.shuffled(run.seed))
        encoder = open_encoder(self.models[run.model] or "", prompt.options, self.options.cpus)
        encoder.put_task("task", prompt)

        def encode(texts: Sequence[str], side: Any, topics: np.ndarray) -> np.ndarray:
            return encoder.forward(encoder.tokenize(texts, side=side), side=side, task="task", topics=topics)

        if of_passages is None:
            embeddings = Embeddings.open(data.store, task, data.corpus)
            passages = embeddings.take(np.arange(embeddings.num_rows))
        else:
            passages = encode(encoder.compose(*data.passages()), "passage", of_passages).astype(np.float16)
        chosen = data.queries.split(run.split)
        queries = encode(chosen.texts, "query", of_queries)
        encoder.drop_task("task")
        hits = exact_search(queries, [(0, passages)], min(HITS, len(passages)), threads=self.options.cpus)
        file = str(Path(self.options.folder) / "runs" / f"{run.name}-{run.split}.trec")
        write_trec([hits_table(chosen.ids, hits, data.corpus.ids(hits.rows))], file, "run", overwrite=True)
        values = self.evaluate(run, data.url, file, None)
        if run.split != "test":
            return values
        by_query = data.relevance.categories_of(data.queries, chosen.ids, data.queries.qrels(run.split)).by_query
        categories = [by_query[id] for id in chosen.ids]

        def relevant(start: int, end: int) -> np.ndarray:
            return np.stack([data.relevance.relevant(names) for names in categories[start:end]])

        measures = measures_by_category(queries, passages, relevant, {"unit": unit})
        return Values(values.metrics, asdict(measures.unit))

    def evaluate(self, run: Run, store: str, name: str, embeddings: str | None) -> Values:
        """Measures a run of the store or a TREC file, and embeddings, by `evaluate`."""
        from jobs import evaluate

        file = Path(self.options.folder) / "figures" / f"{run.name}-{run.split}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        evaluate.main(
            evaluate.Evaluate(
                store=store, run=(name,), embeddings=(embeddings,) if embeddings else (), split=run.split,
                relevance="category", metrics=METRICS, json=str(file), overwrite=True,
            )
        )  # fmt: skip
        document = json.loads(file.read_text())
        self.random_rankings[f"{run.data} {run.split}"] = document["random_ranking"]
        [metrics] = document["per_query"].values()
        vectors = document["embeddings"][embeddings]["unit"] if embeddings else None
        return Values({metric: np.array(values) for metric, values in metrics.items()}, vectors)


@functools.cache
def open_encoder(model: str, options: Any, cpus: int) -> Any:
    """Returns an open backbone without tasks."""
    from retriever.encoder import Encoder

    return Encoder(model, options, threads=cpus, tasks={})


@functools.cache
def random_topics_maker() -> Any:
    """Returns the class that makes a system whose texts have random topics of equal sizes, in training too."""
    from indexing.tuning import TuneMaker
    from retriever.topics.controls import random_topics

    @dataclass(frozen=True, kw_only=True)
    class RandomTopicsMaker(TuneMaker):
        """The Maker of the control `random`. Under the protocol judged, a query has the topic of its passage."""

        def make(self, **place: Any) -> Any:
            """Makes the system of a worker; see Maker."""
            system, evaluate, refresh = super().make(**place)
            topics = system.topics
            assert topics is not None
            number, seed = topics.model.num_topics, self.tuning.seed
            queries = topics.queries
            system.topics = replace(
                topics,
                passages=random_topics(len(topics.passages), number, seed),
                queries=None if queries is None else random_topics(len(queries), number, seed + 1_000),
            )
            return system, evaluate, refresh

    return RandomTopicsMaker


def fitted_of(run: Run) -> str:
    """Returns the name of the topics of an arm."""
    return "lda" if run.arm == "lda" else "topics"


def name_of(model: str, data: str, arm: str, protocol: str | None, seed: int) -> str:
    """Returns the name of a run on the test split."""
    return "-".join([word for word in (model, data, arm, protocol) if word] + [str(seed)])


class Figures:
    """The file of figures, and the one with the metrics of each query.

    Args:
        file: The file of figures.
        shaping: The options that shape all figures.
    """

    def __init__(self, file: Path, shaping: Mapping[str, Any]):
        self.file, self.queries_file = file, file.with_suffix(".queries.json")
        self.document: dict[str, Any] = {"options": dict(shaping), "cpu": cpu_name(), "runs": {}}
        if file.exists():
            self.document = json.loads(file.read_text())
            if (actual := self.document["options"]) != dict(shaping):
                raise SystemExit(f"--json {file}: has figures of other options, {actual}: name another file and folder")
        self.queries: dict[str, dict[str, list[float]]] = (
            json.loads(self.queries_file.read_text()) if self.queries_file.exists() else {}
        )

    def has(self, run: Run) -> bool:
        """Returns whether the file holds a run. Ends the program if it was made with other settings."""
        record = self.document["runs"].get(run.name)
        if record is not None and record["run"] != asdict(run):
            raise SystemExit(
                f"{self.file}: the run {run.name} was made with {record['run']}, the options ask for {asdict(run)}: "
                "name another file and folder"
            )
        return record is not None

    def add(self, run: Run, values: Values, seconds: float) -> None:
        """Adds a run, and prints a line."""
        means = {metric: float(of.mean()) for metric, of in values.metrics.items()}
        self.queries[run.name] = {metric: np.round(of, 6).tolist() for metric, of in values.metrics.items()}
        self.document["runs"][run.name] = {
            "run": asdict(run),
            "seconds": round(seconds, 1),
            "metrics": means,
            "vectors": values.vectors,
        }
        self.save()
        shown = "  ".join(f"{metric} {value:.4f}" for metric, value in means.items())
        print(f"{run.name:56} {seconds:6.1f} s  {shown}", flush=True)

    def save(self) -> None:
        """Writes both files."""
        write_json(self.queries_file, self.queries)
        write_json(self.file, self.document)


def finish(run: Run, measurement: Measurement, figures: Figures) -> None:
    """Makes a run, unless the file has it."""
    if not figures.has(run):
        started = time.perf_counter()
        values = measurement.measure(run)
        figures.document["random_ranking"] = measurement.random_rankings | figures.document.get("random_ranking", {})
        figures.add(run, values, time.perf_counter() - started)


def choose(model: str, measurement: Measurement, figures: Figures, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of each arm with the best mean MAP@50 over the dev splits, one setting after the other."""

    def value(arm: str, settings: Mapping[str, float]) -> float:
        of_arm = CANDIDATES[arm]
        shown = "-".join(f"{key}{settings[key]:g}" for key in of_arm)
        shown += "" if "length" in of_arm or arm == "fine-tune" else f"-length{settings['length']:g}"
        results = []
        for data in options.choose_sets:
            protocol = "own" if arm == "topic" else None
            name = f"choose-{model}-{data}-{arm}-{shown}"
            run = Run(name, arm, data, model, options.seeds[0], protocol, "dev", options.choose_steps, dict(settings))
            finish(run, measurement, figures)
            results.append(figures.document["runs"][name]["metrics"][CHOSEN_BY])
        return float(np.mean(results))

    chosen: dict[str, Any] = {}
    for arm, candidates in CANDIDATES.items():
        if arm == "fine-tune" and "text" not in options.only:
            continue
        settings: dict[str, float] = dict(START)
        if arm != "topic":
            settings["length"] = chosen["topic"]["length"]
        if arm == "fine-tune":
            settings["temperature"] = chosen["dptdr"]["temperature"]
        settings |= {key: values[0] for key, values in candidates.items()}
        for key, values in candidates.items():
            settings = max(({**settings, key: each} for each in values), key=lambda each: value(arm, each))
        chosen[arm] = settings
    return chosen


def test_runs(model: str, chosen: Mapping[str, Any], options: argparse.Namespace) -> list[Run]:
    """Returns the runs on the test splits with one backbone, the important ones first."""
    first = options.seeds[:1]
    plans: list[tuple[str, str, Sequence[int], Sequence[str | None]]] = []  # arm, settings of, seeds, protocols
    if "main" in options.only:
        plans += [("bm25", "", first, [None]), ("none", "", first, [None]), ("dptdr", "dptdr", options.seeds, [None])]
        plans += [("topic", "topic", options.seeds, options.protocols)]
    if "controls" in options.only:
        plans += [(arm, "topic", first, options.control_protocols) for arm in CONTROLS]
        plans += [("dptdr-queries", "dptdr", first, [None])]
    if "text" in options.only:
        plans += [("fine-tune", "fine-tune", first, [None]), ("words", "fine-tune", first, options.protocols)]
        plans += [("random-words", "fine-tune", first, [None])]
    runs = []
    for arm, of, seeds, protocols in plans:
        settings = dict(chosen[of]) if of else {}
        if arm == "dptdr-queries":
            settings["alpha"] = chosen["topic"]["alpha"]
        for data in options.sets:
            for protocol in protocols:
                for seed in seeds:
                    shown = "" if arm == "bm25" else model
                    steps = options.steps if of else 0
                    name = name_of(shown, data, arm, protocol, seed)
                    runs.append(Run(name, arm, data, shown, seed, protocol, "test", steps, settings))
    return runs


def summarise(figures: Figures) -> dict[str, Any]:
    """Returns means over seeds by backbone, set and arm, and intervals of differences of MAP@50 to `topic`."""
    summary: dict[str, Any] = {}
    runs = [record["run"] for record in figures.document["runs"].values() if record["run"]["split"] == "test"]
    sets = list(dict.fromkeys(run["data"] for run in runs))
    for model in dict.fromkeys(run["model"] for run in runs if run["model"]):
        for protocol in PROTOCOLS:
            summary[f"{model} {protocol}"] = of_protocol = {"arms": {}, "topic_minus": {}}
            differences: dict[str, dict[str, np.ndarray]] = {}
            for data in sets:
                names = arms_of(figures, model, data, protocol)
                of_protocol["arms"][data] = {arm: means_of(figures, list(of.values())) for arm, of in names.items()}
                for arm, of in names.items():
                    if arm == "topic" or "topic" not in names:
                        continue
                    has_seeds = arm not in ("bm25", "none")
                    if has_seeds and not names["topic"].keys() & of.keys():
                        continue
                    differences.setdefault(arm, {})[data] = difference(figures, names["topic"], of, has_seeds=has_seeds)
            for arm, by_set in differences.items():
                intervals = {data: interval_over_sets([values]) for data, values in by_set.items()}
                if len(by_set) > 1:
                    intervals["all sets"] = interval_over_sets(list(by_set.values()))
                of_protocol["topic_minus"][arm] = intervals
    return summary


def arms_of(figures: Figures, model: str, data: str, protocol: str) -> dict[str, dict[int, str]]:
    """Returns the names of the runs on the test split of a set by arm and seed; arms without topics among them."""
    arms: dict[str, dict[int, str]] = {}
    for record in figures.document["runs"].values():
        run = record["run"]
        fits = run["split"] == "test" and run["data"] == data and run["model"] in (model, "")
        if fits and run["protocol"] in (protocol, None):
            arms.setdefault(run["arm"], {})[run["seed"]] = run["name"]
    return arms


def means_of(figures: Figures, names: Sequence[str]) -> dict[str, Any]:
    """Returns the means of metrics and of measures of vectors over some runs, and the deviation of MAP@50."""
    records = [figures.document["runs"][name] for name in names]
    means: dict[str, Any] = {metric: float(np.mean([of["metrics"][metric] for of in records])) for metric in METRICS}
    means["seeds"] = len(records)
    means["deviation"] = float(np.std([of["metrics"][CHOSEN_BY] for of in records]))
    if all(of["vectors"] for of in records):
        means["vectors"] = {
            key: float(np.mean([of["vectors"][key] for of in records])) for key in records[0]["vectors"]
        }
    return means


def difference(figures: Figures, topic: Mapping[int, str], other: Mapping[int, str], *, has_seeds: bool) -> np.ndarray:
    """Returns MAP@50 of each query by `topic` less that of another arm, means over common seeds: float64 [queries]."""
    seeds = [seed for seed in topic if seed in other] if has_seeds else list(topic)
    others = [other[seed] for seed in seeds] if has_seeds else list(other.values())
    one = np.mean([figures.queries[topic[seed]][CHOSEN_BY] for seed in seeds], axis=0)
    two = np.mean([figures.queries[name][CHOSEN_BY] for name in others], axis=0)
    result: np.ndarray = one - two
    return result


def shown_interval(of: Mapping[str, float]) -> str:
    return f"{of['mean']:+.4f} [{of['low']:+.4f}, {of['high']:+.4f}]"


def tables(document: Mapping[str, Any]) -> str:
    """Returns the figures as tables in Markdown."""
    lines = [f"{document['cpu']}.", ""]
    for data, fitted in document.get("topics", {}).items():
        for name, of in fitted.items():
            agreement = ", ".join(f"{split} {share:.2f}" for split, share in of["agreement"].items())
            lines.append(f"{data}, {name}: {of['topics']} topics with {of['sizes']} passages; agreement {agreement}.")
    for title, summary in document.get("summary", {}).items():
        for data, arms in summary["arms"].items():
            random = document.get("random_ranking", {}).get(f"{data} test", {})
            lines += ["", f"{title}, {data}:", "", f"| arm | seeds | {' | '.join(METRICS)} | topic less it, MAP@50 |"]
            lines += ["| --- " * (len(METRICS) + 3) + "|"]
            cells = " | ".join(f"{random.get(metric, float('nan')):.4f}" for metric in METRICS)
            lines.append(f"| random ranking | | {cells} | |")
            for arm, means in arms.items():
                cells = " | ".join(f"{means[metric]:.4f}" for metric in METRICS)
                of = summary["topic_minus"].get(arm, {}).get(data)
                lines.append(f"| {arm} | {means['seeds']} | {cells} | {shown_interval(of) if of else ''} |")
            lines += ["", "| arm | alignment | uniformity queries / passages | cosine relevant / other |"]
            lines += ["| --- " * 4 + "|"]
            for arm, means in arms.items():
                if (of := means.get("vectors")) is not None:
                    lines.append(
                        f"| {arm} | {of['alignment']:.3f} | {of['uniformity_queries']:.3f} / "
                        f"{of['uniformity_passages']:.3f} | {of['cosine_relevant']:.3f} / {of['cosine_other']:.3f} |"
                    )
        over_all = {arm: of["all sets"] for arm, of in summary["topic_minus"].items() if "all sets" in of}
        shown = "; ".join(f"{arm} {shown_interval(of)}" for arm, of in over_all.items())
        lines += ["", f"{title}, `topic` less another arm, MAP@50, mean over the sets: {shown}."] if shown else []
    if (serve := document.get("serve")) is not None:
        lines += ["", f"| {SERVED} tasks of each kind | queries/s | of no prompts | of fixed |", "| --- " * 4 + "|"]
        for kind, of in serve["traffic"].items():
            lines.append(
                f"| {kind} | {of['queries_per_s']:,.0f} | {of['share_of_none']:.2f} | {of['share_of_fixed']:.2f} |"
            )
        shown = ", ".join(f"{value:.1e} in {name}" for name, value in serve["largest_difference"].items())
        lines += ["", f"Largest difference between vectors of a mixed batch and of single-task calls: {shown}."]
    return "\n".join(lines) + "\n"


def measure_serving(options: argparse.Namespace) -> dict[str, Any]:
    """Measures mixed batches of tasks with random prompts of topics, fixed ones and computed ones, in one encoder."""
    import torch
    from query_prompts import MIXES, computed_prompt, fixed_prompt, largest_difference, measure_traffic, read_texts

    from retriever.encoder import Encoder
    from retriever.options import EncoderOptions
    from retriever.prompts import TaskPrompt, backbone_of
    from retriever.topics.model import TopicModel
    from retriever.topics.saved import SavedTopics
    from retriever.topics.words import topic_words

    length, num_topics = options.served_length, options.served_topics
    texts = read_texts(str(ROOT / "examples/squad/queries.jsonl.gz"), options.count)
    batches = [texts[start : start + 32] for start in range(0, len(texts), 32)]
    vocabulary = tuple(sorted({word for text in texts for word in topic_words(text)}))
    random = np.random.default_rng(0)

    def topic_prompt(encoder: Encoder, seed: int) -> TaskPrompt:
        """Returns random prompts of random topics of the words of the queries."""
        words = np.log(random.dirichlet(np.full(len(vocabulary), 0.1), num_topics) + 1e-6).astype(np.float32)
        model = TopicModel(
            vocabulary,
            tuple(tuple(vocabulary[word] for word in np.argsort(-row)[:length]) for row in words),
            np.arange(num_topics),
            np.full(num_topics, -np.log(num_topics), np.float32),
            words,
        )
        matrices = [fixed_prompt(encoder, length, 1_000 * (seed + 1) + topic).query for topic in range(num_topics)]
        saved = SavedTopics(model, torch.stack([matrix for matrix in matrices if matrix is not None]), "prior")
        return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, topics=saved)

    def start(dtype: Any) -> tuple[Encoder, dict[str, list[str]]]:
        encoder = Encoder(
            MINILM,
            EncoderOptions(dtype=dtype, compile="never", pooling="mean", normalize=True),
            threads=options.cpus,
            tasks={},
        )
        numbers = range(SERVED)
        names = {kind: [f"{kind}{number}" for number in numbers] for kind in ("fixed", "topics")}
        for number in numbers:
            encoder.put_task(f"fixed{number}", fixed_prompt(encoder, length, number))
            encoder.put_task(f"topics{number}", topic_prompt(encoder, number))
        computed = [(MIXES[number % len(MIXES)], number) for number in numbers]
        for mix, number in computed:
            encoder.put_task(f"{mix}{number}", computed_prompt(encoder, length, mix, number))
        names["mixed"] = [*names["fixed"], *names["topics"], *(f"{mix}{number}" for mix, number in computed)]
        return encoder, names

    encoder, names = start("float32")
    differences = {"float32": largest_difference(encoder, texts[:128], names["mixed"])}
    encoder, names = start("auto")
    differences[str(encoder.dtype).removeprefix("torch.")] = largest_difference(encoder, texts[:128], names["mixed"])
    return {
        "topics": num_topics,
        "length": length,
        "numerics": encoder.numerics,
        "threads": options.cpus,
        "largest_difference": differences,
        "traffic": measure_traffic(encoder, batches, names, options.rounds, float("inf")),
    }


def main() -> None:
    """Reads the options, trains and measures each run, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with the BEIR folders of all sets; needed except for --only serve")
    parser.add_argument("--folder", help="folder of stores and models; needed except for --only serve")
    parser.add_argument("--backbone", help="folder of the small backbone (see small_backbone.py)")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="the parts (default: all)")
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="the sets (default: %(default)s)")
    parser.add_argument(
        "--models", nargs="+", choices=["minilm", "small"], help="the backbones (default: all that are given)"
    )
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS, help="(default: both)")
    parser.add_argument(
        "--control-protocols", nargs="+", default=["own"], choices=PROTOCOLS, help="of the controls (default: own)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="steps of a training run (default: %(default)s)")
    parser.add_argument("--choose-steps", type=int, default=200, help="the same, of `choose` (default: %(default)s)")
    parser.add_argument("--choose-sets", nargs="+", help="the sets on whose dev splits it chooses (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="queries of a step (default: %(default)s)")
    parser.add_argument("--passage-length", type=int, default=128, help="tokens of a passage (default: %(default)s)")
    parser.add_argument(
        "--topic-sample", type=int, default=2, help="topics of the loss of topics in each step; 0: all (default: 2)"
    )
    parser.add_argument("--words", type=int, default=64, help="words of a topic in its fit (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="of the fits of topics (default: %(default)s)")
    parser.add_argument("--text-words", type=int, default=10, help="words in front of a text (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="use N passages of each set, and their queries, for a trial")
    parser.add_argument("--count", type=int, default=640, help="serve: number of queries (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="serve: number of rounds (default: %(default)s)")
    parser.add_argument("--served-topics", type=int, default=10, help="serve: topics of a task (default: %(default)s)")
    parser.add_argument(
        "--served-length", type=int, default=32, help="serve: tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--json", default="results/topic_prompts.json", help="file of figures (default: %(default)s)")
    options = parser.parse_args()
    options.choose_sets = options.choose_sets or options.sets
    options.models = options.models or (["minilm", "small"] if options.backbone else ["minilm"])
    if "small" in options.models and not options.backbone:
        parser.error("--models small: give its folder with --backbone")
    needs_data = options.only != ["serve"]
    if needs_data and not (options.data and options.folder):
        parser.error("--data and --folder: needed for all parts but serve")
    figures = Figures(Path(options.json), {name: getattr(options, name) for name in SHAPING})
    if needs_data:
        measurement = Measurement(options)
        figures.document.setdefault("topics", {}).update(
            {name: data.described() for name, data in measurement.data.items()}
        )
        for model in options.models:
            all_chosen = figures.document.setdefault("chosen", {})
            if "choose" in options.only:
                all_chosen[model] = all_chosen.get(model, {}) | choose(model, measurement, figures, options)
            if model not in all_chosen:
                parser.error(f"--only {' '.join(options.only)}: {options.json} has no settings of {model}: add choose")
            print(f"chosen: {all_chosen[model]}", flush=True)
            for run in test_runs(model, all_chosen[model], options):
                finish(run, measurement, figures)
                figures.document["summary"] = summarise(figures)
                figures.save()
    if "serve" in options.only and "serve" not in figures.document:
        figures.document["serve"] = measure_serving(options)
    figures.save()
    Path(options.json).with_suffix(".md").write_text(tables(figures.document))
    print(tables(figures.document), end="")


if __name__ == "__main__":
    main()
