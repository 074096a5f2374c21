"""The kinds of trained prompts: which sides have one, how it starts, which texts have which, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.batching import TextTokenizer, Tokens
from riptide.retriever.forward.pooling import PooledBackbone
from riptide.retriever.forward.prompt_rows import PromptAssignment, PromptInputs, PromptRows, PromptShape
from riptide.retriever.model.recipe import Recipe, settings_of
from riptide.retriever.objectives.tune_options import TuneOptions, offsets_of
from riptide.retriever.options import EncoderOptions, Side
from riptide.retriever.options.tuning import Parametrisation
from riptide.retriever.prompts.deep_prompt import DeepPrompt, MatrixPrompt, MlpPrompt
from riptide.retriever.prompts.query_words import NO_WORDS, words_per_text
from riptide.retriever.prompts.synthesis_provider import SynthesisedPrompt
from riptide.retriever.prompts.task_prompt import TaskPrompt, check_initial_prompt, check_prompt_positions
from riptide.retriever.prompts.task_prompts import TaskPrompts
from riptide.retriever.topics.network import TopicPrompts, topic_tokens
from riptide.retriever.topics.saved import SavedTopics
from riptide.retriever.topics.training import TrainingTopics
from riptide.retriever.training.training_data import TrainingData

# Bytes of the prompts of a chunk whose prompts are computed from each query. At 65,536 tokens a chunk may hold 4,096
# queries, whose prompts of 100 tokens take 28 GiB over BERT-base.
_PROMPT_BYTES = 1 << 31
_SIDES = {"tied": ("both",), "untied": ("query", "passage"), "query": ("query",)}


class PromptKind:
    """One prompt for all texts of a side: a matrix. The base of the other kinds.

    Args:
        tuning: Options of the training run.
        tokenizer: The tokenizer of the backbone.
        padding_side: The side on which batches are padded.
        assignment: Which of several prompts a text has; None: this depends on nothing, or on the task of a query.
        tasks: The names of the tasks of the training data.
    """

    provider: type[DeepPrompt] = MatrixPrompt

    def __init__(
        self,
        tuning: TuneOptions,
        tokenizer: TextTokenizer,
        padding_side: str,
        assignment: PromptAssignment | None,
        tasks: Sequence[str],
    ):
        self.tuning, self.tokenizer, self.padding_side = tuning, tokenizer, padding_side
        self.assignment, self.tasks = assignment, tasks

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt: "query", "passage", or "both" if they share it."""
        return _SIDES[self.tuning.sides] if self.tuning.method == "prompt" else ()

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Returns the provider of a side, which continues from `start`.

        Raises:
            InputError: If it cannot start from this prompt.
        """
        tuning = self.tuning
        prompt = self.provider(shape, tuning.length, tuning.prompt_dropout, position_offset=tuning.position_offset)
        if start is not None:
            if start.synthesis is not None:
                raise InputError(
                    "the prompt to begin from is computed from each query: use parametrisation "
                    "synthesised, or another prompt"
                )
            if start.topics is not None:
                raise InputError("the prompt to begin from is one of several of topics: begin from another prompt")
            prompt.start(start.fixed_matrix(side))
        return prompt

    def check_queries(self, texts: Sequence[str], tokens: Tokens) -> None:
        """Raises InputError for a query that can have no prompt; names it."""

    @property
    def needs_words(self) -> bool:
        """Whether a query needs a word, so that `check_queries` must see all of them."""
        return False

    def max_texts_at_once(self, provider: Any) -> int | None:
        """Returns how many texts of a chunk may have prompts at the same time; None: any number."""
        return None

    def rows(self, provider: Any, inputs: PromptInputs) -> tuple[PromptRows, torch.Tensor | None]:
        """Returns the prompts of a chunk, and the weights of each text's basic prompts, float32 [n, N], or None."""
        return provider(inputs), None

    def prompt_numbers_of(
        self, data: TrainingData, queries: np.ndarray, positives: np.ndarray, passages: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns which of several prompts the texts of a batch have.

        Args:
            data: The training data.
            queries: Numbers of queries, int64 [m].
            positives: The row of the positive of each query, int64 [m].
            passages: Rows of passages, int64 [p].

        Returns:
            Numbers of prompts, int64 [m] and int64 [p]; None: all texts of the side have the same prompt.
        """
        if self.assignment is None:
            return None, None
        return self.assignment.of_queries(queries, positives), self.assignment.of_passages[passages]

    def to_task_prompt(self, prompts: Mapping[str, Any], task: TaskPrompt) -> TaskPrompt:
        """Returns a task with the current prompts by side, in the form in which they are saved."""
        matrices = {name: prompt.matrix().cpu() for name, prompt in prompts.items()}
        query, passage = matrices.get("query", matrices.get("both")), matrices.get("passage", matrices.get("both"))
        return replace(task, query=query, passage=passage, position_offset=self.tuning.position_offset)

    def prompts_by_task(self, prompts: Mapping[str, Any], task: TaskPrompt) -> dict[str, TaskPrompt]:
        """Returns the prompts of the tasks by name; empty unless each task has one. `task` is their mean."""
        return {}


class MlpKind(PromptKind):
    """One prompt for all texts of a side, which a network computes."""

    provider = MlpPrompt


class SynthesisedKind(PromptKind):
    """A prompt for each query, computed from its words (HYPER)."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt."""
        return ("query",)

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """See PromptKind."""
        tuning, table = self.tuning, backbone.get_input_embeddings().weight
        assert tuning.synthesis is not None
        are_words = self.tokenizer.are_words(np.arange(len(table)))
        provider = SynthesisedPrompt(
            shape, table, are_words, self.padding_side, tuning.synthesis, tuning.prompt_dropout
        )
        if start is not None:
            provider.continue_from(start)
        return provider

    @property
    def needs_words(self) -> bool:
        """See PromptKind."""
        return True

    def check_queries(self, texts: Sequence[str], tokens: Tokens) -> None:
        """Raises InputError for a query without a word, from which its prompt would be computed; names it."""
        words = words_per_text(tokens, self.tokenizer.are_words)
        if not words.all():
            raise InputError(f"the query {texts[int(np.flatnonzero(words == 0)[0])][:80]!r} {NO_WORDS}")

    def max_texts_at_once(self, provider: SynthesisedPrompt) -> int | None:
        """Returns how many texts have prompts of at most _PROMPT_BYTES."""
        return max(1, _PROMPT_BYTES // provider.bytes_per_query)

    def rows(self, provider: SynthesisedPrompt, inputs: PromptInputs) -> tuple[PromptRows, torch.Tensor | None]:
        """See PromptKind."""
        prompts = provider.synthesise(inputs)
        return prompts.rows, prompts.weights

    def to_task_prompt(self, prompts: Mapping[str, Any], task: TaskPrompt) -> TaskPrompt:
        """See PromptKind."""
        return replace(task, synthesis=prompts["query"].saved_form())


class TaskKind(PromptKind):
    """A prompt for each task of the queries; all are computed by one network."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt."""
        return ("query",)

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """See PromptKind."""
        options, width = self.tuning.synthesis, backbone.get_input_embeddings().weight.shape[1]
        assert options is not None
        if start is not None:
            raise InputError("parametrisation per-task cannot start from an initial prompt: use embedding")
        if len(self.tasks) != options.prompts:
            raise InputError(
                f"parametrisation per-task: {options.prompts} prompts for {len(self.tasks)} "
                f"tasks ({', '.join(self.tasks)}): expected a prompt for each"
            )
        return TaskPrompts(shape, width, self.tasks, options, self.tuning.prompt_dropout)

    def prompt_numbers_of(
        self, data: TrainingData, queries: np.ndarray, positives: np.ndarray, passages: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """See PromptKind."""
        return data.task_numbers_of(queries), None

    def prompts_by_task(self, prompts: Mapping[str, Any], task: TaskPrompt) -> dict[str, TaskPrompt]:
        """See PromptKind."""
        matrices = prompts["query"].matrices()
        return {name: replace(task, query=matrix.cpu()) for name, matrix in matrices.items()}


class TopicKind(PromptKind):
    """A prompt for each topic, made from its words by one network (Topic-DPR)."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt."""
        return ("both",)

    @property
    def topics(self) -> TrainingTopics:
        """The topics of the training data."""
        assert isinstance(self.assignment, TrainingTopics)
        return self.assignment

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """See PromptKind."""
        tuning = self.tuning
        assert tuning.topics is not None
        if start is not None:
            raise InputError("parametrisation topics cannot start from an initial prompt: use embedding")
        return TopicPrompts(
            shape,
            backbone.get_input_embeddings().weight,
            topic_tokens(self.tokenizer, self.topics.model.words, tuning.length),
            tuning.topics.hidden,
            tuning.prompt_dropout,
            position_offset=tuning.position_offset,
        )

    def to_task_prompt(self, prompts: Mapping[str, Any], task: TaskPrompt) -> TaskPrompt:
        """See PromptKind."""
        saved = SavedTopics(self.topics.model, prompts["both"].matrices().cpu(), self.topics.wordless)
        return replace(task, position_offset=self.tuning.position_offset, topics=saved)


KINDS: dict[Parametrisation, type[PromptKind]] = {
    "embedding": PromptKind,
    "mlp": MlpKind,
    "synthesised": SynthesisedKind,
    "per-task": TaskKind,
    "topics": TopicKind,
}


def open_kind(
    tuning: TuneOptions,
    tokenizer: TextTokenizer,
    padding_side: str,
    assignment: PromptAssignment | None,
    data: TrainingData | None,
) -> PromptKind:
    """Returns the kind of the prompts of a training run.

    Raises:
        InputError: If the topics of texts are missing, or given for another kind.
    """
    if (assignment is None) != (tuning.parametrisation != "topics"):
        raise InputError(
            "parametrisation topics: expected the topics of queries and passages (topics), and for "
            "other parametrisations none"
        )
    tasks = () if data is None else data.task_names()
    return KINDS[tuning.parametrisation](tuning, tokenizer, padding_side, assignment, tasks)


def open_prompts(
    kind: PromptKind, pooled: PooledBackbone, recipe: Recipe, encoder: EncoderOptions, start: TaskPrompt | None
) -> nn.ModuleDict:
    """Returns the providers of the prompts by the names of their sides.

    Args:
        kind: The kind of the prompts.
        pooled: The backbone with its pooling.
        recipe: How text becomes a vector.
        encoder: Options of the encoder.
        start: The prompt to begin from.

    Raises:
        InputError: If the backbone cannot use the prompts, or if they cannot start from `start`.
    """
    prompts = nn.ModuleDict()
    if not (names := kind.prompted_sides()):
        return prompts
    shape = enable_prompts(pooled.backbone)
    if kind.tuning.position_offset:
        pooled.check_offsets()
        check_prompt_positions(recipe, offsets_of(kind.tuning))
    if start is not None:
        check_initial_prompt(start, settings_of(recipe, encoder), shape)
    for name in names:
        side: Side = "passage" if name == "passage" else "query"
        prompts[name] = kind.open(shape, pooled.backbone, side, start)
    return prompts
