"""Draw the sample in examples/squad: whole SQuAD articles with all their questions, in BEIR form.

    python examples/make_squad_sample.py --source PATH/TO/squad --out examples/squad

The source is a SQuAD 1.1 conversion in BEIR form: corpus.jsonl.gz with `metadata.split` (train or dev: the part of
SQuAD a passage comes from), queries.jsonl.gz and qrels/{train,dev,test}.tsv. Articles are taken whole, so that the
passages of one article compete with one another. Lines keep their ids, their bytes and their order.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

SPLITS = ("train", "dev", "test")
PASSAGES = {"train": 1400, "dev": 600}  # at most so many from each part of SQuAD; dev-v1.1 holds the test questions
SEED = 0


def draw_articles(sizes: dict[str, int], num_passages: int, seed: int) -> set[str]:
    """Whole articles in a seeded order, less those that would go past `num_passages`. `sizes`: title -> passages."""
    titles = sorted(sizes)
    random.Random(seed).shuffle(titles)
    drawn: set[str] = set()
    total = 0
    for title in titles:
        if total + sizes[title] <= num_passages:
            drawn.add(title)
            total += sizes[title]
    return drawn


def read_lines(path: Path) -> list[str]:
    """The lines of a gzip text file, with their line ends."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.readlines()


def write_lines(path: Path, lines: list[str]) -> None:
    """A gzip file without name and time, so that the same lines always make the same file."""
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=9, mtime=0) as file:
        file.write("".join(lines).encode("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    corpus_lines = read_lines(options.source / "corpus.jsonl.gz")
    passages = [json.loads(line) for line in corpus_lines]
    articles: set[tuple[str, str]] = set()
    for part, num_passages in PASSAGES.items():
        sizes: dict[str, int] = {}
        for passage in passages:
            if passage["metadata"]["split"] == part:
                sizes[passage["title"]] = sizes.get(passage["title"], 0) + 1
        articles |= {(part, title) for title in draw_articles(sizes, num_passages, SEED)}
    chosen = [(passage["metadata"]["split"], passage["title"]) in articles for passage in passages]
    passage_ids = {passage["_id"] for passage, keep in zip(passages, chosen, strict=True) if keep}

    options.out.joinpath("qrels").mkdir(parents=True, exist_ok=True)
    kept_corpus = [line for line, keep in zip(corpus_lines, chosen, strict=True) if keep]
    write_lines(options.out / "corpus.jsonl.gz", kept_corpus)
    query_ids: set[str] = set()
    for split in SPLITS:
        path = Path("qrels", f"{split}.tsv")
        header, *rows = options.source.joinpath(path).read_text(encoding="utf-8").splitlines(keepends=True)
        kept_rows = [row for row in rows if row.split("\t")[1] in passage_ids]
        options.out.joinpath(path).write_text(header + "".join(kept_rows), encoding="utf-8", newline="\n")
        query_ids |= {row.split("\t")[0] for row in kept_rows}
        print(f"{split}: {len(kept_rows):,} questions")
    all_queries = read_lines(options.source / "queries.jsonl.gz")
    kept_queries = [line for line in all_queries if json.loads(line)["_id"] in query_ids]
    write_lines(options.out / "queries.jsonl.gz", kept_queries)
    print(f"{len(articles)} articles, {len(kept_corpus):,} passages, {len(kept_queries):,} questions")


if __name__ == "__main__":
    main()
