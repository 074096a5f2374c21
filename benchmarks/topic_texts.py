"""Writes a BEIR folder with other texts than those of a set: the first words alone, or words of topics in front.

    python benchmarks/topic_texts.py first-words --source D/reuters-topics --out W/reuters-topics --words 32
    python benchmarks/topic_texts.py topic-words --store S --source D/reuters-topics --out W/with-words --words 10

first-words cuts the passages. topic-words puts the most probable words of its topic in `topics/topics` of a store in
front of each query and passage, or with --random those of a topic that is drawn for each text.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import read_documents, write_documents
from benchmarks.common.program import Parser


def words_by_text(store_url: str, num_words: int, *, is_random: bool) -> dict[str, dict[str, str]]:
    """Returns the words in front of each passage and each query, by file and id.

    Args:
        store_url: The store with the topics.
        num_words: Number of words in front of a text.
        is_random: Whether the topic of each text is drawn.
    """
    from indexing.corpus.corpus import Corpus
    from indexing.corpus.queries import Queries
    from indexing.store.store import Store
    from indexing.topics.reader import Topics
    from retriever.topics.model import with_default_topic

    store = Store(store_url)
    corpus, queries, topics = Corpus.open(store), Queries.open(store, None), Topics.open(store, "topics")
    splits = [queries.split(split) for split in queries.splits]
    texts = [text for split in splits for text in split.texts]
    ids = {
        "corpus.jsonl": corpus.ids(np.arange(corpus.num_rows)).tolist(),
        "queries.jsonl": [id for split in splits for id in split.ids],
    }
    random, model = np.random.default_rng(0), topics.model
    of_texts = [
        random.integers(model.num_topics, size=len(ids["corpus.jsonl"])) if is_random else topics.topic_per_row(),
        random.integers(model.num_topics, size=len(texts)) if is_random else model.infer(texts),
    ]
    words = [" ".join(words[:num_words]) for words in model.words]
    return {
        file: {id: words[topic] for id, topic in zip(ids[file], with_default_topic(of_file, model), strict=True)}
        for file, of_file in zip(ids, of_texts, strict=True)
    }


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
    shutil.copytree(options.source / "qrels", options.out / "qrels", dirs_exist_ok=True)
    if options.kind == "first-words":
        write_documents(options.out / "queries.jsonl", read_documents(options.source / "queries.jsonl"))
        documents = read_documents(options.source / "corpus.jsonl")
        cut = (each | {"text": " ".join(each["text"].split()[: options.words])} for each in documents)
        write_documents(options.out / "corpus.jsonl", cut)
        return
    for file, words in words_by_text(options.store, options.words, is_random=options.random).items():
        documents = (each for each in read_documents(options.source / file) if each["_id"] in words)
        longer = (each | {"text": f"{words[each['_id']]} {each['text']}"} for each in documents)
        write_documents(options.out / file, longer)


if __name__ == "__main__":
    main()
