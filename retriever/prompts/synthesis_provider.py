"""The synthesiser in training, which computes the prompts of a batch of queries in the forward pass."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.retriever.forward.prompt_rows import PromptInputs, PromptRows, PromptShape
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.synthesiser import Synthesiser, SynthesisResult, max_embedding
from riptide.retriever.prompts.task_prompt import TaskPrompt


class SynthesisedPrompt(nn.Module):
    """A PromptProvider that computes the prompt of each query from its words.

    Its parameters are those of the synthesiser. With attention "uniform" the layers that compute weights are frozen,
    since no prompt depends on them.

    Args:
        shape: The shape of the backbone's keys and values.
        table: The backbone's word embeddings [vocabulary, d], which get no gradients from here.
        are_words: Whether tokens are words, bool [vocabulary]; see `TextTokenizer.are_words`.
        padding_side: The side on which a batch is padded.
        options: Numbers, lengths and sizes.
        dropout: Fraction of a prompt's numbers that are dropped out in training, with a separate mask for each query.
    """

    def __init__(
        self,
        shape: PromptShape,
        table: torch.Tensor,
        are_words: np.ndarray,
        padding_side: str,
        options: SynthesisOptions,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.synthesiser = Synthesiser(shape, table.shape[1], options)
        if options.attention == "uniform":
            for layer in (self.synthesiser.adapter, self.synthesiser.norm):
                layer.requires_grad_(False)
        # A tuple hides the table from nn.Module, so that it does not become a parameter of this module.
        self._table = (table,)
        self.register_buffer("_are_words", torch.from_numpy(are_words), persistent=False)
        self._pads_left, self.dropout = padding_side == "left", dropout

    @property
    def bytes_per_query(self) -> int:
        """Size in bytes of a query's prompt in float32."""
        return 4 * self.synthesiser.options.length * self.synthesiser.up.out_features

    def forward(self, inputs: PromptInputs) -> PromptRows:
        """Computes the prompts of queries; see PromptProvider."""
        return self.synthesise(inputs).rows

    def synthesise(self, inputs: PromptInputs) -> SynthesisResult:
        """Computes the prompts of queries and the weights of the basic prompts. Every query must have a word."""
        ids, lengths, _ = inputs
        [table] = self._table
        columns = torch.arange(ids.shape[1], device=ids.device)
        first = (ids.shape[1] - lengths if self._pads_left else torch.zeros_like(lengths))[:, None]
        is_token = (columns >= first) & (columns < first + lengths[:, None])
        are_words: torch.Tensor = self.get_buffer("_are_words")
        prompts = self.synthesiser(max_embedding(table[ids], is_token & are_words[ids]))
        return prompts._replace(rows=prompts.rows._replace(dropout=self.dropout if self.training else 0.0))

    def continue_from(self, prompt: TaskPrompt) -> None:
        """Loads the trained synthesiser of a task, to continue its training.

        Raises:
            InputError: If the task has none, or one with other options or of word embeddings of another width.
        """
        saved, options = prompt.synthesis, self.synthesiser.options
        if saved is None:
            raise InputError(
                "the prompt to begin from is the same for all queries, expected one that is computed from "
                "each query: use parametrisation embedding"
            )
        expected = asdict(options)
        if differ := [
            f"{name}={value} (here {expected[name]})"
            for name, value in saved.settings().items()
            if value != expected[name]
        ]:
            raise InputError(f"the prompts of queries to begin from have {', '.join(differ)}: use their options")
        if saved.width != self.synthesiser.basic.shape[2]:
            raise InputError(
                f"the prompts of queries to begin from are of word embeddings of {saved.width} numbers, "
                f"expected {self.synthesiser.basic.shape[2]} as the backbone's have"
            )
        self.synthesiser.load_state_dict(dict(saved.tensors))

    def saved_form(self) -> SavedSynthesis:
        """Returns the synthesiser in its saved form."""
        return SavedSynthesis.from_module(self.synthesiser)
