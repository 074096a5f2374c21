"""Retrieval-oriented intermediate pretraining (DPTDR, section 3.2), coCondenser's, and plain masked language modelling.

A System for the training loop: what the batch at a step holds, the model's two losses, and how it is saved.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from retriever.attention import PromptRows, reach
from retriever.batching import TextTokenizer, padded, plan
from retriever.errors import InputError
from retriever.kernels import swap_dropout
from retriever.masking import MaskedBackbone, Masking
from retriever.options import EncoderOptions
from retriever.prompts import DeepPrompt, TaskPrompt, backbone_of
from retriever.recipe import read_recipe, settings_of
from retriever.saving import save_encoder
from retriever.sentences import spans, split_sentences
from retriever.system import Batch, Chunk

Objective = Literal["rip", "condenser", "mlm"]
Unit = Literal["sentence", "span"]
Trains = Literal["backbone", "prompts"]

_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens, padding included
_STEP = 16
# Streams of random numbers, beside the loop's own (2): of epochs' orders, of pairs, of masks.
_ORDER, _PAIR, _MASK = 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class RipOptions:
    """What is pretrained, and on what batches. Defaults are DPTDR's where it names any.

    objective: "rip": Eq. 5; "condenser": the same with Condenser's head and its loss (coCondenser); "mlm": passages'
    texts, masked, and nothing contrastive. unit: of what two are drawn from a passage: its sentences, or random spans
    of its tokens (coCondenser). batch: passages a step, over all workers. max_length: tokens of a unit (of a passage,
    with "mlm"), special ones included. pooling: of vectors. train: all weights, or deep prompts of `prompt_length`
    tokens over a frozen backbone. language: of the sentences.
    """

    steps: int
    batch: int = 2048
    lr: float = 1e-4
    seed: int = 0
    max_length: int = 128
    mlm_probability: float = 0.15
    unit: Unit = "sentence"
    objective: Objective = "rip"
    pooling: Literal["cls", "mean"] = "cls"
    train: Trains = "backbone"
    prompt_length: int = 32
    language: str = "en"

    def __post_init__(self) -> None:
        """Raises InputError for a value that cannot be trained with."""
        for name in ("steps", "batch", "max_length", "prompt_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0) or self.seed < 0 or not 0 < self.mlm_probability < 1:
            raise InputError(f"lr={self.lr} seed={self.seed} mlm_probability={self.mlm_probability}: expected a "
                             "learning rate above 0, a seed from 0 on, and a share of the tokens")  # fmt: skip
        for name, allowed in (("unit", get_args(Unit)), ("objective", get_args(Objective)),
                              ("train", get_args(Trains)), ("pooling", ("cls", "mean"))):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.objective == "condenser" and (self.pooling, self.train) != ("cls", "backbone"):
            raise InputError("objective=condenser trains a backbone's first token: pooling=cls, train=backbone")
        if self.objective != "mlm" and self.batch < 2:
            raise InputError("batch=1: the pairs of one passage have no negatives, give 2 or more")


@dataclass(frozen=True)
class RipData:
    """texts(rows int64 [n]) gives n passages' texts; the corpus has rows 0 to num_passages - 1.

    rows: those that can be drawn (`eligible`), int64 [any].
    """

    num_passages: int
    texts: Callable[[np.ndarray], list[str]]
    rows: np.ndarray


def encoder_options(options: RipOptions) -> EncoderOptions:
    """How the texts become vectors, in pretraining and by the prompts that come of it."""
    return EncoderOptions(
        pooling=options.pooling,
        query_prefix="",
        passage_prefix="",
        normalize=False,
        query_length=options.max_length,
        passage_length=options.max_length,
        padding_side="right",
    )


def rip_loss(vectors: torch.Tensor) -> torch.Tensor:
    """Eq. 4, the mean over 2m units: float32 [2m, dim], the partner of row 2i being row 2i + 1 -> a scalar.

    -log( e^s(x, x') / sum over all y but x of e^s(x, y) ), s the raw inner product, x' the partner of x.
    """
    own = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    scores = (vectors @ vectors.T).masked_fill(own, float("-inf"))
    return functional.cross_entropy(scores, torch.arange(len(vectors), device=vectors.device) ^ 1)


def eligible(texts: Sequence[str], options: RipOptions) -> np.ndarray:
    """Which passages can be drawn: those of two different sentences, or of two spans; with "mlm", those not empty.

    bool [texts].
    """
    if options.objective == "mlm":
        return np.array([bool(text.strip()) for text in texts], bool)
    return np.array([len(_units(text, options, np.random.default_rng(0))) > 1 for text in texts], bool)


def passages_at(options: RipOptions, rows: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The passages of the batch at a step and the epoch of each: int64 [batch] both.

    A function of (seed, step, batch): epochs are permutations of the eligible rows laid end to end.
    """
    positions = step * options.batch + np.arange(options.batch)
    epochs, places = np.divmod(positions, len(rows))
    found = np.empty(options.batch, np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        found[inside] = rows[_permutation(options.seed, int(epoch), len(rows))[places[inside]]]
    return found, epochs


def pair_of(text: str, options: RipOptions, epoch: int, passage: int) -> tuple[str, str]:
    """Two different sentences (or spans) of a passage, drawn from (seed, epoch, passage).

    Raises InputError for a passage of one.
    """
    draw = np.random.default_rng([options.seed, _PAIR, epoch, passage])
    units = _units(text, options, draw)
    if len(units) < 2:
        raise InputError(f"passage {passage}: has {len(units)} {options.unit}(s), two are needed: find the rows again")
    first, second = draw.choice(len(units), 2, replace=False)
    return units[first], units[second]


class RipSystem:
    """A System: a backbone, its masked-language-model head, Eq. 4 and 5.

    data: None where the model is only looked at. Weights are float32; dtype bfloat16 computes under autocast. Raises
    InputError for a backbone that cannot be used.
    """

    module: nn.Module

    def __init__(
        self, folder: Path, options: RipOptions, data: RipData | None, *, device: torch.device,
        dtype: torch.dtype = torch.float32, checkpointing: bool = False,
    ):  # fmt: skip
        torch.manual_seed(options.seed)
        self.options, self.data, self.device, self.dtype = options, data, device, dtype
        self.encoder = encoder_options(options)
        self.recipe = replace(read_recipe(folder, self.encoder), head=())
        self.tokenizer = TextTokenizer(self.recipe, self.encoder)
        model = MaskedBackbone(self.recipe, options.pooling, condenser=options.objective == "condenser")
        self.masking = Masking(self.recipe, int(model.whole.config.vocab_size), options.mlm_probability)
        self.model = model.to(device)
        swap_dropout(self.model)
        modules: dict[str, nn.Module] = {"model": self.model}
        if options.train == "prompts":
            self.prompt: DeepPrompt | None = DeepPrompt(reach(model.backbone), options.prompt_length).to(device)
            modules["prompt"] = self.prompt
            model.head.requires_grad_(model.fresh_head)
            model.backbone.requires_grad_(False)
        else:
            self.prompt = None
            with contextlib.suppress(InputError):  # what is out of reach trains by torch's own attention
                reach(model.backbone)
        if checkpointing:
            model.whole.gradient_checkpointing_enable()
        self.module = nn.ModuleDict(modules)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Every worker takes each world-th passage: rows 2i and 2i + 1 are the two units of the batch's passage i.

        With "mlm" row i is passage i itself, and its vector does not count. Raises InputError where there are fewer
        passages than workers.
        """
        assert self.data is not None
        options = self.options
        if options.batch < world:
            raise InputError(f"batch={options.batch} passages cannot be shared by {world} workers")
        passages, epochs = passages_at(options, self.data.rows, step)
        mine = np.arange(rank, options.batch, world)
        texts = self.data.texts(passages[mine])
        per_passage = 1 if options.objective == "mlm" else 2
        if per_passage == 2:
            chosen = zip(texts, epochs[mine], passages[mine], strict=True)
            texts = [unit for text, e, p in chosen for unit in pair_of(text, options, int(e), int(p))]
        rows = (per_passage * mine[:, None] + np.arange(per_passage)).ravel()
        keys = [[options.seed, _MASK, step, int(row)] for row in rows]
        tokens, labels = self.masking(self.tokenizer(texts, side="passage"), keys)
        total = torch.tensor(int((labels.ids != -100).sum()), device=self.device)
        if world > 1:
            dist.all_reduce(total)
        batches = plan(tokens.lengths, _CHUNK[self.device.type], _STEP, self.recipe.positions)
        inputs = padded(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
        targets = padded(labels, batches, side="right", pad_id=-100)
        chunks = []
        for (own, ids, lengths), (_, wanted, _) in zip(inputs, targets, strict=True):
            once = slice(len(own))  # a single text comes twice
            given = (ids[once], lengths[once], wanted[once], max(1, int(total)))
            chunks.append(Chunk(rows[own], given, given[0].numel()))
        return Batch(0 if options.objective == "mlm" else 2 * options.batch, chunks)

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors of a chunk float32 [n, hidden], and its part of L_s, the mean over all masked tokens of the batch."""
        *inputs, total = chunk.inputs
        ids, lengths, labels = (tensor.to(self.device) for tensor in inputs)
        prompt = None if self.prompt is None else PromptRows(self.prompt())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            vectors, masked = self.model(ids, lengths, labels, prompt)
        return vectors, masked / total

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """L_c, the mean over the batch's units; 0 with "mlm"."""
        return vectors.new_zeros(()) if self.options.objective == "mlm" else rip_loss(vectors)

    def save(self, folder: Path) -> None:
        """A model that transformers, sentence-transformers and Encoder open, at its own full length; or a prompt."""
        if self.prompt is not None:
            matrix = self.prompt.matrix().cpu()
            config = settings_of(read_recipe(self.recipe.folder, self.encoder), self.encoder)
            TaskPrompt(backbone_of(config), self.encoder, matrix, matrix).save(folder)
            return
        own = read_recipe(self.recipe.folder, replace(self.encoder, query_length=None, passage_length=None,
                                                      padding_side=None))  # fmt: skip
        save_encoder(folder, replace(own, head=()), self.model)


def _units(text: str, options: RipOptions, draw: np.random.Generator) -> list[str]:
    """What a passage's pair is drawn from: no string twice, as a pair of equals teaches nothing."""
    if options.unit == "sentence":
        return list(dict.fromkeys(split_sentences(text, options.language)))
    return spans(text, options.max_length, draw)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(size)
