"""Counts the words of texts and pools their embeddings, from which prompts are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from riptide.base.errors import TextsError
from riptide.retriever.forward.batching import Tokens


class WordPooling:
    """Finds the words of texts, and computes the element-wise maximum of their embeddings.

    Words are the tokens that the tokenizer makes of the text and of the prefix in front of it: neither special ones,
    such as the first and the last token, nor the one for unknown characters, which are the same in many texts.

    Args:
        table: The embeddings of a backbone, [vocabulary, d].
        are_words: Returns whether tokens are words: int [n] -> bool [n].
    """

    def __init__(self, table: torch.Tensor, are_words: Callable[[np.ndarray], np.ndarray]):
        self._table, self._are_words = table, are_words

    def count_words(self, tokens: Tokens) -> np.ndarray:
        """Returns the number of words of each text, int64 [texts]."""
        return words_per_text(tokens, self._are_words)

    def max_embeddings(self, tokens: Tokens, texts: np.ndarray) -> torch.Tensor:
        """Returns the element-wise maximum of the word embeddings of each text: float32 [n, d].

        Args:
            tokens: The tokens of some texts.
            texts: The texts that are wanted, int64 [n]; each has a word.
        """
        starts = tokens.starts
        ids = [tokens.ids[starts[text] : starts[text] + tokens.lengths[text]] for text in texts]
        words = [row[self._are_words(row)] for row in ids]
        lengths = torch.tensor([len(row) for row in words], device=self._table.device)
        flat = torch.from_numpy(np.concatenate(words).astype(np.int64)).to(self._table.device)
        return torch.segment_reduce(self._table[flat].float(), "max", lengths=lengths, axis=0)


def words_per_text(tokens: Tokens, are_words: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the number of words of each text, int64 [texts].

    Args:
        tokens: The tokens of the texts, at least one of each text.
        are_words: Returns whether tokens are words: int [n] -> bool [n].
    """
    if not len(tokens):
        return np.zeros(0, np.int64)
    counts: np.ndarray = np.add.reduceat(are_words(tokens.ids).astype(np.int64), tokens.starts)
    return counts


NO_WORDS = (
    "has no word that the backbone knows, from which its prompt could be computed: use words of the backbone's language"
)


def unusable_texts_error(reasons: Mapping[int, str], num_texts: int) -> TextsError:
    """Returns the error for texts whose prompts cannot be determined.

    Args:
        reasons: What each of them lacks, by the number of the text; at least one.
        num_texts: The number of all texts.
    """
    first, reason = next(iter(sorted(reasons.items())))
    return TextsError(
        f"text {first} of {num_texts} {reason}", {text: f"the text {why}" for text, why in reasons.items()}
    )
