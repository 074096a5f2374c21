"""Turns texts into token ids, and token ids into batches that depend on the texts alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from retriever.errors import InputError
from retriever.loading.vocabulary import check_ids, end_texts, load_tokenizer
from retriever.options import EncoderOptions, Side, TitlePolicy
from retriever.recipe import Recipe

PIECE = 1 << 17  # characters of texts, about, that a tokenizer gets in one call
_TEXT = 32  # characters that are added for each text: a tokenizer's result takes about 20 kB per text


@dataclass(frozen=True)
class Tokens:
    """Token ids of some texts, concatenated: ids int32 [total], lengths int64 [texts]."""

    ids: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """The position in `ids` at which each text begins: int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths

    @classmethod
    def joined(cls, pieces: Sequence[Tokens]) -> Tokens:
        """Returns the tokens of the texts of several objects, at least one, in order."""
        if len(pieces) == 1:
            return pieces[0]
        return cls(np.concatenate([piece.ids for piece in pieces]), np.concatenate([piece.lengths for piece in pieces]))


def text_pieces(lengths: Iterable[int]) -> Iterator[slice]:
    """Yields slices of a list of texts, in order, each of one text or of texts with about PIECE characters in all.

    A tokenizer holds Python's lock while it reads the texts of a call and while its results are freed, so that other
    threads wait for it (0.1 to 0.3 s for 64 texts of 64 Ki characters).

    Args:
        lengths: Characters of each text.
    """
    start = end = size = 0
    for length in lengths:
        if end > start and size + length + _TEXT > PIECE:
            yield slice(start, end)
            start, size = end, 0
        end += 1
        size += length + _TEXT
    if end > start:
        yield slice(start, end)


class TextTokenizer:
    """A model's fast tokenizer with one copy per side, so that sides of different lengths can run concurrently.

    Raises InputError for a tokenizer that is damaged, has no vocabulary, or does not fit the model.
    """

    def __init__(self, recipe: Recipe, options: EncoderOptions, *, trust_remote_code: bool = False):
        slow = load_tokenizer(
            recipe.backbone,
            vocabulary=recipe.vocabulary,
            trust_remote_code=trust_remote_code,
            **recipe.tokenizer_args,
        )
        self._vocabulary = recipe.vocabulary
        # Byte-level tokenizers know all text, and some name the token that ends or begins a text for unknown ones.
        ends = (slow.bos_token_id, slow.eos_token_id)
        self._unknown: int | None = None if slow.unk_token_id in ends else slow.unk_token_id
        ignored = {*slow.all_special_ids} - {self._unknown}
        self._is_special = np.zeros(max(ignored, default=0) + 2, bool)  # the last entry stands for all larger ids
        self._is_special[sorted(ignored)] = True
        self.separator: str | None = slow.sep_token or slow.eos_token
        self.pad_id = int(slow.pad_token_id if slow.pad_token_id is not None else slow.eos_token_id or 0)
        base: Tokenizer = slow.backend_tokenizer
        self._size = base.get_vocab_size()
        base.no_padding()
        base.no_truncation()
        if recipe.lower_case and "Lowercase" not in repr(base.normalizer):
            base.normalizer = Normalizers([Lowercase(), *([base.normalizer] if base.normalizer else [])])
        if recipe.append_eos:
            end_texts(slow, recipe.backbone, "append_eos" if options.append_eos else "add_eos_token")
        self._sides: dict[Side, tuple[Tokenizer, str]] = {}
        for side, prefix, length in (
            ("query", recipe.query_prefix, recipe.query_length),
            ("passage", recipe.passage_prefix, recipe.passage_length),
        ):
            special = base.num_special_tokens_to_add(False)
            if length <= special:
                raise InputError(f"{side}_length={length} leaves no room beside {special} special tokens")
            copy = Tokenizer.from_str(base.to_str())
            copy.enable_truncation(length)
            self._sides[side] = (copy, prefix)  # type: ignore[index]

    def __call__(self, texts: Sequence[str], *, side: Side, prefix: str | None = None) -> Tokens:
        """Returns token ids with special tokens, cut to the side's length; uses the tokenizer's own threads.

        `prefix` is the text in front of each text; None: that of the side.

        Raises:
            InputError: For a text that is no valid string, or that has a token without an embedding; names it.
        """
        tokenizer, texts = self._prepare(texts, side, prefix)
        with _named_text(texts):
            pieces = text_pieces(map(len, texts))
            rows = [encoding.ids for piece in pieces for encoding in tokenizer.encode_batch_fast(texts[piece])]
        return self._join(rows)

    def with_words(self, texts: Sequence[str], *, side: Side) -> tuple[Tokens, np.ndarray]:
        """Returns token ids as a call does, and the word of each token, which the tokenizer's pre-tokenization decides.

        Words are numbered from 0 in each text: int64 [total], -1 for special tokens.
        """
        tokenizer, texts = self._prepare(texts, side)
        with _named_text(texts):
            encodings = tokenizer.encode_batch(texts)
        tokens = self._join([encoding.ids for encoding in encodings])
        words = np.full(len(tokens.ids), -1, np.int64)
        for start, encoding in zip(tokens.starts, encodings, strict=True):
            numbers = [-1 if word is None else word for word in encoding.word_ids]
            words[start : start + len(numbers)] = numbers
        return tokens, words

    def _prepare(self, texts: Sequence[str], side: Side, prefix: str | None = None) -> tuple[Tokenizer, list[str]]:
        """Returns the tokenizer of a side, and the texts with a prefix; None: that of the side."""
        tokenizer, side_prefix = self._sides[side]
        prefix = side_prefix if prefix is None else prefix
        return tokenizer, [prefix + text for text in texts] if prefix else list(texts)

    def _join(self, rows: list[list[int]]) -> Tokens:
        """Returns the checked token ids of texts."""
        for row in rows:
            if not row:  # a tokenizer without special tokens gives no token for an empty text
                row.append(self.pad_id)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.empty(int(lengths.sum()), np.int32)
        start = 0
        for row in rows:
            ids[start : start + len(row)] = row
            start += len(row)
        check_ids(ids, lengths, self._vocabulary)
        return Tokens(ids, lengths)

    def unknown(self, tokens: Tokens) -> tuple[int, int]:
        """Returns how many tokens are unknown to the vocabulary, and how many there are, special tokens excluded."""
        special = self._is_special[np.minimum(tokens.ids, len(self._is_special) - 1)]
        unknown = 0 if self._unknown is None else int(np.count_nonzero(tokens.ids == self._unknown))
        return unknown, len(tokens.ids) - int(np.count_nonzero(special))

    def are_words(self, ids: np.ndarray) -> np.ndarray:
        """Returns whether tokens are neither special nor the one for unknown words: int [n] -> bool [n]."""
        return ~self._is_special[np.minimum(ids, len(self._is_special) - 1)] & (ids != self._unknown)

    def first_word(self) -> int:
        """Returns the lowest token id that is a word."""
        return int(np.flatnonzero(self.are_words(np.arange(self._size)))[0])

    def compose(self, titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy) -> list[str]:
        """Returns passages' strings by the title policy; an empty title adds nothing."""
        if policy == "none":
            return list(texts)
        between = {"space": " ", "newline": "\n", "sep": f" {self.separator} "}[policy]
        return [title + between + text if title else text for title, text in zip(titles, texts, strict=True)]


