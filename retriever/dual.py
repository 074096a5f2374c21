"""The dual encoder as it is trained (DPTDR, Eq. 1 and 3): deep prompts over a frozen backbone, or all of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from retriever.attention import PromptRows, reach
from retriever.batching import TextTokenizer, Tokens, padded, plan
from retriever.encoder import load_backbone
from retriever.errors import InputError
from retriever.kernels import attention_dropouts, swap_dropout
from retriever.losses import contrastive_loss
from retriever.options import EncoderOptions, Side
from retriever.pooling import Head, Pooled
from retriever.prompts import DeepPrompt, Parametrisation, Sides, TaskPrompt, backbone_of, check_backbone
from retriever.recipe import read_recipe, settings_of
from retriever.reranker_data import TrainingData, batch_at
from retriever.saving import restored, save_encoder
from retriever.system import Batch, Chunk

Method = Literal["prompt", "finetune"]

COSINE_TEMPERATURE = 0.05  # that of sentence-transformers' and SimCSE's cosine losses; raw products take 1 (DPTDR)
_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens, padding included
_STEP = 16


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is trained, and on what batches.

    method: "prompt": deep prompts alone; "finetune": all weights. sides, of prompts: "tied", one for queries and
    passages; "untied", one for each; "query", passages have none. length: of a prompt, in tokens (DPTDR: 32; 128 on MS
    MARCO). batch: queries a step, over all workers, each with one positive and `negatives_per_query` mined negatives;
    all others of the batch are negatives too. temperature: divides similarities (None: 1, or 0.05 of cosines).
    """

    method: Method = "prompt"
    sides: Sides = "tied"
    length: int = 32
    parametrisation: Parametrisation = "embedding"
    prompt_dropout: float = 0.1
    batch: int = 32
    negatives_per_query: int = 1
    temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError for a value that cannot be trained with."""
        for name, allowed in (("method", get_args(Method)), ("sides", get_args(Sides)),
                              ("parametrisation", get_args(Parametrisation))):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.length < 1 or self.batch < 1 or self.negatives_per_query < 0 or self.seed < 0:
            raise InputError(f"length={self.length} batch={self.batch} negatives_per_query={self.negatives_per_query} "
                             f"seed={self.seed}: expected counts")  # fmt: skip
        if not 0 <= self.prompt_dropout < 1 or (self.temperature is not None and not self.temperature > 0):
            raise InputError(f"prompt_dropout={self.prompt_dropout} temperature={self.temperature}: expected a share, "
                             "and more than 0")  # fmt: skip
        if self.method == "finetune" and self.sides != "tied":
            raise InputError("sides: fine-tuning trains one encoder for both sides; train prompts for one side only")


class DualSystem:
    """A System: one backbone for both sides, with or without prompts, its data and Eq. 3.

    dtype bfloat16: a frozen backbone is held in it; one that trains is held in float32, and computes under autocast.
    start: the prompts that training begins from. Raises InputError for a backbone or a prompt that cannot be used.
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
        backbone, self._dropouts = _load(folder, recipe, dtype if frozen else torch.float32)
        backbone.to(device)
        self.pooled = Pooled.over(backbone, recipe).requires_grad_(not frozen)
        self.head = Head(recipe, encoder.dimension).to(device).requires_grad_(not frozen)
        self.prompts = nn.ModuleDict()
        swap_dropout(backbone)
        if frozen:
            shape = reach(backbone)
            names = {"tied": ["both"], "untied": ["query", "passage"], "query": ["query"]}[tuning.sides]
            for name in names:
                prompt = DeepPrompt(shape, tuning.length, tuning.parametrisation, tuning.prompt_dropout)
                if start is not None:
                    check_backbone(start, settings_of(recipe, encoder), shape)
                    prompt.start(start.of("passage" if name == "passage" else "query"))
                self.prompts[name] = prompt.to(device)
        else:
            with contextlib.suppress(InputError):  # what is out of reach trains by torch's own attention
                reach(backbone)
        if checkpointing:
            backbone.activation_checkpointing_enable()
        self.module = nn.ModuleDict({"backbone": self.pooled, "head": self.head, "prompts": self.prompts})
        cosine = self.head.normalized
        self.temperature = tuning.temperature or (COSINE_TEMPERATURE if cosine else 1.0)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Queries and the passages that they bring, each passage once; every worker takes each world-th of both."""
        assert self.data is not None
        queries, rows = batch_at(self.data, self.tuning, step)
        passages, places = np.unique(rows, return_inverse=True)
        positives = places.reshape(rows.shape)[:, 0]
        ignored = np.zeros((len(queries), len(passages)), bool)
        for place, query in enumerate(queries):
            ignored[place] = np.isin(passages, self.data.positives[query])
            ignored[place, positives[place]] = False
        chunks = self.chunks([self.data.queries[query] for query in queries[rank::world]], "query",
                             np.arange(rank, len(queries), world))  # fmt: skip
        texts = self.compose(passages[rank::world])
        chunks += self.chunks(texts, "passage", len(queries) + np.arange(rank, len(passages), world))
        answers = {"positives": torch.from_numpy(positives), "ignored": torch.from_numpy(ignored)}
        return Batch(len(queries) + len(passages), chunks, {"queries": len(queries), **answers})

    def compose(self, rows: np.ndarray) -> list[str]:
        """The texts of some passages, titles as the options say."""
        assert self.data is not None
        return self.tokenizer.compose(*self.data.passages(rows), self.encoder.title)

    def chunks(self, texts: Sequence[str], side: Side, rows: np.ndarray) -> list[Chunk]:
        """Texts whose places are `rows`, cut into chunks of nearly equal length."""
        if not len(texts):
            return []
        tokens: Tokens = self.tokenizer(texts, side=side)
        batches = plan(tokens.lengths, _CHUNK[self.device.type], _STEP, self.recipe.positions)
        filled = padded(tokens, batches, side=self.recipe.padding_side, pad_id=self.tokenizer.pad_id)
        return [Chunk(rows[own], (side, ids, lengths), ids.numel()) for own, ids, lengths in filled]

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, None]:
        """Vectors of a chunk, float32 [n, dim]."""
        side, ids, lengths = chunk.inputs
        ids, lengths = ids.to(self.device), lengths.to(self.device)
        extra = {} if (prompt := self._prompt(side)) is None else {"prompt": PromptRows(prompt())}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            pooled = self.pooled(ids, lengths, **extra)
        return self.head(pooled[: len(chunk.rows)]), None

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Eq. 3 over all queries and passages of the batch."""
        count, given = batch.given["queries"], batch.given
        positives, ignored = given["positives"].to(vectors.device), given["ignored"].to(vectors.device)
        return contrastive_loss(vectors[:count], vectors[count:], positives, self.temperature, ignored)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Vectors by the model as it is now, float32 [n, dim]; workers share the work, and all get the result.

        All go through the model equally often: where its weights are shared out that is where they are put together.
        """
        training = self.module.training
        self.module.eval()
        found = torch.zeros(len(texts), self.recipe.dim, device=self.device)
        chunks = self.chunks(texts[rank::world], side, np.arange(rank, len(texts), world))
        own = len(chunks)
        if world > 1:
            most = torch.tensor(own, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            spare = chunks or self.chunks(texts[:1], side, np.arange(1))
            chunks += spare[-1:] * (int(most) - own)
        for place, chunk in enumerate(chunks):
            vectors, _ = self.forward(chunk)
            if place < own:
                found[torch.from_numpy(chunk.rows).to(self.device)] = vectors
        if world > 1:
            dist.all_reduce(found)
        self.module.train(training)
        return found.cpu().numpy()

    def save(self, folder: Path) -> None:
        """A task's prompt, or a model that sentence-transformers opens."""
        if self.tuning.method == "finetune":
            with restored(self.pooled.backbone.config, self._dropouts):
                save_encoder(folder, self.recipe, self.pooled.backbone, self.head)
        else:
            self.prompt().save(folder)

    def prompt(self) -> TaskPrompt:
        """The prompts as they are kept."""
        kept = {name: prompt.matrix().cpu() for name, prompt in self.prompts.items() if isinstance(prompt, DeepPrompt)}
        query, passage = kept.get("query", kept.get("both")), kept.get("passage", kept.get("both"))
        config = settings_of(self.recipe, self.encoder)
        return TaskPrompt(backbone_of(config), replace(self.encoder, compile="auto"), query, passage)

    def _prompt(self, side: Side) -> Any:
        name = "both" if "both" in self.prompts else side
        return self.prompts[name] if name in self.prompts else None  # noqa: SIM401


