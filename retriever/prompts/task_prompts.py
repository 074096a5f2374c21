"""One prompt per task, computed by a shared prefix encoder: a baseline for per-query prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from riptide.retriever.forward.prompt_rows import PromptInputs, PromptRows, PromptShape, separate_prompt_rows
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.synthesiser import Synthesiser


class TaskPrompts(nn.Module):
    """A PromptProvider that gives a query the prompt of its task, or the mean of all prompts if the task is unknown.

    It is a synthesiser with a basic prompt for each task, which the prefix encoder reads. Nothing is computed from the
    words of a query, so the layers that would do so are frozen.

    Args:
        shape: The shape of the backbone's keys and values.
        width: Length of the embedding of a token of a basic prompt.
        tasks: The names of the tasks.
        options: The length of the prompts, and the size of the prefix encoder; `prompts` is the number of tasks.
        dropout: Fraction of a prompt's numbers that are dropped out in training, with a separate mask for each query.
    """

    def __init__(
        self, shape: PromptShape, width: int, tasks: Sequence[str], options: SynthesisOptions, dropout: float = 0.0
    ):
        super().__init__()
        self.tasks, self.dropout = tuple(tasks), dropout
        self.synthesiser = Synthesiser(shape, width, options)
        for layer in (self.synthesiser.adapter, self.synthesiser.norm):
            layer.requires_grad_(False)

    def forward(self, inputs: PromptInputs) -> PromptRows:
        """Returns the prompts of queries by task; see PromptProvider."""
        prompts = self.synthesiser.encode_basic_prompts()
        if inputs.tasks is None:
            prompts = prompts.mean(0, keepdim=True)
        rows = separate_prompt_rows(prompts, self.synthesiser.shape)
        return rows._replace(rows=inputs.tasks, dropout=self.dropout if self.training else 0.0)

    @torch.no_grad()
    def matrices(self) -> dict[str, torch.Tensor]:
        """Returns each task's prompt in its saved form: float32 [layers, 2, heads, l, head_dim]."""
        table = separate_prompt_rows(self.synthesiser.encode_basic_prompts(), self.synthesiser.shape).table.float()
        return {task: table[:, :, number].contiguous() for number, task in enumerate(self.tasks)}

    def matrix(self) -> torch.Tensor:
        """Returns the mean of all tasks' prompts in its saved form."""
        return torch.stack([*self.matrices().values()]).mean(0)