@contextlib.contextmanager
def _named_text(texts: Sequence[str]) -> Iterator[None]:
    """Turns the tokenizer's error about a text that is no valid string into an InputError that names the text."""
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        for position, text in enumerate(texts):
            try:
                text.encode("utf-8")
            except (AttributeError, UnicodeEncodeError) as fault:
                raise InputError(f"text {position} of {len(texts)} is no valid string: {fault}") from error
        raise


def plan(lengths: np.ndarray, budget: int, step: int, limit: int | None) -> list[tuple[np.ndarray, int]]:
    """Cuts texts into padded batches, sorted by length (ties by position), longest first.

    Args:
        lengths: Tokens of each text, int64 [n].
        budget: Tokens of a batch at most, padding included; a longer text is a separate batch.
        step: Columns of a batch are a multiple of this.
        limit: Columns of a batch at most; None: no limit.

    Returns:
        (rows, width) of each batch: row numbers, int64, and columns, at least 2. A function of the lengths alone.
    """
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        length = int(lengths[order[start]])
        width = max(2, length, min(-(-length // step) * step, limit or length + step))
        rows = order[start : start + max(1, budget // width)]
        batches.append((rows, width))
        start += len(rows)
    return batches


def padded(
    tokens: Tokens, batches: list[tuple[np.ndarray, int]], *, side: str, pad_id: int
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Yields the batches of a plan as (rows, ids int64 [batch, width], lengths int64 [batch]), padded on `side`.

    A single row is repeated: compiled code would treat a batch of one as a separate case.
    """
    starts = tokens.starts
    for rows, width in batches:
        doubled = np.repeat(rows, 2) if len(rows) == 1 else rows
        lengths = tokens.lengths[doubled]
        columns = np.arange(width)
        first = (width - lengths if side == "left" else np.zeros_like(lengths))[:, None]
        inside = (columns >= first) & (columns < first + lengths[:, None])
        ids = np.full((len(doubled), width), pad_id, np.int64)
        source = starts[doubled][:, None] + columns - first
        ids[inside] = tokens.ids[source[inside]]
        yield rows, torch.from_numpy(ids), torch.from_numpy(lengths)


def plan_packed(lengths: np.ndarray, most: int = 1024, *, least: int) -> list[np.ndarray]:
    """Cuts texts into packed batches, sorted by length (ties by position), longest first.

    Args:
        lengths: Tokens of each text, int64 [n].
        most: Tokens of a batch, about; half of all tokens if that is less, so that two threads have work.
        least: Tokens of a batch at least.

    Returns:
        The row numbers of each batch, int64. A function of the arguments alone.
    """
    order = np.argsort(-lengths, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    size = min(most, max(least, -(-int(lengths.sum()) // 2)))
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(before // size)) + 1) if len(rows)]


def end_to_end(tokens: Tokens, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the given texts packed, without padding: ids int64 [total], lengths int64 [rows]."""
    starts = tokens.starts
    ids = np.concatenate([tokens.ids[starts[row] : starts[row] + tokens.lengths[row]] for row in rows])
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(tokens.lengths[rows].astype(np.int64))
