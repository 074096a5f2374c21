"""Builds tiny random models of several architectures, and a corpus of random words for them.

The same arguments always give the same bytes. Other modules import this one before torch, so each function imports
torch and transformers itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512  # words of `save_bert` and `write_corpus`: w0, w1, ...
CLASSIFIER_VOCABULARY = 60  # words of `save_classifier`
WORDS = [
    "the",
    "a",
    "of",
    "river",
    "bank",
    "money",
    "water",
    "flows",
    "fast",
    "slow",
    "question",
    "passage",
    "query",
    ":",
    "instruct",
    "answer",
    "title",
    "alpha",
    "beta",
    "gamma",
]
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_ENDS = [("[CLS]", 2), ("[SEP]", 3)]


def save_bert(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, spread: float = 0.02) -> Path:
    """Saves a BERT of 64 positions with a tokenizer of the words w0 to w511.

    Args:
        folder: The folder to write to.
        seed: Seed of the weights.
        hidden: Hidden size.
        layers: Number of layers.
        spread: Standard deviation of the weights. At 0.2 a text's first vector depends on the text, and can be trained.

    Returns:
        The folder.
    """
    size = _save_word_tokenizer(folder, VOCABULARY, 64)
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 2 * hidden}
    config = {**_SHAPE, **shape, "vocab_size": size, "max_position_embeddings": 64, "initializer_range": spread}
    return _save_weights(folder, "BertModel", seed, config)


def save_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    seed: int = 0,
    layers: int = 2,
    config: Mapping[str, Any] | None = None,
    **tokenizer: Any,
) -> Path:
    """Saves an encoder with a WordPiece tokenizer.

    Args:
        folder: The folder to write to.
        kind: bert, roberta, t5 or qwen3.
        seed: Seed of the weights.
        layers: Number of layers.
        config: Further values of the model's configuration.
        **tokenizer: Options of `save_piece_tokenizer`.

    Returns:
        The folder.
    """
    size = save_piece_tokenizer(folder, **tokenizer)
    shape = {**_SHAPE, "num_hidden_layers": layers, "initializer_range": 0.5}
    architecture, values = {
        "bert": ("BertModel", {**shape, "max_position_embeddings": 61}),
        "roberta": (
            "RobertaModel",
            {**shape, "max_position_embeddings": 42, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
        ),
        "t5": ("T5EncoderModel", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4}),
        "qwen3": (
            "Qwen3Model",
            {**shape, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
        ),
    }[kind]
    return _save_weights(folder, architecture, seed, {**values, "vocab_size": size, **(config or {})})


def save_classifier(folder: Path, kind: str = "bert", labels: int = 1, seed: int = 0, **config: Any) -> Path:
    """Saves a cross-encoder of 48 positions (Qwen3: relative ones) with a tokenizer of the words w0 to w59.

    Args:
        folder: The folder to write to.
        kind: bert, electra, roberta, distilbert or qwen3; the token types of BERT and ELECTRA tell the query from the
            passage.
        labels: Number of labels.
        seed: Seed of the weights.
        **config: Further values of the model's configuration.

    Returns:
        The folder.
    """
    size = _save_word_tokenizer(
        folder, CLASSIFIER_VOCABULARY, 48, for_pairs=True, has_types=kind in ("bert", "electra")
    )
    common = {"vocab_size": size, "initializer_range": 0.4, "num_labels": labels, "pad_token_id": 0}
    architecture, values = {
        "bert": ("Bert", {**_SHAPE, "max_position_embeddings": 48}),
        "electra": ("Electra", {**_SHAPE, "max_position_embeddings": 48, "embedding_size": 16}),
        "roberta": (
            "Roberta",
            {**_SHAPE, "max_position_embeddings": 49, "type_vocab_size": 1, "bos_token_id": 2, "eos_token_id": 3},
        ),
        "distilbert": (
            "DistilBert",
            {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 48},
        ),
        "qwen3": (
            "Qwen3",
            {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
        ),
    }[kind]
    return _save_weights(folder, f"{architecture}ForSequenceClassification", seed, {**common, **values, **config})


def make_classifier(folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Replaces the encoder in a folder by a random cross-encoder of the same shape with one label.

    Args:
        folder: A folder of `save_bert` or `save_encoder`.
        seed: Seed of the weights.
        **config: Further values of the model's configuration.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    shape = AutoConfig.from_pretrained(folder, num_labels=1, **config)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder)
    return folder


def add_masked_head(folder: Path, *, seed: int = 1, spread: float | None = None) -> Path:
    """Replaces the encoder in a folder by a random masked language model of the same shape.

    Args:
        folder: A folder of `save_bert` or `save_encoder`.
        seed: Seed of the weights.
        spread: Standard deviation of the weights; None: as before.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(seed)
    shape = AutoConfig.from_pretrained(folder, **({} if spread is None else {"initializer_range": spread}))
    AutoModelForMaskedLM.from_config(shape).save_pretrained(folder)
    return folder


