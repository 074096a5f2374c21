"""Texts to token ids, and token ids to padded batches whose make-up depends on the texts alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from retriever.errors import InputError
from retriever.options import EncoderOptions, Side, TitlePolicy
from retriever.recipe import Recipe


@dataclass(frozen=True)
class Tokens:
    """Token ids of some texts, end to end: ids int32 [total], lengths int64 [texts]."""

    ids: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """Where each text begins in `ids`: int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths


class TextTokenizer:
    """A model's fast tokenizer with one copy per side, so that sides of different lengths run at the same time."""

    def __init__(self, recipe: Recipe, options: EncoderOptions, *, trust_remote_code: bool = False):
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(
            recipe.backbone, trust_remote_code=trust_remote_code, **recipe.tokenizer_args
        )
        if not getattr(slow, "is_fast", False):
            raise InputError(
                f"{recipe.backbone}: {type(slow).__name__} is no fast tokenizer: save one (tokenizer.json)"
            )
        self.separator: str | None = slow.sep_token or slow.eos_token
        self.pad_id = int(slow.pad_token_id if slow.pad_token_id is not None else slow.eos_token_id or 0)
        base: Tokenizer = slow.backend_tokenizer
        base.no_padding()
        base.no_truncation()
        if recipe.lower_case and "Lowercase" not in repr(base.normalizer):
            base.normalizer = Normalizers([Lowercase(), *([base.normalizer] if base.normalizer else [])])
        self.eos: int | None = None
        if options.append_eos:
            if slow.eos_token_id is None:
                raise InputError(f"append_eos: the tokenizer in {recipe.backbone} has no end-of-sequence token")
            if base.encode("a").ids[-1:] != [slow.eos_token_id]:
                self.eos = int(slow.eos_token_id)
        self._sides: dict[Side, tuple[Tokenizer, str]] = {}
        for side, prefix, length in (
            ("query", recipe.query_prefix, recipe.query_length),
            ("passage", recipe.passage_prefix, recipe.passage_length),
        ):
            special = base.num_special_tokens_to_add(False) + (self.eos is not None)
            if length <= special:
                raise InputError(f"{side}_length={length} leaves no room beside {special} special tokens")
            copy = Tokenizer.from_str(base.to_str())
            copy.enable_truncation(length - (self.eos is not None))
            self._sides[side] = (copy, prefix)  # type: ignore[index]

    def __call__(self, texts: Sequence[str], *, side: Side) -> Tokens:
        """Token ids with special tokens, cut to the side's length; the tokenizer's own threads share the work.

        Raises InputError that names the position of a text which is no valid string.
        """
        tokenizer, prefix = self._sides[side]
        if prefix:
            texts = [prefix + text for text in texts]
        try:
            rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
        except (TypeError, UnicodeEncodeError) as error:
            for position, text in enumerate(texts):
                try:
                    text.encode("utf-8")
                except (AttributeError, UnicodeEncodeError) as fault:
                    raise InputError(f"text {position} of {len(texts)} is no valid string: {fault}") from error
            raise
        if self.eos is not None:
            for row in rows:
                row.append(self.eos)
        for row in rows:
            if not row:  # a tokenizer without special tokens makes nothing of an empty text
                row.append(self.pad_id)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.empty(int(lengths.sum()), np.int32)
        start = 0
        for row in rows:
            ids[start : start + len(row)] = row
            start += len(row)
        return Tokens(ids, lengths)

    def compose(self, titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy) -> list[str]:
        """Passages' strings by the title policy; an empty title adds nothing."""
        if policy == "none":
            return list(texts)
        between = {"space": " ", "newline": "\n", "sep": f" {self.separator} "}[policy]
        return [title + between + text if title else text for title, text in zip(titles, texts, strict=True)]


def plan(lengths: np.ndarray, budget: int, step: int, limit: int | None) -> list[tuple[np.ndarray, int]]:
    """(rows, width) of each batch: sorted by length (ties by position), longest first, at most `budget` tokens.

    lengths int64 [n] -> arrays of row numbers int64, each row in exactly one, and the columns that hold them: a
    multiple of `step` of at least 2, but never more than `limit`. A function of the lengths alone.
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
    """Batches of a plan as (rows, ids int64 [batch, width], lengths int64 [batch]), filled up on `side`.

    A single row comes twice: compiled code would treat a batch of one as a case of its own.
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
    """Rows of each batch without padding, int64: sorted by length (ties by position), longest first.

    lengths int64 [n]. A batch has about `most` tokens, or half of all where that is less, so that two threads have
    work, but `least` at least. A function of the lengths, and of these, alone.
    """
    order = np.argsort(-lengths, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    size = min(most, max(least, -(-int(lengths.sum()) // 2)))
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(before // size)) + 1) if len(rows)]


def end_to_end(tokens: Tokens, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Some texts without padding: ids int64 [total], lengths int64 [rows]."""
    starts = tokens.starts
    ids = np.concatenate([tokens.ids[starts[row] : starts[row] + tokens.lengths[row]] for row in rows])
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(tokens.lengths[rows].astype(np.int64))
