"""What the tests of jobs share: made-up corpora, a tiny random encoder, files compared byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
WORDS = [a + b + c + d for a in CONSONANTS[:6] for b in VOWELS for c in CONSONANTS[6:10] for d in "ao"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]

Judgement = tuple[str, str, int]


def make_passages(count: int, *, seed: int = 0, prefix: str = "p") -> list[dict]:
    """BEIR documents of 3 to 30 words, every third one without a title."""
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
    """Questions of some words of a passage each, which it answers; and their judgements."""
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
    """A BEIR folder; without queries it has the corpus alone."""
    write_lines(folder / "corpus.jsonl", passages)
    if queries := list(queries):
        write_lines(folder / "queries.jsonl", queries)
    for split, judged in (qrels or {}).items():
        file = folder / "qrels" / f"{split}.tsv"
        file.parent.mkdir(exist_ok=True)
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, judgement)) for judgement in judged)]
        file.write_text("\n".join(lines) + "\n")
    return folder


def save_tiny_bert(folder: Path, *, hidden: int = 32, seed: int = 0) -> str:
    """A random BERT of two layers with a tokenizer that knows WORDS; the folder is what --encoder takes."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[EOS]", model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return str(folder)


def files_of(root: Path, *, but: Sequence[str] = ("provenance.json",)) -> dict[str, bytes]:
    """Path -> bytes of all files below a folder, less those of some names and what is being written."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in but and ".tmp" not in path.parts
    }


def brute_force(
    queries: np.ndarray, vectors: np.ndarray, k: int, deleted: Sequence[int] = ()
) -> list[list[tuple[int, float]]]:
    """The specification of an exact search: float64 products rounded to float32, by score, then row."""
    found = []
    for query in queries.astype(np.float64):
        scores = (vectors.astype(np.float64) @ query).astype(np.float32)
        alive = [row for row in range(len(vectors)) if row not in set(deleted)]
        best = sorted(alive, key=lambda row: (-scores[row], row))[:k]
        found.append([(row, float(scores[row])) for row in best])
    return found
