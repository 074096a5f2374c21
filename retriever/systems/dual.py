"""Trains the dual encoder (DPTDR, Eq. 1 and 3): deep prompts or a LoRA adapter of a frozen backbone, or all weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.forward.batching import TextTokenizer
from riptide.retriever.forward.prompt_rows import PromptAssignment, PromptInputs, PromptProvider
from riptide.retriever.model.model_folder import BackboneFiles
from riptide.retriever.model.recipe import read_recipe, settings_of
from riptide.retriever.objectives.learned_temperature import LearnedTemperature
from riptide.retriever.objectives.loss_term import BATCH_VECTORS, EncodedChunk, StepBatch
from riptide.retriever.objectives.pair_losses import TEMPERATURE_LR
from riptide.retriever.objectives.terms import TERMS
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import SIDES, EncoderOptions, Side
from riptide.retriever.options.tuning import PROMPT_LR
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.systems.encoders import Encoders, trained_recipe
from riptide.retriever.systems.prompt_kinds import open_kind, open_prompts
from riptide.retriever.systems.text_chunks import TextChunks
from riptide.retriever.training.dev_workers import share_items
from riptide.retriever.training.parameter_groups import ParameterGroup
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput
from riptide.retriever.training.training_data import TrainingData, batch_at

COSINE_TEMPERATURE = 0.05  # as for cosine losses in sentence-transformers and SimCSE; inner products use 1 (DPTDR)
PROMPT = "prompt"  # sub-folder with the prompts that are trained together with the backbone
TASKS = "tasks"  # sub-folder with one prompt per task


class DualEncoderSystem:
    """A System: one backbone for both sides or one for each, with or without prompts, its data and its loss.

    It is composed of `Encoders`, of a kind of prompts (`riptide.retriever.systems.prompt_kinds`), and of the terms of
    the loss (`riptide.retriever.objectives`). With dtype bfloat16, a frozen backbone is stored in bfloat16, and the
    adapter of LoRA in float32; a trained backbone is stored in float32 and computes under autocast.

    Args:
        folder: Folder of the backbone.
        encoder: How text becomes a vector.
        tuning: Options of the trained weights and the batches.
        data: The training data; None if the system is not trained.
        device: The device of the model.
        dtype: The dtype of the forward and backward pass.
        checkpointing: Use activation checkpointing.
        start: Initial prompts.
        vectors: Returns the stored vectors of passages, int64 [n] -> float16 [n, dim]; passages are then never encoded.
            None: the model encodes them. Needed for training with sides "query".
        assignment: Says which of several prompts a text has: needed for such prompts, also without training data.

    Raises:
        InputError: If the backbone or the initial prompt cannot be used, if stored vectors or the assignment are
            missing, or if a training query has no word from which its prompt could be computed.
    """

    module: nn.Module

    def __init__(
        self,
        folder: Path,
        encoder: EncoderOptions,
        tuning: TuneOptions,
        data: TrainingData | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        checkpointing: bool = False,
        start: TaskPrompt | None = None,
        vectors: Callable[[np.ndarray], np.ndarray] | None = None,
        assignment: PromptAssignment | None = None,
    ):
        if tuning.sides == "query" and data is not None and vectors is None:
            raise InputError(
                f"{Parameter('sides', 'query')}: expected stored vectors of the passages, which are not trained"
            )
        torch.manual_seed(tuning.seed)
        self.tuning, self.data, self.device, self.dtype = tuning, data, device, dtype
        self.encoder, self.vectors = encoder, vectors
        self.recipe = recipe = trained_recipe(folder, encoder, tuning)
        self._files = BackboneFiles(recipe.backbone)
        for term in TERMS:
            term.check(recipe, tuning)
        self.tokenizer = TextTokenizer(recipe, encoder)
        self.kind = open_kind(tuning, self.tokenizer, recipe.padding_side, assignment, data)
        self._chunks = TextChunks(recipe, self.tokenizer, self.kind, device)
        if data is not None:
            self.check_queries(data.queries)
        self.autocast = tuning.method == "finetune" and dtype == torch.bfloat16
        self._encoders = Encoders(recipe, encoder, tuning, device=device, dtype=dtype, checkpointing=checkpointing)
        self._files.check()
        self.encoders = self._encoders.by_side
        self.pooled, self.head = self.encoders["query"]
        self.prompts = open_prompts(self.kind, self.pooled, recipe, encoder, start).to(device)
        self.module = nn.ModuleDict({"backbone": self.pooled, "head": self.head, "prompts": self.prompts})
        if self.encoders.get("passage", self.encoders["query"]) is not self.encoders["query"]:
            backbone, head = self.encoders["passage"]
            self.module["passage"] = nn.ModuleDict({"backbone": backbone, "head": head})
        self.temperature = tuning.temperature or (COSINE_TEMPERATURE if self.head.normalized else 1.0)
        self.learned = LearnedTemperature(self.temperature).to(device) if tuning.learn_temperature else None
        if self.learned is not None:
            self.module["temperature"] = self.learned
        self.terms = [term(self) for term in TERMS if term.is_used(tuning)]

    def parameter_groups(self) -> list[ParameterGroup]:
        """Returns the parameter groups of a learned temperature, and of prompts that are trained with the backbone.

        Both have AdamW with their own learning rate and without weight decay.
        """
        rates: list[tuple[nn.Module, float]] = []
        if self.learned is not None:
            lr = TEMPERATURE_LR if self.tuning.temperature_lr is None else self.tuning.temperature_lr
            rates.append((self.learned, lr))
        if self.tuning.method == "finetune" and len(self.prompts):
            rates.append((self.prompts, PROMPT_LR))
        return [
            ParameterGroup(parameters=module.parameters(), lr=lr, weight_decay=0.0, optimizer="adamw")
            for module, lr in rates
        ]

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns a worker's share of a step: every world-th query and every world-th distinct passage of the batch."""
        assert self.data is not None
        data, options = self.data, self.tuning
        queries, rows = batch_at(
            data, options, step, draw_positive=options.draw_positive, draw_negatives=options.draw_negatives
        )
        passages, places = np.unique(rows, return_inverse=True)
        draft = StepBatch(step, queries, rows, passages, places.reshape(rows.shape), rank, world)
        of_queries, of_passages = self.kind.prompt_numbers_of(data, queries, passages[draft.positives], passages)
        texts = [data.queries[query] for query in queries[rank::world]]
        places_of_queries = np.arange(rank, len(queries), world)
        places_of_passages = len(queries) + np.arange(rank, len(passages), world)
        draft.chunks += self.chunks(texts, "query", places_of_queries, _share(of_queries, rank, world))
        of_passages = _share(of_passages, rank, world)
        draft.chunks += self._passage_chunks(passages[rank::world], places_of_passages, of_passages)
        draft.outputs[BATCH_VECTORS] = BatchOutput(self.dim, len(queries) + len(passages))
        ignored = np.zeros((len(queries), len(passages)), bool)
        for place, query in enumerate(queries):
            ignored[place] = np.isin(passages, data.relevant_rows(query))
            ignored[place, draft.positives[place]] = False
        draft.arguments["queries"] = len(queries)
        draft.arguments["positives"] = torch.from_numpy(draft.positives)
        draft.arguments["ignored"] = torch.from_numpy(ignored)
        for term in self.terms:
            term.add_to(draft)
        return Batch(draft.outputs, draft.chunks, draft.arguments)

    def compose(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of passages by row, with titles as the options say."""
        assert self.data is not None
        return self.tokenizer.compose(*self.data.passages(rows), self.encoder.title)

    def _passage_chunks(
        self, passages: np.ndarray, rows: np.ndarray, prompt_numbers: np.ndarray | None
    ) -> list[BatchChunk]:
        """Splits passages into chunks; `rows`: their positions in the batch. Stored vectors form a single chunk."""
        if self.vectors is None:
            return self.chunks(self.compose(passages), "passage", rows, prompt_numbers)
        if not len(passages):
            return []
        return [BatchChunk({BATCH_VECTORS: rows}, torch.from_numpy(self.vectors(passages).astype(np.float32)))]

    def chunks(
        self,
        texts: Sequence[str],
        side: Side,
        rows: np.ndarray,
        prompt_numbers: np.ndarray | None = None,
        output: str = BATCH_VECTORS,
    ) -> list[BatchChunk]:
        """Splits texts into chunks; see TextChunks. Only the main output counts cuts, so a text counts once."""
        names = [output, *(name for term in self.terms for name in term.row_outputs(side))]
        return self._chunks.make(texts, side, rows, names, prompt_numbers, self._prompt(side), output == BATCH_VECTORS)

    def check_queries(self, texts: Sequence[str]) -> None:
        """Raises InputError that names a query without a word, from which its prompt would be computed."""
        self._chunks.check_queries(texts)

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], None]:
        """Computes the vectors of a chunk for the loss, float32 [n, dim], and the outputs of the loss terms.

        The vectors are scaled if the temperature is learned; the terms get them as they are.
        """
        encoded = self._encode(chunk)
        name = next(iter(chunk.rows))  # The first output holds the chunk's vectors; the others belong to loss terms.
        outputs = {name: encoded.vectors if self.learned is None else encoded.vectors * self.learned()}
        for term in self.terms:
            outputs |= term.outputs(chunk, encoded)
        return outputs, None

    def _encode(self, chunk: BatchChunk) -> EncodedChunk:
        """Encodes a chunk; stored vectors are returned as constants."""
        if isinstance(chunk.inputs, torch.Tensor):
            return EncodedChunk(None, chunk.inputs.to(self.device), None)
        side, *texts = chunk.inputs
        inputs = PromptInputs(*(each.to(self.device) for each in texts))
        provider, (model, head) = self._prompt(side), self.encoders[side]
        rows, weights = (None, None) if provider is None else self.kind.rows(provider, inputs)
        extra = {} if rows is None else {"prompt": rows}
        count = len(next(iter(chunk.rows.values())))  # A chunk of a single text contains it twice.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            pooled = model(inputs.ids, inputs.lengths, **extra)
        return EncodedChunk(side, head(pooled[:count]), None if weights is None else weights[:count])

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the sum of all loss terms over the queries and passages of the batch."""
        first, *others = [term.loss(outputs, batch) for term in self.terms]
        return sum(others, first)

    @property
    def assignment(self) -> PromptAssignment | None:
        """The assignment of prompts to texts; None if all texts of a side have the same prompt."""
        return self.kind.assignment

    @property
    def similarity_temperature(self) -> float:
        """The divisor of similarities between outputs; 1 if `forward` applies a learned temperature."""
        return self.temperature if self.learned is None else 1.0

    @property
    def encoded_sides(self) -> tuple[Side, ...]:
        """The sides encoded in training: only queries if the passage vectors are stored."""
        return SIDES if self.vectors is None else SIDES[:1]

    @property
    def dim(self) -> int:
        """The dimension of a vector."""
        return self.recipe.dim

    def encode(
        self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1, prompt_numbers: np.ndarray | None = None
    ) -> np.ndarray:
        """Encodes texts with the current model, float32 [n, dim]; workers share the texts, and all get all vectors.

        `prompt_numbers`, int64 [n], say which of several prompts a text has; None: they are inferred.
        """
        if self.assignment is not None and prompt_numbers is None:
            prompt_numbers = self.assignment.infer(texts, side)

        def make_chunks(rows: np.ndarray) -> list[BatchChunk]:
            return self.chunks(
                [texts[row] for row in rows], side, rows, None if prompt_numbers is None else prompt_numbers[rows]
            )

        return share_items(
            self.module,
            make_chunks,
            lambda chunk: self._encode(chunk).vectors,
            (len(texts), self.dim),
            device=self.device,
            rank=rank,
            world=world,
        )

    def encode_passages(self, passages: np.ndarray, rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns passage vectors by row, float32 [n, dim]: stored vectors, or those of the current model."""
        if self.vectors is not None:
            return self.vectors(passages).astype(np.float32)
        prompt_numbers = None if self.assignment is None else self.assignment.of_passages[passages]
        return self.encode(self.compose(passages), "passage", rank, world, prompt_numbers)

    def save(self, folder: Path) -> None:
        """Saves a task's prompt, or sentence-transformers models: one, or untied ones in `query/` and `passage/`.

        If each task has a prompt, the saved one is their mean, and `tasks/NAME` holds that of a task.
        Prompts that are trained with the backbone, over the model of `query/` or the only one, are in `prompt/`.
        """
        if self.tuning.method != "finetune":  # a frozen backbone is described or merged as its files are now
            self._files.check()
        if self.tuning.method == "prompt":
            self.prompt().save(folder)
            for task, prompt in self.task_prompts().items():
                (place := folder / TASKS / task).mkdir(parents=True)
                prompt.save(place)
            return
        self._encoders.save(folder)
        if len(self.prompts):
            (folder / PROMPT).mkdir()
            self.prompt(folder if self.tuning.sides == "tied" else folder / "query").save(folder / PROMPT)

    def prompt(self, backbone_folder: Path | None = None) -> TaskPrompt:
        """Returns the current prompts in their saved form.

        Args:
            backbone_folder: The folder of their backbone, if it is trained too; None: the frozen one.
        """
        recipe = self.recipe if backbone_folder is None else read_recipe(backbone_folder, self.encoder)
        backbone = backbone_of(settings_of(recipe, self.encoder))
        task = TaskPrompt(backbone, replace(self.encoder, compile="auto"), None, None)
        return self.kind.to_task_prompt(dict(self.prompts.items()), task)

    def task_prompts(self) -> dict[str, TaskPrompt]:
        """Returns each task's prompt by name; empty unless every task has a prompt. Their mean is `prompt`."""
        return self.kind.prompts_by_task(dict(self.prompts.items()), self.prompt())

    def _prompt(self, side: Side) -> PromptProvider | None:
        prompts: dict[str, PromptProvider] = dict(self.prompts.items())
        return prompts.get("both", prompts.get(side))


def _share(prompt_numbers: np.ndarray | None, rank: int, world: int) -> np.ndarray | None:
    """Returns a worker's share of the prompt numbers."""
    return None if prompt_numbers is None else prompt_numbers[rank::world]
