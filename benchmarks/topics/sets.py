"""The sets, each in a store with BM25 and the topics of its passages."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from jobs import build_bm25, fit_topics, import_corpus
from jobs.common.options import build

import numpy as np

from benchmarks.common.files import read_documents, read_qrels, write_documents, write_qrels
from benchmarks.topics.runs import PROTOCOLS
from indexing.corpus.category_relevance import CategoryRelevance
from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import Queries
from indexing.store.store import Store
from indexing.topics.reader import Topics
from retriever.topics.model import with_default

SPLITS = ("train", "dev", "test")


class TopicSet:
    """A set in a store. Its topics are `topics`, by hLDA, and `lda`, by LDA.

    Attributes:
        name: The set.
        url: The URL of its store.
        source: The BEIR folder that the store was imported from.
        store: The store.
        corpus: The passages.
        queries: The queries of all splits.
        topics: The topics by name.
        relevance: The passages that have a category in common with a query.
    """

    def __init__(self, name: str, url: str, source: Path):
        self.name, self.url, self.source = name, url, source
        self.store = Store(url)
        self.corpus = Corpus.open(self.store)
        self.queries = Queries.open(self.store, None)
        self.topics = {key: Topics.open(self.store, key) for key in ("topics", "lda")}
        self.relevance = CategoryRelevance(self.corpus, "categories")

    def judged_rows(self, split: str) -> np.ndarray:
        """Returns the row of the first judged passage of each query of a split, int64 [queries]."""
        qrels = self.queries.qrels(split)
        first: dict[str, str] = {}
        for query, passage in zip(qrels["query_id"].to_pylist(), qrels["corpus_id"].to_pylist(), strict=True):
            first.setdefault(query, passage)
        rows: np.ndarray = self.corpus.rows_of([first[query] for query in self.queries.split(split).ids])
        return rows

    def topics_of_passages(self, topics: str) -> np.ndarray:
        """Returns the topic of each passage, int64 [n]; one without a known word has the most probable topic."""
        fitted = self.topics[topics]
        return with_default(fitted.of_rows(), fitted.model)

    def topics_of_queries(self, topics: str, split: str, protocol: str | None) -> np.ndarray:
        """Returns the topic of each query of a split, int64 [queries].

        Args:
            topics: The name of the topics.
            split: The split.
            protocol: judged: the topic of its judged passage; otherwise that of its text.
        """
        if protocol == "judged":
            return self.topics_of_passages(topics)[self.judged_rows(split)]
        model = self.topics[topics].model
        return with_default(model.infer(self.queries.split(split).texts), model)

    def passages(self) -> tuple[list[str], list[str]]:
        """Returns the titles and the texts of the passages."""
        passages = self.corpus.passages(np.arange(self.corpus.num_rows))
        return [passage.title for passage in passages], [passage.text for passage in passages]

    def describe(self) -> dict[str, Any]:
        """Returns sizes and words of the topics, and the share of queries whose own topic is that of their passage."""
        description: dict[str, Any] = {}
        for name, topics in self.topics.items():
            description[name] = {
                "topics": topics.model.num_topics,
                "sizes": topics.sizes().tolist(),
                "words": [list(words[:10]) for words in topics.model.words],
                "agreement": {split: self.agreement(name, split) for split in SPLITS},
                "queries_without_known_word": {
                    split: int((topics.model.infer(self.queries.split(split).texts) < 0).sum()) for split in SPLITS
                },
            }
        return description

    def agreement(self, topics: str, split: str) -> float:
        """Returns the share of queries of a split whose own topic is that of their passage."""
        own, judged = (self.topics_of_queries(topics, split, protocol) for protocol in PROTOCOLS)
        return float((own == judged).mean())


def prepare_set(name: str, options: argparse.Namespace) -> TopicSet:
    """Opens a set; makes its store first, unless it is complete."""
    folder = Path(options.folder)
    url = str(folder / "stores" / name)
    source = Path(options.data).resolve() / name
    if options.limit is not None:
        source = write_part(source, folder / "sets" / f"limit-{options.limit}" / name, options.limit)
    if options.passage_words is not None:
        source = write_beginnings(
            source, folder / "sets" / f"words-{options.passage_words}" / name, options.passage_words
        )
    import_corpus.main(import_corpus.ImportCorpus(store=url, source=str(source)))
    build_bm25.main(build_bm25.BuildBm25(store=url))
    fit: dict[str, Any] = {"store": url, "words": options.words, "iterations": options.iterations}
    page = str(folder / f"{name}.html")
    fit_topics.main(build(fit_topics.FitTopicsOptions, {"name": "topics", "page": page, "overwrite": True, **fit}))
    num_topics = Topics.open(Store(url), "topics").model.num_topics
    fit_topics.main(build(fit_topics.FitTopicsOptions, {"name": "lda", "method": "lda", "topics": num_topics, **fit}))
    return TopicSet(name, url, source)


def write_beginnings(source: Path, folder: Path, num_words: int) -> Path:
    """Returns a BEIR folder with the first words of each passage of a set; writes it if needed.

    Args:
        source: The BEIR folder of the set.
        folder: The folder to write to; its name becomes the name of the queries.
        num_words: Number of words.
    """
    if not (folder / "corpus.jsonl").exists():  # written last
        shutil.copytree(source / "qrels", folder / "qrels", dirs_exist_ok=True)
        write_documents(folder / "queries.jsonl", read_documents(source / "queries.jsonl"))
        write_documents(
            folder / "corpus.jsonl",
            (
                document | {"text": " ".join(document["text"].split()[:num_words])}
                for document in read_documents(source / "corpus.jsonl")
            ),
        )
    return folder


def write_part(source: Path, folder: Path, limit: int) -> Path:
    """Returns a BEIR folder of some passages of a set, drawn at random, and their queries; writes it if needed.

    Args:
        source: The BEIR folder of the whole set.
        folder: The folder to write to; its name becomes the name of the queries.
        limit: Number of passages.
    """
    if (folder / "queries.jsonl").exists():  # written last
        return folder
    passages = list(read_documents(source / "corpus.jsonl"))
    rows = np.sort(np.random.default_rng(0).permutation(len(passages))[:limit])
    passages = [passages[row] for row in rows]
    passage_ids = {passage["_id"] for passage in passages}
    query_ids: set[str] = set()
    for file in sorted((source / "qrels").glob("*.tsv")):
        judgements = [judgement for judgement in read_qrels(file) if judgement.passage in passage_ids]
        query_ids |= {judgement.query for judgement in judgements}
        write_qrels(folder / "qrels" / file.name, judgements)
    write_documents(folder / "corpus.jsonl", passages)
    queries = (query for query in read_documents(source / "queries.jsonl") if query["_id"] in query_ids)
    write_documents(folder / "queries.jsonl", queries)
    return folder
