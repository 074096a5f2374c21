"""The network that computes the prompt of a topic from the topic's words (Topic-DPR, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.retriever.forward.batching import TextTokenizer
from riptide.retriever.forward.prompt_rows import PromptInputs, PromptRows, PromptShape, separate_prompt_rows


class TopicPrompts(nn.Module):
    """A PromptProvider that gives each text, query or passage, the prompt of its topic.

    With e_k the frozen word embeddings of the words of topic k, [l, d], the prompt is M V_k, where
    V_k = e_k + W2 GELU(W1 e_k). M maps each row of V_k to the keys and values of all layers (P-tuning v2). All topics
    share M, W1 and W2. No layer has a bias.

    Args:
        shape: The shape of the backbone's keys and values.
        table: The backbone's word embeddings [vocabulary, d], which get no gradients from here.
        tokens: The tokens of each topic, int64 [K, l]; see `topic_tokens`.
        hidden: Size of the hidden layer.
        dropout: Fraction of a prompt's numbers that are dropped out in training, with a separate mask for each text.
        position_offset: The positions of a text start after the prompt.
    """

    def __init__(
        self,
        shape: PromptShape,
        table: torch.Tensor,
        tokens: np.ndarray,
        hidden: int,
        dropout: float = 0.0,
        *,
        position_offset: bool = False,
    ):
        super().__init__()
        self.shape, self.dropout, self.position_offset = shape, dropout, position_offset
        self.register_buffer("embeddings", table.detach()[torch.from_numpy(tokens)].float(), persistent=False)
        width = table.shape[1]
        self.residual = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
        )
        self.out = nn.Linear(width, 2 * shape.layers * shape.heads * shape.head_dim, bias=False)

    @property
    def num_topics(self) -> int:
        """The number of topics, K."""
        return len(self._embeddings)

    @property
    def length(self) -> int:
        """The number of tokens of each prompt."""
        return self._embeddings.shape[1]

    def keys_and_values(self, topics: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the keys and values of topic prompts, [n, l, layers * 2 * heads * head_dim].

        Args:
            topics: The topics, int64 [n]; None: all.
        """
        words = self._embeddings if topics is None else self._embeddings[topics]
        keys_and_values: torch.Tensor = self.out(words + self.residual(words))
        return keys_and_values

    def forward(self, inputs: PromptInputs) -> PromptRows:
        """Returns the prompts of texts whose topics are `inputs.tasks`; see PromptProvider."""
        if inputs.tasks is None:
            raise ValueError("tasks: expected the topic of each text")
        present, rows = torch.unique(inputs.tasks, return_inverse=True)
        prompts = separate_prompt_rows(self.keys_and_values(present), self.shape)
        position_offsets = inputs.lengths.new_full((len(rows),), self.length) if self.position_offset else None
        return prompts._replace(
            rows=rows, position_offsets=position_offsets, dropout=self.dropout if self.training else 0.0
        )

    @torch.no_grad()
    def matrices(self) -> torch.Tensor:
        """Returns all topic prompts in their saved form: float32 [K, layers, 2, heads, l, head_dim]."""
        return (
            separate_prompt_rows(self.keys_and_values(), self.shape)
            .table.float()
            .permute(2, 0, 1, 3, 4, 5)
            .contiguous()
        )

    @property
    def _embeddings(self) -> torch.Tensor:
        return self.get_buffer("embeddings")


def topic_tokens(tokenizer: TextTokenizer, words: Sequence[Sequence[str]], length: int) -> np.ndarray:
    """Returns the token ids of each topic's words, most probable words first: int64 [K, length].

    Topics of more tokens are cut, and those of fewer ones are filled up with the padding token, so that the prompts of
    all topics have one length.

    Args:
        tokenizer: The tokenizer of the backbone.
        words: The words of each topic.
        length: Tokens of a topic.

    Raises:
        InputError: If the backbone knows no word of a topic.
    """
    result = np.full((len(words), length), tokenizer.pad_id, np.int64)
    for topic, own in enumerate(words):
        # Tokenizers that mark word starts by a preceding space do so for the first word only if a space precedes it.
        ids = tokenizer([f" {word}" for word in own], side="query", prefix="").ids
        known = ids[tokenizer.are_words(ids)][:length]
        if not len(known):
            raise InputError(
                f"topic {topic} ({', '.join(own[:3])}, ...) has no word that the backbone knows: use a backbone of the "
                "corpus's language"
            )
        result[topic, : len(known)] = known
    return result
