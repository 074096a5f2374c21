"""Measures search for long documents, cut to the encoder's maximum length or split at import, and ranked by passage.

    python benchmarks/long_documents.py --source ../shared/data/squad --encoder MODEL --out results/long-documents.json

The documents are Wikipedia articles: the paragraphs of SQuAD joined by title. A query is judged with its article.
Articles with queries of the test split come first, then others up to --documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_documents, write_json, write_qrels

ROOT = Path(__file__).resolve().parents[1]
FORMS: dict[str, list[object]] = {
    "cut": [],
    "120 words, overlap 30": ["--split-words", 120, "--overlap", 30],
    "60 words, overlap 15": ["--split-words", 60, "--overlap", 15],
}
SOURCES = ("exact:enc", "bm25", "hybrid")
METRICS = ("nDCG@10", "RR@10", "R@1", "R@10")


def run_job(name: str, *arguments: object) -> None:
    """Runs a job."""
    subprocess.run([sys.executable, f"jobs/{name}.py", *map(str, arguments)], cwd=ROOT, check=True)


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
    write_documents(folder / "corpus.jsonl", articles)
    wanted = {each.query for each in judged}
    write_documents(
        folder / "queries.jsonl", (q for q in read_documents(source / "queries.jsonl") if q["_id"] in wanted)
    )
    write_qrels(
        folder / "qrels" / "test.tsv", [Judgement(each.query, numbers[titles[each.passage]]) for each in judged]
    )


def measure(source: Path, folder: Path, encoder: str, split: list[object]) -> dict[str, dict[str, float]]:
    """Imports the articles, searches them by each source, and returns the means of METRICS by source."""
    at, figures = ("--store", folder / "store"), folder / "figures.json"
    run_job("import_corpus", *at, "--source", source, *split)
    run_job("encode_corpus", *at, "--encoder", encoder, "--name", "enc")
    run_job("build_bm25", *at)
    run_job("evaluate", *at, "--source", *SOURCES, "--metrics", *METRICS, "--json", figures)
    means = json.loads(figures.read_text())["mean"]
    return dict(zip(("dense", "bm25", "hybrid"), means.values(), strict=True))


def main() -> None:
    """Reads the options, measures every form of the documents, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="SQuAD as a BEIR folder")
    parser.add_argument("--encoder", required=True, help="an encoder: a folder, or a Hugging Face name")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--documents", type=int, default=490, help="number of articles")
    parser.add_argument("--queries", type=int, default=2_000, help="number of queries")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        articles = Path(temporary) / "articles"
        write_articles(options.source, articles, options.documents, options.queries)
        values = {}
        for number, (form, split) in enumerate(FORMS.items()):
            values[form] = measure(articles, Path(temporary) / str(number), options.encoder, split)
    print(f"{'documents':24} {'search':8}" + "".join(f"{metric:>9}" for metric in METRICS))
    for form, by_source in values.items():
        for name, means in by_source.items():
            print(f"{form:24} {name:8}" + "".join(f"{means[metric]:9.3f}" for metric in METRICS))
    write_json(options.out, {"documents": options.documents, "queries": options.queries, "values": values})


if __name__ == "__main__":
    main()
