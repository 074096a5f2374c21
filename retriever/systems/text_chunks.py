"""Splits the texts of a batch into chunks; the texts of a chunk go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from riptide.retriever.forward.batching import (
    BATCH_TOKENS,
    COLUMN_STEP,
    TextTokenizer,
    Tokens,
    padded_batches,
    plan_padded,
)
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.options import PLURALS, Side
from riptide.retriever.systems.prompt_kinds import PromptKind
from riptide.retriever.training.system import BatchChunk

_QUERIES = 4096  # queries tokenised at a time in `check_queries`


class TextChunks:
    """Tokenises texts and splits them into chunks for the forward pass.

    Args:
        recipe: How text becomes a vector.
        tokenizer: The tokenizer of the backbone.
        kind: The kind of the prompts.
        device: The device of the model.
    """

    def __init__(self, recipe: Recipe, tokenizer: TextTokenizer, kind: PromptKind, device: torch.device):
        self.recipe, self.tokenizer, self.kind, self.device = recipe, tokenizer, kind, device

    def make(
        self,
        texts: Sequence[str],
        side: Side,
        rows: np.ndarray,
        outputs: Sequence[str],
        prompt_numbers: np.ndarray | None = None,
        provider: Any = None,
        is_counted: bool = True,
    ) -> list[BatchChunk]:
        """Splits texts into chunks of texts with similar lengths.

        Args:
            texts: The texts.
            side: Their side.
            rows: Their positions in the outputs, int64 [n].
            outputs: The outputs of the batch in which each text has a row.
            prompt_numbers: Which of several prompts each has, int64 [n]; None: they have the same one.
            provider: The provider of their prompts, whose memory bounds the texts of a chunk; None: they have none.
            is_counted: Count the texts that are cut to the length limit.

        Raises:
            InputError: If a query can have no prompt.
        """
        if not len(texts):
            return []
        tokens: Tokens = self.tokenizer(texts, side=side)
        if side == "query":
            self.kind.check_queries(texts, tokens)
        planned = plan_padded(tokens.lengths, BATCH_TOKENS[self.device.type], COLUMN_STEP, self.recipe.max_positions)
        max_texts = None if provider is None else self.kind.max_texts_at_once(provider)
        batches = [(some, width) for text_rows, width in planned for some in _cut(text_rows, max_texts)]
        chunks = []
        for text_rows, ids, lengths in padded_batches(
            tokens, batches, side=self.recipe.padding_side, pad_id=self.tokenizer.pad_id
        ):
            # A single text is repeated in `ids`, so its prompt number is repeated too.
            of_ids = (
                () if prompt_numbers is None else (torch.from_numpy(np.resize(prompt_numbers[text_rows], len(ids))),)
            )
            cuts = {PLURALS[side]: tokens.count_cuts(text_rows)} if is_counted else {}
            inputs = (side, ids, lengths, *of_ids)
            chunks.append(BatchChunk(dict.fromkeys(outputs, rows[text_rows]), inputs, ids.numel(), cuts))
        return chunks

    def check_queries(self, texts: Sequence[str]) -> None:
        """Raises InputError that names a query for which no prompt is possible."""
        if self.kind.needs_words:
            for first in range(0, len(texts), _QUERIES):
                some = texts[first : first + _QUERIES]
                self.kind.check_queries(some, self.tokenizer(some, side="query"))


def _cut(texts: np.ndarray, max_texts: int | None) -> list[np.ndarray]:
    """Splits the text numbers of a chunk into pieces of at most `max_texts`; None: a single piece."""
    return (
        [texts]
        if max_texts is None
        else [texts[start : start + max_texts] for start in range(0, len(texts), max_texts)]
    )
