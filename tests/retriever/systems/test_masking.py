"""Whole-word masks: with every kind of tokenizer, a word is masked as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import save_bert
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from riptide.retriever.forward.batching import TextTokenizer
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.systems.masking import Masking

LETTERS = "abcdefgh"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(kind: str) -> Tokenizer:
    """Returns a tokenizer whose pieces are single letters, with a mark at the start or inside of a word."""
    if kind == "wordpiece":
        pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
        tokenizer = Tokenizer(models.WordPiece(_numbered(pieces), unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "unigram":
        pieces = [*LETTERS, *(f"\u2581{letter}" for letter in LETTERS)]
        tokenizer = Tokenizer(models.Unigram([*((piece, 0.0) for piece in SPECIAL), *((p, -1.0) for p in pieces)], 1))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "bpe without pre-tokenization":
        pieces = [*LETTERS, "\u2581", *(f"\u2581{letter}" for letter in LETTERS)]
        merges = [("\u2581", letter) for letter in LETTERS]
        tokenizer = Tokenizer(models.BPE(_numbered(pieces), merges, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        pieces = [*LETTERS, "\u0120", *(f"\u0120{letter}" for letter in LETTERS)]
        merges = [("\u0120", letter) for letter in LETTERS]
        tokenizer = Tokenizer(models.BPE(_numbered(pieces), merges, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}


def save_tokenizer(folder: Path, kind: str) -> Path:
    """Saves a tokenizer beside a BERT with more rows than it has pieces."""
    save_bert(folder)
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(kind), model_max_length=64, **names).save_pretrained(folder)
    return folder


@pytest.fixture(params=["wordpiece", "unigram", "bpe without pre-tokenization", "byte-level bpe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "model", request.param)


def test_words_are_masked_as_a_whole(folder: Path) -> None:
    draw = np.random.default_rng(0)
    texts = []
    for _ in range(300):
        words = ["".join(draw.choice(list(LETTERS), draw.integers(1, 5))) for _ in range(draw.integers(3, 12))]
        texts.append(" ".join(words))
    recipe = read_recipe(folder, EncoderOptions())
    tokenizer, masking = TextTokenizer(recipe, EncoderOptions()), Masking(recipe, 516, 0.4)
    tokens, words = tokenizer.with_words(texts, side="passage")
    plain = tokenizer(texts, side="passage")
    assert np.array_equal(tokens.ids, plain.ids)
    assert np.array_equal(tokens.lengths, plain.lengths)
    _, labels = masking(tokens, [[1, row] for row in range(len(texts))], words)
    peer = AutoTokenizer.from_pretrained(folder)
    split, full = 0, 0
    for text, start, length in zip(texts, tokens.starts, tokens.lengths, strict=True):
        pieces = peer.convert_ids_to_tokens(tokens.ids[start : start + length])[1:-1]
        masked = (labels.ids[start : start + length] != -100)[1:-1]
        of_pieces = [number for number, word in enumerate(text.split()) for _ in word]
        assert len(pieces) == len(of_pieces)  # a piece per letter
        budget = max(1, round(0.4 * len(pieces)))
        assert 1 <= masked.sum() <= budget
        for number in range(len(text.split())):
            own = masked[np.array(of_pieces) == number]
            split += bool(own.any() and not own.all())
        full += masked.sum() == budget
        unmasked = {of_pieces[place] for place in np.flatnonzero(~masked)}
        room = budget - masked.sum()
        assert all(len(text.split()[number]) > room for number in unmasked)  # nothing else fits
    assert split == 0
    assert full > 200
    again, _ = masking(tokens, [[1, row] for row in range(len(texts))], words)
    assert np.array_equal(again.ids, masking(tokens, [[1, row] for row in range(len(texts))], words)[0].ids)


def test_a_text_without_a_word_that_fits_is_masked_token_by_token(folder: Path) -> None:
    recipe = read_recipe(folder, EncoderOptions())
    tokens, words = TextTokenizer(recipe, EncoderOptions()).with_words(["abcdefgh" * 3], side="passage")
    _, labels = Masking(recipe, 516, 0.25)(tokens, [[0]], words)
    assert (labels.ids != -100).sum() == 6
