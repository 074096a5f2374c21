"""Counts of cut texts: they equal those of texts that are tokenised whole, and cutting is that of the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import add_masked_head, save_bert, save_classifier
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from riptide.base.cuts import SPLIT, Cuts
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.pair_encoding import PairTokenizer
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.forward.batching import TextTokenizer, Tokens, tokens_to_cut
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions

CLS, SEP = ("[CLS]", 1), ("[SEP]", 2)
LAYOUTS: dict[str, Any] = {
    "no special tokens": None,
    "BERT": processors.BertProcessing(SEP, CLS),
    "RoBERTa": processors.RobertaProcessing(SEP, CLS),
    "types": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[CLS, SEP]
    ),
    "second text first": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $B [SEP] $A [SEP]", special_tokens=[CLS, SEP]
    ),
    "closing token": processors.TemplateProcessing(single="$A [SEP]", pair="$A [SEP] $B [SEP]", special_tokens=[SEP]),
    "opening token": processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[CLS]),
        ]
    ),
}


def word_tokenizer(layout: str) -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "w0", "w1"]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    if (processor := LAYOUTS[layout]) is not None:
        tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_pair", [False, True])
def test_the_cut_is_that_of_the_tokenizers_own_truncation(layout: str, is_pair: bool) -> None:
    """For all lengths of texts and limits; special tokens within a text are cut like words."""
    draw = random.Random(0)
    whole, truncating = word_tokenizer(layout), word_tokenizer(layout)
    texts = [" ".join(draw.choices(["w0", "w1", "w2", "[SEP]"], k=length)) for length in range(18)]
    items: Any = [(one, other) for one in texts for other in texts] if is_pair else texts
    for limit in range(whole.num_special_tokens_to_add(is_pair) + 2, 15):
        truncating.enable_truncation(limit, strategy="longest_first")
        for encoding, expected in zip(whole.encode_batch(items), truncating.encode_batch(items), strict=True):
            ids, types, words = encoding.ids, encoding.type_ids, encoding.word_ids
            for tail in tokens_to_cut(encoding, limit):
                del ids[tail], types[tail], words[tail]
            assert (ids, types, words) == (expected.ids, expected.type_ids, expected.word_ids)


def text_tokenizer(folder: Path, **options: Any) -> TextTokenizer:
    chosen = EncoderOptions(**options)
    return TextTokenizer(read_recipe(folder, chosen), chosen)


def independent(lengths: list[int], limit: int) -> Cuts:
    """Returns the counts of texts with these numbers of tokens."""
    over = [length - limit for length in lengths if length > limit]
    return Cuts(len(lengths), sum(lengths), len(over), sum(over), limit)


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5", "qwen3"])
@pytest.mark.parametrize("prefix", ["", "query : "])
@pytest.mark.parametrize("append_eos", [False, True])
def test_counts_are_those_of_texts_that_are_tokenised_whole(
    tiny: Callable[..., Path], texts: list[str], kind: str, prefix: str, append_eos: bool
) -> None:
    folder = tiny(kind)
    tokenizer = text_tokenizer(folder, passage_length=20, query_length=9, passage_prefix=prefix, append_eos=append_eos)
    whole = AutoTokenizer.from_pretrained(folder)
    lengths = [len(whole(prefix + text)["input_ids"]) + append_eos for text in texts]
    tokens = tokenizer(texts, side="passage")
    assert tokens.count_cuts() == independent(lengths, 20)
    assert 10 < tokens.count_cuts().cut_texts < len(texts)
    rows = np.array([41, 3, 45, 7])
    assert tokens.count_cuts(rows) == independent([lengths[row] for row in rows], 20)
    ids = [whole(prefix + text)["input_ids"] for text in texts]
    closing = [whole.eos_token_id] if append_eos else []
    specials = len(whole("")["input_ids"]) // 2  # as many after the text as before it
    for number, row in enumerate(np.split(tokens.ids, tokens.starts[1:])):
        end = ids[number][len(ids[number]) - specials :] + closing
        expected = ids[number] + closing
        assert row.tolist() == (expected if len(expected) <= 20 else expected[: 20 - len(end)] + end)
    if not prefix:
        assert tokenizer(texts, side="query").count_cuts() == independent(lengths, 9)


def test_words_are_cut_with_their_tokens(tiny: Callable[..., Path], texts: list[str]) -> None:
    tokenizer = text_tokenizer(tiny("bert"), passage_length=20)
    tokens, words = tokenizer.with_words(texts, side="passage")
    expected = tokenizer(texts, side="passage")
    np.testing.assert_array_equal(tokens.ids, expected.ids)
    assert tokens.count_cuts() == expected.count_cuts()
    for row in np.split(words, tokens.starts[1:]):
        inner = row[1:-1]
        assert row[0] == row[-1] == -1
        assert (np.diff(inner) >= 0).all()
        assert not len(inner) or inner[0] == 0


def test_pairs_are_counted_as_one_text(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "cross")
    draw = np.random.default_rng(1)
    sizes = [*draw.integers(0, 40, (200, 2)).tolist(), [0, 0], [60, 60]]
    queries, passages = (["w1 " * size for size in side] for side in zip(*sizes, strict=True))
    whole, truncated = (AutoTokenizer.from_pretrained(folder) for _ in range(2))
    lengths = [len(ids) for ids in whole(list(queries), list(passages))["input_ids"]]
    tokens, types = PairTokenizer(folder, 30)(queries, passages)
    assert tokens.count_cuts() == independent(lengths, 30)
    expected = truncated(list(queries), list(passages), truncation="longest_first", max_length=30)
    assert tokens.ids.tolist() == [*chain.from_iterable(expected["input_ids"])]
    assert types.ids.tolist() == [*chain.from_iterable(expected["token_type_ids"])]


def test_a_prompt_and_sparse_vectors_change_no_count(tmp_path: Path) -> None:
    """A deep prompt has no tokens; a sparse encoder tokenises as a dense one."""
    folder = save_bert(tmp_path / "bert")
    texts = ["w1 " * 10, "w2 " * 90, "w3"]
    expected = Cuts(3, 12 + 92 + 3, 1, 92 - 64, 64)
    encoder = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never"), tasks={})
    assert encoder.tokenize(texts, side="passage").count_cuts() == expected
    sparse = SparseEncoder(str(add_masked_head(folder)), EncoderOptions(pooling="splade", dtype="float32"))
    assert sparse.tokenize(texts, side="passage").count_cuts() == expected


def test_tokens_that_were_not_cut_have_no_limit() -> None:
    tokens = Tokens(np.arange(5, dtype=np.int32), np.array([2, 3]))
    assert tokens.count_cuts() == Cuts(2, 5, 0, 0, 0)


def test_counts_add_up_and_keep_the_larger_limit() -> None:
    one, other = Cuts(3, 30, 1, 5, 12), Cuts(2, 40, 2, 20, 16, 7)
    assert one + other == Cuts(5, 70, 3, 25, 16, 7)
    assert Cuts() + one == one
    assert Cuts(**one.to_dict()) == one


@pytest.mark.parametrize(
    ("cuts", "are_many"),
    [
        (Cuts(100, 10_000, 5, 10, 256), False),  # exactly 5% of the texts
        (Cuts(100, 10_000, 6, 10, 256), True),
        (Cuts(100, 10_000, 1, 500, 256), False),  # exactly 5% of the tokens
        (Cuts(100, 10_000, 1, 501, 256), True),
        (Cuts(), False),
    ],
)
def test_more_than_five_percent_of_texts_or_tokens_are_many(cuts: Cuts, are_many: bool) -> None:
    assert cuts.are_many == are_many
    assert cuts.line("passages", "give more").startswith("warning: ") == are_many


@pytest.mark.parametrize(
    ("most", "line"),
    [
        (None, f"give a larger --passage-length, or {SPLIT}"),
        (512, f"give a larger --passage-length (the model allows at most 512), or {SPLIT}"),
        (256, f"{SPLIT}, because the model allows no more tokens"),
    ],
)
def test_a_warning_names_a_remedy(most: int | None, line: str) -> None:
    cuts = Cuts(141, 1_000_000, 140, 983_000, 256)
    sentence = "140 of 141 passages were cut to 256 tokens; 1.7% of all tokens were kept"
    assert cuts.line("passages", "give a larger --passage-length", most) == f"warning: {sentence}; {line}"


@pytest.mark.parametrize(
    ("tokens", "cut_tokens", "share"),
    [(1000, 500, "50%"), (100_000, 1, "more than 99.9%"), (100_000, 99_999, "less than 0.1%"), (1000, 999, "0.1%")],
)
def test_shares_are_not_rounded_to_all_or_nothing(tokens: int, cut_tokens: int, share: str) -> None:
    sentence = Cuts(1_000, tokens, 3, cut_tokens, 64, 12).sentence("queries")
    assert sentence == (
        f"3 of 1,000 queries were cut to 64 tokens (12 more queries were not counted); {share} of all tokens were kept"
    )
