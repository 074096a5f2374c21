"""The cross-encoder as it is trained: question and passage read together, each query's positive among its negatives."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from retriever.attention import reach
from retriever.batching import padded, plan
from retriever.errors import InputError
from retriever.kernels import attention_dropouts, swap_dropout
from retriever.options import TitlePolicy
from retriever.pairs import PairTokenizer
from retriever.recipe import positions_of
from retriever.reranker import Scored
from retriever.reranker_data import TrainingData, batch_at
from retriever.saving import restored
from retriever.system import Batch, Chunk

Loss = Literal["bce", "listwise"]

_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens, padding included
_STEP = 16


@dataclass(frozen=True, kw_only=True)
class CrossOptions:
    """batch: queries a step, over all workers; each comes with one positive and `negatives_per_query` negatives.

    loss: "bce" makes the sigmoid of a logit the probability that the passage answers; "listwise" is the cross-entropy
    of a query's positive among its negatives, whose logits rank as well but mean no probability. max_length: tokens of
    question and passage together.
    """

    batch: int = 32
    negatives_per_query: int = 4
    seed: int = 0
    max_length: int = 256
    loss: Loss = "bce"
    title: TitlePolicy = "space"

    def __post_init__(self) -> None:
        """Raises InputError for a value that cannot be trained with."""
        for name in ("batch", "negatives_per_query", "max_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: expected a seed from 0 on")
        for name, allowed in (("loss", get_args(Loss)), ("title", get_args(TitlePolicy))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")


class CrossSystem:
    """A System: a backbone with a head of one label, over pairs. Its loss is all in the chunks' parts.

    The head is drawn from the seed where the backbone has none. data: None where the model is only looked at. Weights
    are float32; dtype bfloat16 computes under autocast. Raises InputError for what is no backbone.
    """

    module: nn.Module

    def __init__(
        self, folder: Path, options: CrossOptions, data: TrainingData | None, *, device: torch.device,
        dtype: torch.dtype = torch.float32, checkpointing: bool = False,
    ):  # fmt: skip
        torch.manual_seed(options.seed)
        self.folder, self.options, self.data, self.device, self.dtype = folder, options, data, device, dtype
        self.tokenizer = check_length(folder, options.max_length)
        loaded, self._dropouts = _load(folder)
        self.module = self.model = loaded.to(device)
        swap_dropout(self.model)
        with contextlib.suppress(InputError):  # what is out of reach trains by torch's own attention
            reach(self.model)
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_id
        self.scored = Scored(self.model, self.tokenizer.types)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Every worker takes each world-th query, whose pairs stay together, as the listwise loss needs them."""
        assert self.data is not None
        queries, rows = (each[rank::world] for each in batch_at(self.data, self.options, step))
        width = rows.shape[1]
        texts = [self.data.queries[query] for query in queries for _ in range(width)]
        passages = self.tokenizer.compose(*self.data.passages(rows.ravel()), self.options.title)
        tokens, types = self.tokenizer(texts, passages)
        longest = tokens.lengths.reshape(-1, width).max(axis=1)
        groups = plan(longest, _CHUNK[self.device.type] // width, _STEP, positions_of(self.model.config))
        batches = [((group[:, None] * width + np.arange(width)).ravel(), columns) for group, columns in groups]
        pairs = padded(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
        kinds = padded(types, batches, side="right", pad_id=0)
        none = np.empty(0, np.int64)
        return Batch(0, [Chunk(none, (ids, type_ids, lengths), ids.numel())
                         for (_, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True)])  # fmt: skip

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """No vectors, and the chunk's part of the mean over the batch's queries."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = self.scored(*(tensor.to(self.device) for tensor in chunk.inputs))
        part = loss_of(logits.view(-1, 1 + self.options.negatives_per_query), self.options.loss)
        return logits.new_empty(0, 0), part / self.options.batch

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Nothing beside the chunks' parts."""
        return vectors.new_zeros(())

    def save(self, folder: Path) -> None:
        """A folder that transformers, sentence-transformers' CrossEncoder and Reranker open."""
        from transformers import AutoTokenizer

        with restored(self.model.config, self._dropouts):
            self.model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokenizer.model_max_length = self.options.max_length
        tokenizer.save_pretrained(folder)


def loss_of(logits: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Summed over the queries: logits float32 [queries, 1 + negatives], the positive's first -> scalar.

    bce: the mean over a query's pairs of -log sigmoid(s) for the positive, -log(1 - sigmoid(s)) for a negative.
    listwise: -log(exp(s_0) / sum_i exp(s_i)).
    """
    if loss == "listwise":
        return -torch.log_softmax(logits, dim=1)[:, 0].sum()
    targets = torch.zeros_like(logits)
    targets[:, 0] = 1
    every = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return every.mean(dim=1).sum()


def check_length(folder: Path, max_length: int) -> PairTokenizer:
    """The backbone's tokenizer for pairs of so many tokens. Raises InputError where it has no positions for them."""
    from transformers import AutoConfig

    try:
        positions = positions_of(AutoConfig.from_pretrained(folder))
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    if positions is not None and max_length > positions:
        raise InputError(f"max_length={max_length} is more than the {positions} positions of {folder}")
    return PairTokenizer(folder, max_length)


def _load(folder: Path) -> tuple[Any, dict[str, float]]:
    """The backbone with one label, float32, without dropout of attention's weights; what these were. Raises InputError
    where the weights are not this backbone's."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        dropouts = attention_dropouts(AutoConfig.from_pretrained(folder))
        off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, output_loading_info=True, **off
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    total = len(list(model.parameters()))
    if 2 * len(found["missing_keys"]) > total:
        raise InputError(f"{folder}: the weights lack {len(found['missing_keys'])} of {total} tensors of a "
                         f"{type(model).__name__}")  # fmt: skip
    return model, dropouts
