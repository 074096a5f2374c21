"""A random BERT of a few thousand weights, and a corpus of nonsense for it: both the same bytes for the same seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

VOCABULARY = 512


def save_bert(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, spread: float = 0.02) -> Path:
    """Save a model of 64 positions that transformers opens; returns the folder.

    spread: standard deviation of the weights; at 0.2 a text's first vector depends on the text, and can be trained.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * hidden, max_position_embeddings=64, initializer_range=spread,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def write_corpus(folder: Path, passages: int, *, questions: int = 0, words: int = 40, seed: int = 0) -> Path:
    """A BEIR folder of passages of random words; each question is the start of the one passage that answers it."""
    generator = random.Random(seed)
    (folder / "qrels").mkdir(parents=True)
    texts = [
        " ".join(f"w{generator.randrange(VOCABULARY)}" for _ in range(generator.randint(words // 2, words * 3 // 2)))
        for _ in range(passages)
    ]
    with open(folder / "corpus.jsonl", "w") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"_id": f"d{number}", "title": f"w{number % VOCABULARY}", "text": text}) + "\n")
    if questions:
        asked = generator.sample(range(passages), questions)
        with open(folder / "queries.jsonl", "w") as file:
            for number in asked:
                text = " ".join(texts[number].split()[:20])
                file.write(json.dumps({"_id": f"q{number}", "text": text}) + "\n")
        lines = ["query-id\tcorpus-id\tscore", *(f"q{number}\td{number}\t1" for number in asked)]
        (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder
