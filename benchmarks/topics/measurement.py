"""Trains and measures runs, through the jobs."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jobs import encode_corpus, evaluate, search

import numpy as np

from benchmarks.common.models import MINILM
from benchmarks.topics.runs import ALL_WEIGHTS, METRICS, SAME_TOPIC, WITH_WORDS, Run, Values, run_name
from benchmarks.topics.sets import TopicSet, prepare_set
from benchmarks.topics.training import text_options, train
from benchmarks.topics.words import store_with_words
from indexing.embeddings.embeddings import Embeddings
from indexing.exact.search import exact_search
from indexing.measures.embeddings_by_category import measures_by_category
from indexing.measures.vectors import unit
from indexing.search.runs import hits_table, write_trec
from indexing.store.models import model_folder
from retriever.encoding.encoder import Encoder
from retriever.options import EncoderOptions, Side
from retriever.prompts.prompts import TaskPrompt, load_prompt
from retriever.topics.controls import random_topics, shuffled_topics

HITS = 100  # per query


class Measurement:
    """Trains and measures runs.

    Attributes:
        sets: The sets by name.

    Args:
        options: The options of the benchmark.
    """

    def __init__(self, options: argparse.Namespace):
        self.sets = {name: prepare_set(name, options) for name in options.sets}
        self._options, self._folder = options, Path(options.folder)
        self._backbones = {"minilm": MINILM}
        if options.backbone:
            self._backbones["small"] = str(Path(options.backbone).resolve())

    def measure(self, run: Run) -> Values:
        """Trains an arm, unless it is trained, and measures it."""
        topic_set = self.sets[run.data]
        if run.arm == "bm25":
            return self._search(run, topic_set.url, "bm25")
        if run.arm == "none":
            encoder = self._backbones[run.model]
            return self._encode_and_search(run, topic_set.url, f"none-{run.model}", encoder=encoder)
        if run.arm in ALL_WEIGHTS:
            store = self._store_of_texts(run)
            train(run, store, self._backbones[run.model], self._options)
            return self._encode_and_search(run, store, run.name, encoder=f"models/{run.name}")
        if run.arm in ("shuffled", "swapped"):  # they use the prompts of `topic`
            prompts = run_name(run.model, run.data, "topic", run.protocol, run.seed)
            return self._search_with_topics(run, prompts, *control_topics(run, topic_set))
        if run.arm == SAME_TOPIC:
            return self._search_same_topic(run)
        train(run, topic_set.url, self._backbones[run.model], self._options)
        if run.arm == "random":
            return self._search_with_topics(run, run.name, *control_topics(run, topic_set))
        if run.protocol != "judged":
            return self._encode_and_search(run, topic_set.url, run.name, task=run.name)
        self._encode(run, topic_set.url, run.name, task=run.name)
        of_queries = topic_set.topics_of_queries(run.topics, run.split, "judged")  # a job infers them from the texts
        return self._search_with_topics(run, run.name, None, of_queries)

    def _store_of_texts(self, run: Run) -> str:
        """Returns the URL of the store with the texts of a run."""
        topic_set = self.sets[run.data]
        if run.arm not in WITH_WORDS:
            return topic_set.url
        return store_with_words(topic_set, run.arm, run.protocol, self._folder, self._options.text_words)

    def _encode(self, run: Run, store: str, name: str, **source: Any) -> None:
        """Encodes the passages of a store as embeddings/NAME, with an `encoder` or for a `task`."""
        if "encoder" in source:
            source |= text_options(self._options, run.arm)
        encode_corpus.main(encode_corpus.EncodeCorpus(store=store, name=name, **source))

    def _encode_and_search(self, run: Run, store: str, name: str, **source: Any) -> Values:
        """Encodes the passages as `_encode` does, and measures exact search."""
        self._encode(run, store, name, **source)
        return self._search(run, store, f"exact:{name}", name)

    def _search(self, run: Run, store: str, source: str, embeddings: str | None = None) -> Values:
        """Measures a search source, and on the test split the embeddings."""
        name = f"{run.name}-{run.split}"
        search.main(search.Search(store=store, source=source, split=run.split, k=HITS, name=name))
        return self._evaluate(run, store, name, embeddings if run.split == "test" else None)

    def _search_with_topics(
        self, run: Run, prompts: str, of_passages: np.ndarray | None, of_queries: np.ndarray
    ) -> Values:
        """Measures prompts of topics when the texts have other topics than in a job.

        Args:
            run: The run.
            prompts: The name of the prompts.
            of_passages: The topic of each passage, int64 [n]; None: the passages are those of embeddings/PROMPTS.
            of_queries: The topic of each query, int64 [q].
        """
        topic_set = self.sets[run.data]
        prompt = load_prompt(model_folder(topic_set.store.open("prompts", prompts)))
        assert prompt.topics is not None
        if run.arm == "swapped":
            prompt = replace(prompt, topics=prompt.topics.shuffled(run.seed))
        encoder = open_encoder(self._backbones[run.model], prompt.options, self._options.cpus)
        if of_passages is None:
            embeddings = Embeddings.open(topic_set.store, prompts, topic_set.corpus)
            passages = embeddings.take(np.arange(embeddings.num_rows))
        else:
            texts = encoder.compose(*topic_set.passages())
            passages = encode_with_topics(encoder, prompt, texts, "passage", of_passages).astype(np.float16)
        texts = topic_set.queries.split(run.split).texts
        queries = encode_with_topics(encoder, prompt, texts, "query", of_queries)
        values = self._search_vectors(run, queries, passages)
        if run.split != "test":
            return values
        return replace(values, vectors=measure_vectors(topic_set, run.split, queries, passages))

    def _search_same_topic(self, run: Run) -> Values:
        """Measures the prompt of `dptdr`, if the scores of passages with the topic of the query rise by a weight."""
        topic_set = self.sets[run.data]
        prompts = run_name(run.model, run.data, "dptdr", None, run.seed)
        prompt = load_prompt(model_folder(topic_set.store.open("prompts", prompts)))
        encoder = open_encoder(self._backbones[run.model], prompt.options, self._options.cpus)
        queries = encode_with_topics(encoder, prompt, topic_set.queries.split(run.split).texts, "query", None)
        embeddings = Embeddings.open(topic_set.store, prompts, topic_set.corpus)
        passages = embeddings.take(np.arange(embeddings.num_rows))
        # The product of two such columns is the weight if the topics are the same, and 0 otherwise.
        columns = np.sqrt(run.settings["weight"]) * np.eye(topic_set.topics["topics"].model.num_topics)
        of_queries = columns[topic_set.topics_of_queries("topics", run.split, run.protocol)]
        of_passages = columns[topic_set.topics_of_passages("topics")]
        return self._search_vectors(
            run,
            np.hstack([queries, of_queries]).astype(np.float32),
            np.hstack([passages, of_passages]).astype(np.float16),
        )

    def _search_vectors(self, run: Run, queries: np.ndarray, passages: np.ndarray) -> Values:
        """Measures exact search of vectors; those of queries are float32 [q, dim], of passages float16 [n, dim]."""
        topic_set = self.sets[run.data]
        hits = exact_search(queries, [(0, passages)], min(HITS, len(passages)), threads=self._options.cpus)
        ids = topic_set.queries.split(run.split).ids
        file = str(self._folder / "runs" / f"{run.name}-{run.split}.trec")
        write_trec([hits_table(ids, hits, topic_set.corpus.ids(hits.rows))], file, "run", overwrite=True)
        return self._evaluate(run, topic_set.url, file, None)

    def _evaluate(self, run: Run, store: str, hits: str, embeddings: str | None) -> Values:
        """Measures hits, which are a run of the store or a TREC file, and embeddings."""
        file = self._folder / "figures" / f"{run.name}-{run.split}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        evaluate.main(
            evaluate.Evaluate(
                store=store,
                run=(hits,),
                embeddings=(embeddings,) if embeddings else (),
                split=run.split,
                relevance="category",
                metrics=METRICS,
                json=str(file),
                overwrite=True,
            )
        )
        document = json.loads(file.read_text())
        [metrics] = document["per_query"].values()
        return Values(
            metrics={metric: np.array(values) for metric, values in metrics.items()},
            random_ranking=document["random_ranking"],
            vectors=document["embeddings"][embeddings]["unit"] if embeddings else None,
        )


@functools.cache
def open_encoder(model: str, options: EncoderOptions, cpus: int) -> Encoder:
    """Returns an open backbone without tasks."""
    return Encoder(model, options, threads=cpus, tasks={})


def encode_with_topics(
    encoder: Encoder, prompt: TaskPrompt, texts: Sequence[str], side: Side, topics: np.ndarray | None
) -> np.ndarray:
    """Returns the vectors of texts with prompts of topics, or with one prompt.

    Args:
        encoder: The open backbone.
        prompt: The prompts.
        texts: The texts.
        side: query or passage.
        topics: The topic of each text, int64 [texts]; None: there is one prompt.

    Returns:
        float32 [texts, dim].
    """
    encoder.put_task("task", prompt)
    vectors = encoder.forward(encoder.tokenize(texts, side=side), side=side, task="task", topics=topics)
    encoder.drop_task("task")
    return vectors


def control_topics(run: Run, topic_set: TopicSet) -> tuple[np.ndarray, np.ndarray]:
    """Returns the topics of the passages and of the queries of a control, int64 [n] and [q]."""
    of_passages = topic_set.topics_of_passages("topics")
    of_queries = topic_set.topics_of_queries("topics", run.split, run.protocol)
    if run.arm == "swapped":  # their prompts are other ones
        return of_passages, of_queries
    if run.arm == "shuffled":
        return shuffled_topics(of_passages, 0), shuffled_topics(of_queries, 1)
    num_topics = topic_set.topics["topics"].model.num_topics
    of_passages = random_topics(len(of_passages), num_topics, run.seed)
    if run.protocol == "judged":
        return of_passages, of_passages[topic_set.judged_rows(run.split)]
    return of_passages, random_topics(len(of_queries), num_topics, run.seed + 2_000)


def measure_vectors(topic_set: TopicSet, split: str, queries: np.ndarray, passages: np.ndarray) -> dict[str, Any]:
    """Returns alignment, uniformity and cosines of the vectors of a split, scaled to length 1.

    Args:
        topic_set: The set.
        split: The split.
        queries: The vectors of its queries, float32 [q, dim].
        passages: The vectors of the passages, float16 [n, dim].
    """
    ids = topic_set.queries.split(split).ids
    judged = topic_set.relevance.categories_of(topic_set.queries, ids, topic_set.queries.qrels(split))
    categories = [judged.by_query[id] for id in ids]

    def relevant(start: int, end: int) -> np.ndarray:
        return np.stack([topic_set.relevance.relevant(names) for names in categories[start:end]])

    return asdict(measures_by_category(queries, passages, relevant, {"unit": unit}).unit)
