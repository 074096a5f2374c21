"""Small corpora, queries and an encoder for the tests of jobs; the bytes of files, and a brute-force search."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tiny import save_encoder

from riptide.indexing.store.sealed_json import PROVENANCE
from riptide.indexing.store.store import Store

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
WORDS = [a + b + c + d for a in CONSONANTS[:6] for b in VOWELS for c in CONSONANTS[6:10] for d in "ao"]

Judgement = tuple[str, str, int]


def make_passages(count: int, *, seed: int = 0, prefix: str = "p") -> list[dict]:
    """Returns BEIR documents of 3 to 30 words, every third one without a title."""
    draw = random.Random(seed)
    return [
        {
            "_id": f"{prefix}{number}",
            "title": "" if number % 3 == 0 else draw.choice(WORDS),
            "text": " ".join(draw.choices(WORDS, k=draw.randint(3, 30))),
            "metadata": {"year": 1900 + number},
        }
        for number in range(count)
    ]


def make_queries(passages: Sequence[Mapping], count: int, *, seed: int = 1) -> tuple[list[dict], list[Judgement]]:
    """Returns queries, each of the first words of a passage, which is its positive; and their judgements."""
    draw = random.Random(seed)
    queries, judged = [], []
    for number, passage in enumerate(draw.sample(list(passages), count)):
        words = passage["text"].split()
        queries.append({"_id": f"q{number}", "text": " ".join(words[: max(2, len(words) // 2)])})
        judged.append((f"q{number}", passage["_id"], 1))
    return queries, judged


def write_lines(path: Path, rows: Iterable[Mapping]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_beir(
    folder: Path,
    passages: Iterable[Mapping],
    queries: Iterable[Mapping] = (),
    qrels: Mapping[str, Iterable[Judgement]] | None = None,
) -> Path:
    """Writes a BEIR folder; without queries it has the corpus alone."""
    write_lines(folder / "corpus.jsonl", passages)
    if queries := list(queries):
        write_lines(folder / "queries.jsonl", queries)
    for split, judged in (qrels or {}).items():
        file = folder / "qrels" / f"{split}.tsv"
        file.parent.mkdir(exist_ok=True)
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, judgement)) for judgement in judged)]
        file.write_text("\n".join(lines) + "\n")
    return folder


def write_queries(folder: Path, queries: Iterable[Mapping], qrels: Mapping[str, Iterable[Judgement]]) -> Path:
    """Writes a BEIR folder of a query set, without a corpus."""
    write_beir(folder, [], queries, qrels)
    (folder / "corpus.jsonl").unlink()
    return folder


def save_tiny_bert(folder: Path, *, hidden: int = 32, seed: int = 0) -> str:
    """Saves a random BERT of two layers whose tokenizer knows WORDS; returns its folder, for --encoder."""
    config = {"hidden_size": hidden, "max_position_embeddings": 64, "initializer_range": 0.3}
    tokenizer = {"words": WORDS, "lowercase": True, "padding_side": None, "limit": 64}
    return str(save_encoder(folder, seed=seed, config=config, **tokenizer))


def files_of(root: Path, *, but: Sequence[str] = ("provenance.json",)) -> dict[str, bytes]:
    """Returns the bytes of all files below a folder by path, without files named in `but` and temporary files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in but and ".tmp" not in path.parts
    }


def brute_force(
    queries: np.ndarray, vectors: np.ndarray, k: int, deleted: Sequence[int] = ()
) -> list[list[tuple[int, float]]]:
    """Returns (row, score) of the exact top k per query: float64 products rounded to float32, by score, then row."""
    found = []
    for query in queries.astype(np.float64):
        scores = (vectors.astype(np.float64) @ query).astype(np.float32)
        alive = [row for row in range(len(vectors)) if row not in set(deleted)]
        best = sorted(alive, key=lambda row: (-scores[row], row))[:k]
        found.append([(row, float(scores[row])) for row in best])
    return found


def stored_bytes(url: str) -> dict[str, bytes]:
    """Returns the bytes of the objects of a store by key, without its provenance, which differs in every store."""
    storage = Store(url).storage
    return {key: storage.read(key) for key, _ in storage.list("") if not key.endswith(PROVENANCE)}
