"""Runs the experiments with prompts of topics (Topic-DPR), whose controls are searched in ways that no job offers.

    python benchmarks/topic_prompts.py --arms benchmarks/arms/topics.yaml --store S --results results/topics.json.gz

Takes the options of experiment.py; S is a folder of stores. topics.yaml describes the controls: random, shuffled,
swapped, same-topic and judged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from riptide.jobs.commands.cli import run

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.exact import exact_search
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.run_files import write_trec
from riptide.indexing.search.runs import hits_table
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.training.retriever_data import RetrieverMaker
from riptide.jobs.commands.steps import JobStep, make_step
from riptide.jobs.experiments import ControlFunctions, ControlSearchRequest, RunExperiment, main
from riptide.jobs.pipeline import run_step
from riptide.jobs.training.opening import open_retriever_setup
from riptide.jobs.training.retriever_run import train_one_task
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions, Side
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.topics.model import with_default_topic
from riptide.retriever.topics.training import TrainingTopics

HITS = 100  # per query


class Searched:
    """The prompts, the corpus and the queries of a control.

    Attributes:
        corpus: The passages.
        texts: The queries of the split.
        topics: The topics of the passages.
    """

    def __init__(self, search: ControlSearchRequest):
        store = Store(search.store)
        prompts = store.open("prompts", search.task)
        self.corpus, self._queries = Corpus.open(store), Queries.open(store, search.queries)
        self.texts = self._queries.split(search.split).texts
        self.topics = Topics.open(store, "topics")
        self._search, self._store = search, store
        self._prompt = load_prompt(model_folder(prompts))
        self._encoder = open_encoder(prompts.notes["backbone"], self._prompt.options)

    def topics_of_passages(self) -> np.ndarray:
        """Returns the topic of each passage, int64 [n]; one without a known word has the most probable topic."""
        return with_default_topic(self.topics.topic_per_row(), self.topics.model)

    def topics_of_queries(self) -> np.ndarray:
        """Returns the topic of each query, which its text decides, int64 [q]."""
        return with_default_topic(self.topics.model.infer(self.texts), self.topics.model)

    def judged_topics(self) -> np.ndarray:
        """Returns the topic of the first judged passage of each query, int64 [q]."""
        qrels = self._queries.qrels(self._search.split)
        pairs = zip(qrels["query_id"].to_pylist(), qrels["corpus_id"].to_pylist(), strict=True)
        first = dict(reversed(list(pairs)))
        ids = self._queries.split(self._search.split).ids
        return self.topics_of_passages()[self.corpus.rows_of([first[query] for query in ids])]

    def swap_prompts(self, seed: int) -> None:
        """Gives each topic the prompt of another one."""
        assert self._prompt.topics is not None
        topics = self._prompt.topics
        order = np.random.default_rng(seed).permutation(topics.model.num_topics)
        moved = np.empty_like(order)
        moved[order] = np.roll(order, 1)  # a cycle, so that no topic keeps its prompt
        self._prompt = replace(self._prompt, topics=replace(topics, prompts=topics.prompts[moved]))

    def encoded_passages(self) -> np.ndarray:
        """Returns the vectors of the passages with the prompts as they are, float16 [n, dim]."""
        task = self._search.task
        run_step(make_step(f"control of {task}", "encode_corpus", {"task": task, "name": task}, self._search.store))
        embeddings = Embeddings.open(self._store, task, self.corpus)
        return embeddings.take(np.arange(embeddings.num_rows))

    def encode(self, texts: Sequence[str], side: Side, topics: np.ndarray | None) -> np.ndarray:
        """Returns the vectors of texts with the prompts of their topics, or with one prompt: float32 [texts, dim]."""
        self._encoder.put_task("task", self._prompt)
        tokens = self._encoder.tokenize(texts, side=side)
        vectors = self._encoder.forward(tokens, side=side, task="task", topics=topics)
        self._encoder.drop_task("task")
        return vectors

    def search(self, queries: np.ndarray, passages: np.ndarray) -> None:
        """Writes the hits of an exact search; queries are float32 [q, dim], passages float16 [n, dim]."""
        hits = exact_search(queries, [(0, passages)], min(HITS, len(passages)))
        ids = self._queries.split(self._search.split).ids
        write_trec([hits_table(ids, hits, self.corpus.ids(hits.rows))], self._search.file, "run", overwrite=True)

    def search_with_topics(self, of_passages: np.ndarray, of_queries: np.ndarray) -> None:
        """Writes the hits if the texts have given topics, int64 [n] and [q]."""
        passages = self.corpus.passages(np.arange(self.corpus.num_rows))
        texts = self._encoder.compose([each.title for each in passages], [each.text for each in passages])
        vectors = self.encode(texts, "passage", of_passages).astype(np.float16)
        self.search(self.encode(self.texts, "query", of_queries), vectors)


def random_topics(count: int, num_topics: int, seed: int) -> np.ndarray:
    """Returns random topics of `count` texts, int64 [count]; the sizes of two topics differ by at most 1."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % num_topics)


