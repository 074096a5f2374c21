"""Writes a BEIR folder with other texts than those of a set: the first words alone, or words of topics in front.

    python benchmarks/topic_texts.py first-words --source D/reuters-topics --out W/reuters-topics --words 32
    python benchmarks/topic_texts.py topic-words --store S --source D/reuters-topics --out W/with-words --words 10

first-words cuts the passages. topic-words puts the most probable words of its topic in `topics/topics` of a store in
front of each query and passage, or with --random those of a topic that is drawn for each text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common.files import read_documents, read_qrels, write_data_set
from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.topics.topics_reader import Topics
from riptide.retriever.topics.model import with_default_topic


def words_by_text(store_url: str, num_words: int, *, is_random: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the words in front of each passage and of each query, by id.

    The topic of each text is drawn if `is_random` is set; otherwise it is its own one.
    """
    store = Store(store_url)
    corpus, queries, topics = store.corpus(), store.queries(), Topics.open(store, "topics")
    splits = [queries.split(split) for split in queries.splits]
    texts = [text for split in splits for text in split.texts]
    random, model = np.random.default_rng(0), topics.model
    of_passages = random.integers(model.num_topics, size=corpus.num_rows) if is_random else topics.topic_per_row()
    of_queries = random.integers(model.num_topics, size=len(texts)) if is_random else model.infer(texts)
    words = [" ".join(words[:num_words]) for words in model.words]
    ids = corpus.ids(np.arange(corpus.num_rows)).tolist(), [id for split in splits for id in split.ids]

    def by_id(ids: list[str], topics: np.ndarray) -> dict[str, str]:
        return {id: words[topic] for id, topic in zip(ids, with_default_topic(topics, model), strict=True)}

    return by_id(ids[0], of_passages), by_id(ids[1], of_queries)


def with_words(file: Path, words: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yields the documents of a file that have words, with these in front."""
    for document in read_documents(file, words):
        yield document | {"text": f"{words[document['_id']]} {document['text']}"}


def main() -> None:
    """Reads the options and writes the folder."""
    parser = Parser(__doc__)
    parser.add("kind", None, "what is written", choices=["first-words", "topic-words"])
    parser.add("--source", None, "BEIR folder of the set", type=Path, required=True)
    parser.add("--out", None, "folder to write", type=Path, required=True)
    parser.add("--words", None, "number of words", type=int, required=True)
    parser.add("--store", None, "topic-words: store of the set with topics/topics")
    parser.add("--random", False, "topic-words: words of a random topic")
    options = parser.parse_args()
    if (options.kind == "topic-words") != (options.store is not None):
        parser.error(f"{options.kind}: --store is needed by topic-words, and by nothing else")
    passages, queries = options.source / "corpus.jsonl", options.source / "queries.jsonl"
    qrels = {file.stem: read_qrels(file) for file in (options.source / "qrels").glob("*.tsv")}
    if options.kind == "first-words":
        documents = read_documents(passages)
        cut = (each | {"text": " ".join(each["text"].split()[: options.words])} for each in documents)
        write_data_set(options.out, read_documents(queries), qrels, cut)
    else:
        of_passages, of_queries = words_by_text(options.store, options.words, is_random=options.random)
        write_data_set(options.out, with_words(queries, of_queries), qrels, with_words(passages, of_passages))


if __name__ == "__main__":
    main()