def save_piece_tokenizer(
    folder: Path,
    *,
    words: Sequence[str] = WORDS,
    lowercase: bool = False,
    special: bool = True,
    padding_side: str | None = "right",
    limit: int = 10**30,
) -> int:
    """Saves a WordPiece tokenizer of words and single letters.

    Args:
        folder: The folder to write to.
        words: Words that are one token each.
        lowercase: Lowercase the text, and strip its accents.
        special: Put [CLS] before and [SEP] after each text.
        padding_side: The side of padding that the tokenizer's configuration names; None names none.
        limit: The maximum length that the tokenizer's configuration names, in tokens.

    Returns:
        The size of the vocabulary.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*_SPECIAL, "[EOS]", *words, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=_ENDS)
    side = {} if padding_side is None else {"padding_side": padding_side}
    return _save_fast_tokenizer(folder, tokenizer, limit, eos_token="[EOS]", **side)


def _save_word_tokenizer(
    folder: Path, num_words: int, limit: int, *, for_pairs: bool = False, has_types: bool = True
) -> int:
    """Saves a tokenizer of the words w0, w1, ... between spaces; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = [*_SPECIAL, *(f"w{number}" for number in range(num_words))]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    options: dict[str, Any] = {}
    pair = None
    if for_pairs:
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if has_types else "[CLS] $A [SEP] $B:0 [SEP]:0"
        types = ["token_type_ids"] if has_types else []
        options["model_input_names"] = ["input_ids", *types, "attention_mask"]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=_ENDS)
    return _save_fast_tokenizer(folder, tokenizer, limit, **options)


def _save_fast_tokenizer(folder: Path, tokenizer: Any, limit: int, **options: Any) -> int:
    """Saves a tokenizer for transformers, with the special tokens of _SPECIAL; returns the size of its vocabulary."""
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=limit, **options).save_pretrained(
        folder
    )
    return int(tokenizer.get_vocab_size())


def _save_weights(folder: Path, architecture: str, seed: int, config: Mapping[str, Any]) -> Path:
    """Saves a random model of one of transformers' classes; returns the folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, architecture)
    model(model.config_class(**config)).save_pretrained(folder)
    return folder


def write_corpus(folder: Path, passages: int, *, queries: int = 0, words: int = 40, seed: int = 0) -> Path:
    """Writes a BEIR folder of passages of random words of `save_bert`.

    Args:
        folder: The folder to write to.
        passages: Number of passages.
        queries: Number of queries, each the start of the one passage that answers it; 0 writes no queries.
        words: Mean number of words of a passage.
        seed: Seed of the words.

    Returns:
        The folder.
    """
    generator = random.Random(seed)
    (folder / "qrels").mkdir(parents=True)
    texts = [
        " ".join(f"w{generator.randrange(VOCABULARY)}" for _ in range(generator.randint(words // 2, words * 3 // 2)))
        for _ in range(passages)
    ]
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"_id": f"d{number}", "title": f"w{number % VOCABULARY}", "text": text}) + "\n")
    if queries:
        chosen = generator.sample(range(passages), queries)
        with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
            for number in chosen:
                text = " ".join(texts[number].split()[:20])
                file.write(json.dumps({"_id": f"q{number}", "text": text}) + "\n")
        lines = ["query-id\tcorpus-id\tscore", *(f"q{number}\td{number}\t1" for number in chosen)]
        (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_source(folder: Path, *, answers: Sequence[str] = ()) -> Path:
    """Writes a BEIR folder of 300 passages, with 30 training queries and 10 test queries, which have these answers."""
    write_corpus(folder, 300, queries=40)
    test, queries = folder / "qrels/test.tsv", folder / "queries.jsonl"
    header, *lines = test.read_text().splitlines()
    (folder / "qrels/train.tsv").write_text("\n".join([header, *lines[:30]]) + "\n")
    test.write_text("\n".join([header, *lines[30:]]) + "\n")
    if answers:
        documents = [json.loads(line) | {"metadata": {"answers": answers}} for line in queries.read_text().splitlines()]
        queries.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return folder
