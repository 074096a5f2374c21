"""Stores of a set with words of topics in front of each query and passage."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import import_corpus

import numpy as np

from benchmarks.common.files import read_documents, write_documents
from benchmarks.topics.sets import TopicSet


def store_with_words(topic_set: TopicSet, arm: str, protocol: str | None, folder: Path, num_words: int) -> str:
    """Returns the URL of the store of a set with words in front of its texts, which is made if needed.

    Args:
        topic_set: The set.
        arm: words: those of the topic of the text; random-words: those of a topic that is drawn for each text.
        protocol: How the topic of a query is found.
        folder: The folder of the experiment.
        num_words: Number of words in front of a text.
    """
    name = "-".join([topic_set.name, arm, *([protocol] if protocol else []), str(num_words)])
    source, url = folder / "sets" / name, str(folder / "stores" / name)
    if not (source / "queries.jsonl").exists():  # written last
        topics_of_passages, topics_of_queries = topics_of_texts(topic_set, protocol, is_random=arm == "random-words")
        words_of_topics = [" ".join(words[:num_words]) for words in topic_set.topics["topics"].model.words]
        shutil.copytree(topic_set.source / "qrels", source / "qrels", dirs_exist_ok=True)
        for file, topics in (("corpus.jsonl", topics_of_passages), ("queries.jsonl", topics_of_queries)):
            write_with_words(topic_set.source / file, source / file, topics, words_of_topics)
    import_corpus.main(import_corpus.ImportCorpus(store=url, source=str(source)))
    return url


def topics_of_texts(
    topic_set: TopicSet, protocol: str | None, *, is_random: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the topic of each passage and of each query by id.

    Args:
        topic_set: The set.
        protocol: How the topic of a query is found.
        is_random: Whether the topic of each text is drawn instead.
    """
    passage_ids = topic_set.corpus.ids(np.arange(topic_set.corpus.num_rows)).tolist()
    splits = topic_set.queries.splits
    query_ids = [id for split in splits for id in topic_set.queries.split(split).ids]
    if is_random:
        random, num_topics = np.random.default_rng(0), topic_set.topics["topics"].model.num_topics
        of_passages = random.integers(num_topics, size=len(passage_ids))
        of_queries = random.integers(num_topics, size=len(query_ids))
    else:
        of_passages = topic_set.topics_of_passages("topics")
        of_queries = np.concatenate([topic_set.topics_of_queries("topics", split, protocol) for split in splits])
    return (
        dict(zip(passage_ids, of_passages.tolist(), strict=True)),
        dict(zip(query_ids, of_queries.tolist(), strict=True)),
    )


def write_with_words(source: Path, target: Path, topics: Mapping[str, int], words_of_topics: Sequence[str]) -> None:
    """Writes the documents of a file that have a topic, with the words of the topic in front of each text.

    Args:
        source: The file of the documents.
        target: The file to write.
        topics: The topic of each document by id.
        words_of_topics: The words of each topic, as a text.
    """
    write_documents(
        target,
        (
            document | {"text": f"{words_of_topics[topics[document['_id']]]} {document['text']}"}
            for document in read_documents(source)
            if document["_id"] in topics
        ),
    )
