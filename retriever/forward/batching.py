"""Tokenises texts and groups them into batches that depend on the texts alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.model.failures import is_panic, reason_of
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.vocabulary import append_eos_token, check_ids, load_tokenizer
from riptide.retriever.options import EncoderOptions, Side, TitlePolicy
from riptide.telemetry.phases import measured

# Tokens per batch, including padding. On the CPU, 4,096 (of 2,048 to 12,288 tried) keep a layer's activations in cache.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
# The width of a batch is a multiple of this: on the CPU, attention over other widths takes up to 1.5 times as long.
COLUMN_STEP = 16
PACKED_TOKENS = 1024  # approximate number of tokens of a packed batch
# Maximum share of fragments among the tokens of an unbroken text; see `TextTokenizer.are_broken`.
MAX_FRAGMENT_SHARE = 0.5
MIN_TOKENS = 8  # Texts with fewer tokens never count as broken: they may be a name or a number.
FIRST_IDEOGRAPH = 0x2E80  # From this code point on, a letter is often a word.
PIECE = 1 << 17  # approximate characters per tokenizer call of a server; the tokenizer holds the GIL during a call
_CHARACTERS_PER_TEXT = 32  # characters added per text in `text_pieces`: a tokenizer's result takes about 20 kB per text


@dataclass(frozen=True)
class Tokens:
    """Token ids of several texts, concatenated.

    Attributes:
        ids: int32 [total].
        lengths: Tokens of each text, int64 [texts].
        full_lengths: Tokens of each text before it was cut to a length limit, int64 [texts]; None: no text was cut.
        limit: The length limit; 0: there was none.
    """

    ids: np.ndarray
    lengths: np.ndarray
    full_lengths: np.ndarray | None = None
    limit: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """The offset in `ids` at which each text begins: int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def num_cut(self) -> np.ndarray:
        """The number of tokens cut off each text: int64 [texts]."""
        return np.zeros_like(self.lengths) if self.full_lengths is None else self.full_lengths - self.lengths

    def count_cuts(self, texts: np.ndarray | slice = slice(None)) -> Cuts:
        """Counts the texts that were cut; `texts`: numbers of the texts to count, by default all."""
        return Cuts.from_lengths(self.lengths[texts], self.num_cut[texts], self.limit)

    def take(self, texts: np.ndarray) -> Tokens:
        """Returns the tokens of some texts, by their numbers, int64 [n], in that order."""
        starts, lengths = self.starts[texts], self.lengths[texts]
        places = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        full_lengths = None if self.full_lengths is None else self.full_lengths[texts]
        return Tokens(self.ids[places], lengths, full_lengths, self.limit)

    @classmethod
    def join(cls, pieces: Sequence[Tokens]) -> Tokens:
        """Concatenates several Tokens, at least one and all with the same limit, in order."""
        if len(pieces) == 1:
            return pieces[0]
        full_lengths = [piece.lengths if piece.full_lengths is None else piece.full_lengths for piece in pieces]
        return cls(
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            np.concatenate(full_lengths),
            pieces[0].limit,
        )


def text_pieces(lengths: Iterable[int]) -> Iterator[slice]:
    """Yields consecutive slices of texts; each holds one text, or several with about PIECE characters in total.

    A tokenizer holds the GIL while it reads the texts of a call and while its results are freed (0.1 to 0.3 s for 64
    texts of 64 Ki characters). A server tokenises piece by piece, so that its other threads do not wait that long.

    Args:
        lengths: Characters of each text.
    """
    start = end = size = 0
    for length in lengths:
        if end > start and size + length + _CHARACTERS_PER_TEXT > PIECE:
            yield slice(start, end)
            start, size = end, 0
        end += 1
        size += length + _CHARACTERS_PER_TEXT
    if end > start:
        yield slice(start, end)