@dataclass(frozen=True)
class DevSet:
    """What a model is judged by while it trains: questions, and the passages that they are looked for in.

    positives: of each question, places among the passages, int64 [any]. texts: of the passages, as they are encoded.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    texts: Sequence[str]

    def mrr(self, system: DualSystem, rank: int = 0, world: int = 1, depth: int = 10) -> float:
        """The mean over questions of 1 / the rank of the first answer among the first `depth`, else 0; of passages with
        equal scores an answer comes last. NaN where vectors are not finite."""
        queries = system.encode(self.queries, "query", rank, world)
        passages = system.encode(self.texts, "passage", rank, world)
        scores = queries @ passages.T
        if not np.isfinite(scores).all():
            return math.nan
        total = 0.0
        for line, positives in zip(scores, self.positives, strict=True):
            best = line[positives].max()
            place = int((np.delete(line, positives) >= best).sum())
            total += 1 / (place + 1) if place < depth else 0.0
        return total / max(1, len(self.queries))


def _load(folder: Path, recipe: Any, dtype: torch.dtype) -> tuple[Any, dict[str, float]]:
    """The backbone, without dropout of attention's weights: it keeps them from the fused kernels; what these were."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.backbone, **recipe.config_args)
    dropouts = attention_dropouts(config)
    off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
    return load_backbone(recipe, dtype, **off), dropouts
