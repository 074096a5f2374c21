"""Training of the dual encoder (DPTDR, Eq. 1 and 3): deep prompts over a frozen backbone, or all weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from retriever.attention import reach
from retriever.batching import TextTokenizer, Tokens, padded, plan
from retriever.encoder import load_backbone
from retriever.errors import InputError
from retriever.evaluation.workers import share_items
from retriever.kernels import attention_dropouts, swap_dropout
from retriever.loading.configuration import load_config
from retriever.losses import contrastive_loss
from retriever.options import EncoderOptions, Side
from retriever.pooling import Head, Pooled
from retriever.prompts import (
    PROVIDERS,
    Parametrisation,
    PromptInputs,
    PromptProvider,
    Sides,
    TaskPrompt,
    backbone_of,
    check_initial_prompt,
    check_offsets,
)
from retriever.recipe import Recipe, read_recipe, settings_of
from retriever.reranker_data import NegativeDraw, PositiveDraw, TrainingData, batch_at
from retriever.saving import restored, save_encoder
from retriever.system import Batch, Chunk, checkpoint_activations

Method = Literal["prompt", "finetune"]

COSINE_TEMPERATURE = 0.05  # as in sentence-transformers' and SimCSE's cosine losses; inner products use 1 (DPTDR)
_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens per chunk, padding included
_STEP = 16


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the trained weights and the batches.

    Attributes:
        method: "prompt" trains deep prompts only, "finetune" all weights.
        sides: "tied" trains one prompt for queries and passages, "untied" one for each, "query" one for queries only.
        length: Tokens of a prompt (DPTDR: 32; 128 on MS MARCO).
        parametrisation: "embedding" trains the prompt's values, "mlp" a network that computes them.
        prompt_dropout: Fraction of the prompt's values that are dropped out, with a separate mask for each text.
        position_offset: The positions of a text start after the prompt; False: at their usual place.
        batch: Queries per step over all workers, each with one positive and `negatives_per_query` mined negatives; the
            other passages of the batch are negatives too.
        negatives_per_query: Mined negatives per query.
        draw_positive: Which positive a query brings: "random" in each epoch, "weighted" by the weights of the
            positives, or always the "first".
        draw_negatives: Which mined negatives a query brings: "random" in each epoch, or "windows" of one shuffled
            order.
        temperature: Similarities are divided by it (None: 1, or 0.05 for cosines).
        seed: Seed of all random numbers.
    """

    method: Method = "prompt"
    sides: Sides = "tied"
    length: int = 32
    parametrisation: Parametrisation = "embedding"
    prompt_dropout: float = 0.1
    position_offset: bool = False
    batch: int = 32
    negatives_per_query: int = 1
    draw_positive: PositiveDraw = "random"
    draw_negatives: NegativeDraw = "random"
    temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        for name, allowed in (
            ("method", get_args(Method)),
            ("sides", get_args(Sides)),
            ("parametrisation", get_args(Parametrisation)),
            ("draw_positive", get_args(PositiveDraw)),
            ("draw_negatives", get_args(NegativeDraw)),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.length < 1 or self.batch < 1 or self.negatives_per_query < 0 or self.seed < 0:
            raise InputError(f"length={self.length} batch={self.batch} negatives_per_query={self.negatives_per_query} "
                             f"seed={self.seed}: expected counts")  # fmt: skip
        if not 0 <= self.prompt_dropout < 1 or (self.temperature is not None and not self.temperature > 0):
            raise InputError(f"prompt_dropout={self.prompt_dropout} temperature={self.temperature}: expected a share, "
                             "and more than 0")  # fmt: skip
        if self.method == "finetune" and self.position_offset:
            raise InputError("position_offset: fine-tuning trains no prompt after which a text could start")
        if self.method == "finetune" and self.sides != "tied":
            raise InputError("sides: fine-tuning trains one encoder for both sides; train prompts for one side only")


class DualSystem:
    """A System: one backbone for both sides, with or without prompts, its data and the loss of Eq. 3.

    With dtype bfloat16, a frozen backbone is stored in bfloat16; a trained backbone is stored in float32 and computes
    under autocast.

    Args:
        folder: Folder of the backbone.
        encoder: How text becomes a vector.
        tuning: Options of the trained weights and the batches.
        data: The training data; None if the system is not trained.
        device: The device of the model.
        dtype: The dtype of the forward and backward pass.
        checkpointing: Use activation checkpointing.
        start: Initial prompts.

    Raises:
        InputError: If the backbone or the initial prompt cannot be used.
    """

    module: nn.Module

    def __init__(
        self, folder: Path, encoder: EncoderOptions, tuning: TuneOptions, data: TrainingData | None, *,
        device: torch.device, dtype: torch.dtype, checkpointing: bool = False, start: TaskPrompt | None = None,
    ):  # fmt: skip
        torch.manual_seed(tuning.seed)
        self.tuning, self.data, self.device, self.dtype = tuning, data, device, dtype
        self.encoder = encoder
        self.recipe = recipe = read_recipe(folder, encoder)
        self.tokenizer = TextTokenizer(recipe, encoder)
        frozen = tuning.method == "prompt"
        self.autocast = not frozen and dtype == torch.bfloat16
        backbone, self._dropouts = _load(recipe, dtype if frozen else torch.float32)
        backbone.to(device)
        self.pooled = Pooled.over(backbone, recipe).requires_grad_(not frozen)
        self.head = Head(recipe, encoder.dimension).to(device).requires_grad_(not frozen)
        self.prompts = nn.ModuleDict()
        swap_dropout(backbone)
        if frozen:
            shape = reach(backbone)
            names = {"tied": ["both"], "untied": ["query", "passage"], "query": ["query"]}[tuning.sides]
            if tuning.position_offset:
                self.pooled.check_offsets()
                check_offsets(recipe, offsets_of(tuning))
            for name in names:
                prompt = PROVIDERS[tuning.parametrisation](
                    shape, tuning.length, tuning.prompt_dropout, position_offset=tuning.position_offset
                )
                if start is not None:
                    check_initial_prompt(start, settings_of(recipe, encoder), shape)
                    prompt.start(start.of("passage" if name == "passage" else "query"))
                self.prompts[name] = prompt.to(device)
        else:
            with contextlib.suppress(InputError):  # other architectures train with torch's own attention
                reach(backbone)
        if checkpointing:
            checkpoint_activations(backbone)
        self.module = nn.ModuleDict({"backbone": self.pooled, "head": self.head, "prompts": self.prompts})
        cosine = self.head.normalized
        self.temperature = tuning.temperature or (COSINE_TEMPERATURE if cosine else 1.0)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns the queries and passages of a step, each passage once; a worker gets every world-th of both."""
        assert self.data is not None
        options = self.tuning
        queries, rows = batch_at(
            self.data, options, step, draw_positive=options.draw_positive, draw_negatives=options.draw_negatives
        )
        passages, places = np.unique(rows, return_inverse=True)
        positives = places.reshape(rows.shape)[:, 0]
        ignored = np.zeros((len(queries), len(passages)), bool)
        for place, query in enumerate(queries):
            ignored[place] = np.isin(passages, self.data.relevant(query))
            ignored[place, positives[place]] = False
        chunks = self.chunks([self.data.queries[query] for query in queries[rank::world]], "query",
                             np.arange(rank, len(queries), world))  # fmt: skip
        texts = self.compose(passages[rank::world])
        chunks += self.chunks(texts, "passage", len(queries) + np.arange(rank, len(passages), world))
        answers = {"positives": torch.from_numpy(positives), "ignored": torch.from_numpy(ignored)}
        return Batch(len(queries) + len(passages), chunks, {"queries": len(queries), **answers})

    def compose(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of passages, with titles as the options say."""
        assert self.data is not None
        return self.tokenizer.compose(*self.data.passages(rows), self.encoder.title)

    def chunks(self, texts: Sequence[str], side: Side, rows: np.ndarray) -> list[Chunk]:
        """Cuts texts into chunks of nearly equal length; `rows` are their positions in the batch."""
        if not len(texts):
            return []
        tokens: Tokens = self.tokenizer(texts, side=side)
        batches = plan(tokens.lengths, _CHUNK[self.device.type], _STEP, self.recipe.positions)
        filled = padded(tokens, batches, side=self.recipe.padding_side, pad_id=self.tokenizer.pad_id)
        return [Chunk(rows[text_rows], (side, ids, lengths), ids.numel()) for text_rows, ids, lengths in filled]

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, None]:
        """Returns the vectors of a chunk, float32 [n, dim]."""
        side, ids, lengths = chunk.inputs
        ids, lengths = ids.to(self.device), lengths.to(self.device)
        prompt = self._prompt(side)
        extra = {} if prompt is None else {"prompt": prompt(PromptInputs(ids, lengths))}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            pooled = self.pooled(ids, lengths, **extra)
        return self.head(pooled[: len(chunk.rows)]), None

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the loss of Eq. 3 over all queries and passages of the batch."""
        num_queries = batch.given["queries"]
        positives, ignored = batch.given["positives"].to(vectors.device), batch.given["ignored"].to(vectors.device)
        return contrastive_loss(vectors[:num_queries], vectors[num_queries:], positives, self.temperature, ignored)

    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns vectors of the current model, float32 [n, dim]; workers share the texts, and all get the result."""
        return share_items(
            self.module,
            lambda rows: self.chunks([texts[row] for row in rows], side, rows),
            lambda chunk: self.forward(chunk)[0],
            (len(texts), self.recipe.dim),
            device=self.device,
            rank=rank,
            world=world,
        )

    def save(self, folder: Path) -> None:
        """Saves a task's prompt, or a model for sentence-transformers."""
        if self.tuning.method == "finetune":
            with restored(self.pooled.backbone.config, self._dropouts):
                save_encoder(folder, self.recipe, self.pooled.backbone, self.head)
        else:
            self.prompt().save(folder)

    def prompt(self) -> TaskPrompt:
        """Returns the current prompts, in the form in which they are saved."""
        prompts: dict[str, Any] = dict(self.prompts.items())
        matrices = {name: prompt.matrix().cpu() for name, prompt in prompts.items()}
        query, passage = matrices.get("query", matrices.get("both")), matrices.get("passage", matrices.get("both"))
        config = settings_of(self.recipe, self.encoder)
        options = replace(self.encoder, compile="auto")
        return TaskPrompt(backbone_of(config), options, query, passage, self.tuning.position_offset)

    def _prompt(self, side: Side) -> PromptProvider | None:
        prompts: dict[str, Any] = dict(self.prompts.items())
        provider: PromptProvider | None = prompts.get("both", prompts.get(side))
        return provider


def offsets_of(tuning: TuneOptions) -> dict[Side, int]:
    """Returns by how many positions the texts of each side start later than usual."""
    offset = tuning.length if tuning.position_offset else 0
    return {"query": offset, "passage": 0 if tuning.sides == "query" else offset}


def _load(recipe: Recipe, dtype: torch.dtype) -> tuple[Any, dict[str, float]]:
    """Returns the backbone without attention dropout, which prevents fused kernels; and the original dropouts."""
    dropouts = attention_dropouts(load_config(recipe.backbone, **recipe.config_args))
    off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
    return load_backbone(recipe, dtype, **off), dropouts
