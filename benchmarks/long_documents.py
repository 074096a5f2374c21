"""Measures search for long documents, cut to the encoder's maximum length or split at import, and ranked by passage.

    python benchmarks/long_documents.py --source ../shared/data/squad --encoder MODEL --out results/long-documents.json

The documents are Wikipedia articles: the paragraphs of SQuAD joined by title. A query is judged with its article.
Articles with queries of the test split come first, then others up to --documents.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_data_set, write_json
from benchmarks.common.program import Parser
from riptide import Store

FORMS: dict[str, dict[str, Any]] = {
    "cut": {},
    "120 words, overlap 30": {"split_words": 120, "overlap": 30},
    "60 words, overlap 15": {"split_words": 60, "overlap": 15},
}
SOURCES = {"dense": "exact:enc", "bm25": "bm25", "hybrid": "hybrid"}
METRICS = ("nDCG@10", "RR@10", "R@1", "R@10")


def write_articles(source: Path, folder: Path, num_documents: int, num_queries: int) -> None:
    """Writes a BEIR folder of articles, and of queries of the test split, evenly spaced."""
    titles, paragraphs = dict[str, str](), dict[str, list[str]]()
    for passage in read_documents(source / "corpus.jsonl"):
        titles[passage["_id"]] = passage["title"]
        paragraphs.setdefault(passage["title"], []).append(passage["text"])
    judged = read_qrels(source / "qrels" / "test.tsv")
    judged = judged[:: max(1, len(judged) // num_queries)][:num_queries]
    chosen = list(dict.fromkeys([*(titles[each.passage] for each in judged), *paragraphs]))[:num_documents]
    numbers = {title: f"article{number}" for number, title in enumerate(chosen)}
    articles = [{"_id": id, "title": title, "text": "\n".join(paragraphs[title])} for title, id in numbers.items()]
    queries = read_documents(source / "queries.jsonl", {each.query for each in judged})
    qrels = {"test": [Judgement(each.query, numbers[titles[each.passage]]) for each in judged]}
    write_data_set(folder, queries, qrels, articles)


def measure(source: Path, folder: Path, encoder: str, split: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Imports the articles, searches them by each source, and returns the means of METRICS by source."""
    store = Store(folder)
    store.import_corpus(source, **split)
    store.encode_corpus(encoder, name="enc")
    store.build_bm25()
    means = store.evaluate(list(SOURCES.values()), metrics=METRICS).mean
    return {name: dict(means[source]) for name, source in SOURCES.items()}


def main() -> None:
    """Reads the options, measures every form of the documents, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--source", None, "SQuAD as a BEIR folder", type=Path, required=True)
    parser.add("--encoder", None, "an encoder: a folder, or a Hugging Face name", required=True)
    parser.add("--out", None, "JSON file of the figures", type=Path, required=True)
    parser.add("--documents", 490, "number of articles")
    parser.add("--queries", 2_000, "number of queries")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        articles = Path(temporary) / "articles"
        write_articles(options.source, articles, options.documents, options.queries)
        values = {
            form: measure(articles, Path(temporary) / form, options.encoder, split) for form, split in FORMS.items()
        }
    print(f"{'documents':24} {'search':8}" + "".join(f"{metric:>9}" for metric in METRICS))
    for form, by_source in values.items():
        for name, means in by_source.items():
            print(f"{form:24} {name:8}" + "".join(f"{means[metric]:9.3f}" for metric in METRICS))
    write_json(options.out, {"documents": options.documents, "queries": options.queries, "values": values})


if __name__ == "__main__":
    main()