@functools.cache
def open_encoder(backbone: str, options: EncoderOptions) -> Encoder:
    """Returns an open backbone without tasks."""
    return Encoder(backbone, options, tasks={})


def search_random(search: ControlSearchRequest) -> None:
    """Searches with random topics of passages and of queries."""
    searched = Searched(search)
    num_topics, num_passages = searched.topics.model.num_topics, searched.corpus.num_rows
    of_passages = random_topics(num_passages, num_topics, search.seed)
    searched.search_with_topics(of_passages, random_topics(len(searched.texts), num_topics, search.seed + 2_000))


def search_shuffled(search: ControlSearchRequest) -> None:
    """Searches with the topics of passages, and those of queries, at random places."""
    searched = Searched(search)
    topics = searched.topics_of_passages(), searched.topics_of_queries()
    searched.search_with_topics(*(np.random.default_rng(seed).permutation(each) for seed, each in enumerate(topics)))


def search_swapped(search: ControlSearchRequest) -> None:
    """Searches with the prompt of another topic in place of that of each topic."""
    searched = Searched(search)
    searched.swap_prompts(search.seed)
    searched.search_with_topics(searched.topics_of_passages(), searched.topics_of_queries())


def search_judged(search: ControlSearchRequest) -> None:
    """Searches with queries that have the topic of their judged passage."""
    searched = Searched(search)
    searched.search(searched.encode(searched.texts, "query", searched.judged_topics()), searched.encoded_passages())


def search_same_topic(search: ControlSearchRequest) -> None:
    """Searches with one prompt for all; a weight is added to the scores of passages with the topic of the query."""
    searched = Searched(search)
    queries, passages = searched.encode(searched.texts, "query", None), searched.encoded_passages()
    # The product of two such columns is the weight if the topics are the same, and 0 otherwise.
    columns = np.sqrt(search.arm["weight"]) * np.eye(searched.topics.model.num_topics)
    searched.search(
        np.hstack([queries, columns[searched.topics_of_queries()]]).astype(np.float32),
        np.hstack([passages, columns[searched.topics_of_passages()]]).astype(np.float16),
    )


@dataclass(frozen=True, kw_only=True)
class RandomTopicsMaker(RetrieverMaker):
    """Makes a system whose texts have random topics of equal sizes in training."""

    def make(self, **place: Any) -> Any:
        """Makes the system of a worker; see `SystemMaker`."""
        system, evaluate, refresh = super().make(**place)
        topics = system.assignment
        assert isinstance(topics, TrainingTopics)
        num_topics, seed = topics.model.num_topics, self.tuning.seed
        system.kind.assignment = replace(
            topics,
            of_passages=random_topics(len(topics.of_passages), num_topics, seed),
            query_topics=None
            if topics.query_topics is None
            else random_topics(len(topics.query_topics), num_topics, seed + 1_000),
        )
        return system, evaluate, refresh


def train_random(step: JobStep) -> None:
    """Trains prompts of topics whose texts have random topics, unless the store has them."""
    options: Any = step.options
    store = Store(options.store)
    job = open_retriever_setup(store, options)
    maker = RandomTopicsMaker(**{field.name: getattr(job.maker, field.name) for field in fields(job.maker)})
    target = replace(job.target, config={**job.target.config, "control": "random topics"})
    train_one_task(store, options, replace(job, maker=maker, target=target))


CONTROLS = {
    "random": ControlFunctions(train_random, search_random),
    "shuffled": ControlFunctions(search=search_shuffled),
    "swapped": ControlFunctions(search=search_swapped),
    "judged": ControlFunctions(search=search_judged),
    "same-topic": ControlFunctions(search=search_same_topic),
}


def with_controls(options: RunExperiment) -> None:
    """Runs an experiment with the controls."""
    main(options, CONTROLS)


if __name__ == "__main__":
    run(with_controls, RunExperiment)