def tokens_to_cut(encoding: Encoding, limit: int) -> list[slice]:
    """Returns the slices of tokens to delete so that a text or a pair of texts has at most `limit` tokens.

    These are the last tokens of a text before its closing special tokens, which count too. Of a pair, the longer text
    is cut until both have the same length, as by the tokenizer's own truncation (`longest_first`), which does not tell
    how much it cuts off.

    Args:
        encoding: The tokens of a text or a pair, not truncated, with special tokens.
        limit: Number of tokens, more than there are special tokens.

    Returns:
        Up to two slices, the last one first, so that they can be deleted one after the other.
    """
    if len(encoding) <= limit:
        return []
    if encoding.n_sequences == 1:
        is_special = encoding.special_tokens_mask
        num_trailing_special = is_special[::-1].index(0)
        return [slice(limit - num_trailing_special, len(is_special) - num_trailing_special)]
    sequences = encoding.sequence_ids  # None at special tokens
    first, second = (sequences.count(number) for number in (0, 1))
    room = limit - (len(sequences) - first - second)
    shorter_kept = min(first, second, room // 2)
    kept = (shorter_kept, room - shorter_kept) if first <= second else (room - shorter_kept, shorter_kept)
    tails = [
        slice((start := sequences.index(number)) + most, start + length)
        for number, length, most in ((0, first, kept[0]), (1, second, kept[1]))
        if length > most
    ]
    return sorted(tails, key=lambda tail: tail.start, reverse=True)


class TextTokenizer:
    """A fast tokenizer with the prefix and the maximum sequence length of each side.

    Raises InputError for a tokenizer that is damaged, has no vocabulary, or does not fit the model.
    """

    def __init__(self, recipe: Recipe, options: EncoderOptions, *, trust_remote_code: bool = False):
        slow = load_tokenizer(
            recipe.backbone,
            vocabulary_size=recipe.vocabulary_size,
            trust_remote_code=trust_remote_code,
            **recipe.tokenizer_args,
        )
        self._vocabulary_size = recipe.vocabulary_size
        # Byte-level tokenizers know all text; some declare their first or last special token as the unknown token.
        ends = (slow.bos_token_id, slow.eos_token_id)
        self._unknown: int | None = None if slow.unk_token_id in ends else slow.unk_token_id
        special_ids = {*slow.all_special_ids} - {self._unknown}
        self._is_special = np.zeros(max(special_ids, default=0) + 2, bool)  # The last entry stands for all larger ids.
        self._is_special[sorted(special_ids)] = True
        self.separator: str | None = slow.sep_token or slow.eos_token
        self.pad_id = int(slow.pad_token_id if slow.pad_token_id is not None else slow.eos_token_id or 0)
        base: Tokenizer = slow.backend_tokenizer
        self._size = base.get_vocab_size()
        base.no_padding()
        base.no_truncation()
        if recipe.lower_case and "Lowercase" not in repr(base.normalizer):
            base.normalizer = Normalizers([Lowercase(), *([base.normalizer] if base.normalizer else [])])
        if recipe.append_eos:
            append_eos_token(slow, recipe.backbone, "append_eos" if options.append_eos else "add_eos_token")
        self._tokenizer = base
        self._sides: dict[Side, tuple[str, int]] = {
            "query": (recipe.query_prefix, recipe.query_length),
            "passage": (recipe.passage_prefix, recipe.passage_length),
        }
        special = base.num_special_tokens_to_add(False)
        for side, (_, length) in self._sides.items():
            if length <= special:
                if getattr(options, f"{side}_length") is None:
                    raise InputError(
                        f"{recipe.backbone}: {length} positions leave no room beside {special} special tokens: use "
                        "another model, or correct the template in tokenizer.json"
                    )
                name = Parameter(f"{side}_length", length)
                raise InputError(f"{name} leaves no room beside {special} special tokens")

    @measured("tokenise")
    def __call__(self, texts: Sequence[str], *, side: Side, prefix: str | None = None) -> Tokens:
        """Returns token ids with special tokens, cut to the side's maximum length; uses the tokenizer's own threads.

        `prefix` is the text in front of each text; None: that of the side.

        Raises:
            InputError: For a text that is no valid string, or that has a token without an embedding; names it.
        """
        texts, limit = self._prepare(texts, side, prefix)
        with _name_invalid_text(texts), readable_panics(len(texts)):
            rows = [_cut_ids(encoding, limit) for encoding in self._tokenizer.encode_batch_fast(texts)]
        return self._join(rows, limit)

    @measured("tokenise")
    def with_words(self, texts: Sequence[str], *, side: Side) -> tuple[Tokens, np.ndarray]:
        """Returns token ids as a call does, and each token's word number, from the tokenizer's pre-tokenization.

        Words are numbered from 0 in each text: int64 [total], -1 for special tokens.
        """
        texts, limit = self._prepare(texts, side)
        with _name_invalid_text(texts), readable_panics(len(texts)):
            encodings = self._tokenizer.encode_batch(texts)
        tokens = self._join([_cut_ids(encoding, limit) for encoding in encodings], limit)
        words = np.full(len(tokens.ids), -1, np.int64)
        for start, encoding in zip(tokens.starts, encodings, strict=True):
            numbers = [-1 if word is None else word for word in encoding.word_ids]
            for tail in tokens_to_cut(encoding, limit):
                del numbers[tail]
            words[start : start + len(numbers)] = numbers
        return tokens, words

    def _prepare(self, texts: Sequence[str], side: Side, prefix: str | None = None) -> tuple[list[str], int]:
        """Adds a prefix to texts (None: that of the side), and returns them with the length limit of the side."""
        side_prefix, limit = self._sides[side]
        prefix = side_prefix if prefix is None else prefix
        return [prefix + text for text in texts] if prefix else list(texts), limit

    def _join(self, encoded: Sequence[tuple[list[int], int]], limit: int) -> Tokens:
        """Joins the results of `_cut_ids` for several texts, and checks that all token ids have an embedding."""
        rows = [row or [self.pad_id] for row, _ in encoded]  # Without special tokens, an empty text has no token.
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        full_lengths = np.maximum(lengths, np.fromiter((length for _, length in encoded), np.int64, len(rows)))
        ids = np.empty(int(lengths.sum()), np.int32)
        start = 0
        for row in rows:
            ids[start : start + len(row)] = row
            start += len(row)
        check_ids(ids, lengths, self._vocabulary_size)
        return Tokens(ids, lengths, full_lengths, limit)

    def count_unknown(self, tokens: Tokens) -> tuple[int, int]:
        """Returns the number of unknown tokens and the number of all tokens; special tokens are excluded from both."""
        special = self._is_special[np.minimum(tokens.ids, len(self._is_special) - 1)]
        unknown = 0 if self._unknown is None else int(np.count_nonzero(tokens.ids == self._unknown))
        return unknown, len(tokens.ids) - int(np.count_nonzero(special))

    def are_broken(self, tokens: Tokens) -> np.ndarray:
        """Returns a mask of texts that the tokenizer breaks into fragments because it was not made for their language.

        More than half of the tokens of such a text are unknown, a single letter within a word, or a part of a letter
        (of byte-level tokenizers). Special tokens do not count, and nor do texts of fewer than MIN_TOKENS.

        Returns:
            bool [texts].
        """
        if not len(tokens):
            return np.zeros(0, bool)
        is_special = self._is_special[np.minimum(tokens.ids, len(self._is_special) - 1)]
        is_fragment = self._is_fragment[np.minimum(tokens.ids, self._size)] | (tokens.ids == self._unknown)
        fragments = np.add.reduceat(is_fragment & ~is_special, tokens.starts, dtype=np.int64)
        total = np.add.reduceat(~is_special, tokens.starts, dtype=np.int64)
        return (fragments > MAX_FRAGMENT_SHARE * total) & (total >= MIN_TOKENS)

    @functools.cached_property
    def _is_fragment(self) -> np.ndarray:
        """Mask of tokens that are a letter within a word or a part of a letter: bool [size + 1], the last False."""
        vocabulary = self._tokenizer.get_vocab()
        is_byte_level = "ByteLevel" in repr(self._tokenizer.pre_tokenizer)
        # WordPiece has the mark "##"; other vocabularies, for example of GPT-2, may contain "##" as text.
        mark = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        result = np.zeros(self._size + 1, bool)
        for token, id in vocabulary.items():
            if id >= self._size:
                continue
            if mark:
                result[id] = token.startswith(mark) and len(token) == len(mark) + 1 and token[-1].isalpha()
            else:
                text = _decode_bytes(token) if is_byte_level else token
                is_byte = text is None or (text.startswith("<0x") and len(text) == len("<0x00>"))
                result[id] = is_byte or (len(text or "") == 1 and _is_letter_of_words(text or ""))
        return result

    def are_words(self, ids: np.ndarray) -> np.ndarray:
        """Returns a mask of tokens that are neither special nor the unknown token: int [n] -> bool [n]."""
        return ~self._is_special[np.minimum(ids, len(self._is_special) - 1)] & (ids != self._unknown)

    def first_word(self) -> int:
        """Returns the lowest token id that is neither special nor the unknown token."""
        return int(np.flatnonzero(self.are_words(np.arange(self._size)))[0])

    def compose(self, titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy) -> list[str]:
        """Joins titles and texts of passages as the policy says; see `with_titles`."""
        return with_titles(titles, texts, policy, self.separator)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte for each character of a byte-level vocabulary, as GPT-2 defines them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _decode_bytes(token: str) -> str | None:
    """Decodes a byte-level token; None if it holds a part of a letter. Special tokens are returned unchanged."""
    known = _bytes_of_characters()
    if not all(character in known for character in token):
        return token
    try:
        return bytes(known[character] for character in token).decode()
    except UnicodeDecodeError:
        return None


def _is_letter_of_words(character: str) -> bool:
    """Whether a character is a letter of a script that writes words with several letters."""
    return character.isalpha() and ord(character) < FIRST_IDEOGRAPH


def with_titles(titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy, separator: str | None) -> list[str]:
    """Puts titles in front of passages as the policy says; an empty title adds nothing."""
    if policy == "none":
        return list(texts)
    between = {"space": " ", "newline": "\n", "sep": f" {separator} "}[policy]
    return [title + between + text if title else text for title, text in zip(titles, texts, strict=True)]


def _cut_ids(encoding: Encoding, limit: int) -> tuple[list[int], int]:
    """Returns the token ids of a text, cut to a limit, and its token count before the cut."""
    ids = encoding.ids
    for tail in tokens_to_cut(encoding, limit):
        del ids[tail]
    return ids, len(encoding)


@contextlib.contextmanager
def readable_panics(num_texts: int) -> Iterator[None]:
    """Converts a tokenizer's panic to an InputError, for example over a pattern that backtracks without end."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InputError(
            f"the tokenizer fails at one of {num_texts:,} texts: {reason_of(error)}: use a model with another tokenizer"
        ) from error


@contextlib.contextmanager
def _name_invalid_text(texts: Sequence[str]) -> Iterator[None]:
    """Converts the tokenizer's error for an invalid string into an InputError that names the text."""
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        for position, text in enumerate(texts):
            try:
                text.encode("utf-8")
            except (AttributeError, UnicodeEncodeError) as fault:
                raise InputError(f"text {position} of {len(texts)} is no valid string: {fault}") from error
        raise


def plan_padded(lengths: np.ndarray, budget: int, step: int, limit: int | None) -> list[tuple[np.ndarray, int]]:
    """Groups texts into padded batches, sorted by descending length (ties by position).

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


def padded_batches(
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
        is_token = (columns >= first) & (columns < first + lengths[:, None])
        ids = np.full((len(doubled), width), pad_id, np.int64)
        source = starts[doubled][:, None] + columns - first
        ids[is_token] = tokens.ids[source[is_token]]
        yield rows, torch.from_numpy(ids), torch.from_numpy(lengths)


def plan_packed(lengths: np.ndarray, *, min_tokens: int) -> list[np.ndarray]:
    """Groups texts into packed batches, sorted by descending length (ties by position).

    A batch has about PACKED_TOKENS, or half of all tokens if that is less, so that two threads have work.

    Args:
        lengths: Tokens of each text, int64 [n].
        min_tokens: Tokens of a batch at least.

    Returns:
        The row numbers of each batch, int64. A function of the arguments alone.
    """
    order = np.argsort(-lengths, kind="stable")
    total = int(lengths.sum())
    size = min(PACKED_TOKENS, max(min_tokens, -(-total // 2)))
    if 0 < total <= size:
        return [order]
    before = np.cumsum(lengths[order]) - lengths[order]
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(before // size)) + 1) if len(rows)]


def packed_batch(tokens: Tokens, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenates texts without padding: returns ids int64 [total], lengths int64 [rows]."""
    ids = tokens.ids
    if len(tokens) > 1:
        starts = tokens.starts
        ids = np.concatenate([ids[starts[row] : starts[row] + tokens.lengths[row]] for row in rows])
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(tokens.lengths[rows].astype(np.int64))
