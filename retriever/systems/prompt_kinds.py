"""The kinds of trained prompts: their sides, initialisation, assignment to texts, and saved form."""

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

# Maximum bytes of a chunk's prompts when they are computed per query. At 65,536 tokens a chunk may hold 4,096
# queries, whose prompts of 100 tokens would take 28 GiB over BERT-base.
_PROMPT_BYTES = 1 << 31
_SIDES = {"tied": ("both",), "untied": ("query", "passage"), "query": ("query",)}


class PromptKind:
    """One matrix prompt for all texts of a side; the base of the other kinds.

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
        """Returns the sides that have a prompt: "query", "passage", or "both" for a shared prompt."""
        has_prompt = self.tuning.method == "prompt" or self.tuning.joint_prompt
        return _SIDES[self.tuning.sides] if has_prompt else ()

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Builds the prompt provider of a side, initialised from `start` if given.

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
        """Raises InputError that names a query for which no prompt is possible."""

    @property
    def needs_words(self) -> bool:
        """Whether each query needs a word, so that `check_queries` must read all queries."""
        return False

    def max_texts_at_once(self, provider: Any) -> int | None:
        """Returns how many texts of a chunk may have prompts in memory at once; None: any number."""
        return None

    def rows(self, provider: Any, inputs: PromptInputs) -> tuple[PromptRows, torch.Tensor | None]:
        """Returns a chunk's prompts, and the basic-prompt weights of each text, float32 [n, N]; None if it has none."""
        return provider(inputs), None

    def prompt_numbers_of(
        self, data: TrainingData, queries: np.ndarray, positives: np.ndarray, passages: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns the prompt number of each query and of each passage of a batch.

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
        """Returns `task` with the current prompts of its sides in their saved form."""
        matrices = {name: prompt.matrix().cpu() for name, prompt in prompts.items()}
        query, passage = matrices.get("query", matrices.get("both")), matrices.get("passage", matrices.get("both"))
        return replace(task, query=query, passage=passage, position_offset=self.tuning.position_offset)

    def prompts_by_task(self, prompts: Mapping[str, Any], task: TaskPrompt) -> dict[str, TaskPrompt]:
        """Returns each task's prompt by name; empty unless every task has a prompt. `task` has their mean."""
        return {}


class MlpKind(PromptKind):
    """One prompt for all texts of a side, computed by a network."""

    provider = MlpPrompt


class SynthesisedKind(PromptKind):
    """One prompt per query, computed from the query's words (HYPER)."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt: queries only."""
        return ("query",)

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Builds the synthesiser of query prompts, which continues from `start` if given."""
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
        """Returns True: prompts are computed from words."""
        return True

    def check_queries(self, texts: Sequence[str], tokens: Tokens) -> None:
        """Raises InputError that names a query without a word, from which its prompt would be computed."""
        words = words_per_text(tokens, self.tokenizer.are_words)
        if not words.all():
            raise InputError(f"the query {texts[int(np.flatnonzero(words == 0)[0])][:80]!r} {NO_WORDS}")

    def max_texts_at_once(self, provider: SynthesisedPrompt) -> int | None:
        """Returns how many texts have prompts of at most _PROMPT_BYTES in total."""
        return max(1, _PROMPT_BYTES // provider.bytes_per_query)

    def rows(self, provider: SynthesisedPrompt, inputs: PromptInputs) -> tuple[PromptRows, torch.Tensor | None]:
        """Computes the prompts of a chunk's queries and the weights of the basic prompts."""
        prompts = provider.synthesise(inputs)
        return prompts.rows, prompts.weights

    def to_task_prompt(self, prompts: Mapping[str, Any], task: TaskPrompt) -> TaskPrompt:
        """Returns `task` with the synthesiser in its saved form."""
        return replace(task, synthesis=prompts["query"].saved_form())


class TaskKind(PromptKind):
    """One prompt per task of the queries; one network computes all of them."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns the sides that have a prompt: queries only."""
        return ("query",)

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Builds the prompts of all tasks; raises InputError if `start` is given."""
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
        """Returns the task numbers of queries, which are their prompt numbers; None for passages."""
        return data.task_numbers_of(queries), None

    def prompts_by_task(self, prompts: Mapping[str, Any], task: TaskPrompt) -> dict[str, TaskPrompt]:
        """Returns each task's prompt by name, in its saved form."""
        matrices = prompts["query"].matrices()
        return {name: replace(task, query=matrix.cpu()) for name, matrix in matrices.items()}


class TopicKind(PromptKind):
    """One prompt per topic, computed from the topic's words by one network (Topic-DPR)."""

    def prompted_sides(self) -> tuple[str, ...]:
        """Returns "both": queries and passages share the prompts."""
        return ("both",)

    @property
    def topics(self) -> TrainingTopics:
        """The topics of the training data."""
        assert isinstance(self.assignment, TrainingTopics)
        return self.assignment

    def open(self, shape: PromptShape, backbone: Any, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Builds the network that computes topic prompts; raises InputError if `start` is given."""
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
        """Returns `task` with the topic prompts in their saved form."""
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
    """Returns the prompt kind of a training run.

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
    """Builds the prompt providers of all prompted sides, by side name.

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
