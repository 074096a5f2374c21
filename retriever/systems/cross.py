"""Trains the cross-encoder, which reads query and passage together, on positives and negatives of each query."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.encoding.backbones import is_pooler
from riptide.retriever.encoding.pair_encoding import PairTokenizer
from riptide.retriever.encoding.reranker import PairClassifier
from riptide.retriever.encoding.saving import save_model, with_original_values
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.batching import BATCH_TOKENS, COLUMN_STEP, padded_batches, plan_padded
from riptide.retriever.forward.kernels import attention_dropouts, swap_dropout
from riptide.retriever.model.configuration import check_bidirectional, load_config
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.model_folder import BackboneFiles
from riptide.retriever.model.recipe import max_positions_of, vocabulary_size_of
from riptide.retriever.model.vocabulary import load_tokenizer
from riptide.retriever.model.weights import check_files, load_model
from riptide.retriever.options.reranking import CrossEncoderOptions, PairLoss
from riptide.retriever.training.dev_workers import ITEMS, share_items
from riptide.retriever.training.system import Batch, BatchChunk, checkpoint_activations
from riptide.retriever.training.training_data import TrainingData, batch_at


class CrossSystem:
    """A System for a cross-encoder: a backbone with a one-label classification head over query-passage pairs.

    The loss of a batch is the sum of the losses of its chunks. Weights are float32; with dtype bfloat16 the forward
    pass runs under autocast.

    Args:
        folder: Folder of the backbone. If it has no head, a new one is initialised from the seed.
        options: Options of the cross-encoder.
        data: The training data; None if the model is not trained.
        device: The device of the model.
        dtype: The dtype of the forward and backward pass.
        checkpointing: Use activation checkpointing.

    Raises:
        InputError: If the backbone is damaged or incomplete.
    """

    module: nn.Module

    def __init__(
        self,
        folder: Path,
        options: CrossEncoderOptions,
        data: TrainingData | None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
    ):
        torch.manual_seed(options.seed)
        files = BackboneFiles(folder)
        self.folder, self.options, self.data, self.device, self.dtype = folder, options, data, device, dtype
        self.tokenizer = open_pair_tokenizer(folder, options.max_length)
        loaded, self._dropouts = _load_classifier(folder)
        self.module = self.model = loaded.to(device)
        swap_dropout(self.model)
        # Architectures without support for prompts train with torch's own attention.
        with contextlib.suppress(InputError):
            enable_prompts(self.model)
        if checkpointing:
            checkpoint_activations(self.model)
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_id
        self.scored = PairClassifier(self.model, self.tokenizer.types)
        self.scored.check_layers(self.tokenizer, folder)
        files.check()

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns every world-th query of a step; all pairs of a query stay together, as the listwise loss requires."""
        assert self.data is not None
        queries, rows = (each[rank::world] for each in batch_at(self.data, self.options, step))
        width = rows.shape[1]
        texts = [self.data.queries[query] for query in queries for _ in range(width)]
        passages = self.tokenizer.compose(*self.data.passages(rows.ravel()), self.options.title)
        return Batch({}, self._chunks(texts, passages, width))

    def score(self, queries: Sequence[str], passages: Sequence[str], rank: int = 0, world: int = 1) -> np.ndarray:
        """Scores pairs with the current model: returns their logits, float32 [n], on every worker.

        Each worker scores a share of the pairs.

        Args:
            queries: The query of each pair.
            passages: The passage of each pair, with its title.
            rank: The rank of this worker.
            world: The number of workers.
        """

        def make_chunks(rows: np.ndarray) -> list[BatchChunk]:
            return self._chunks([queries[row] for row in rows], [passages[row] for row in rows], 1, rows)

        def forward(chunk: BatchChunk) -> torch.Tensor:
            return self._logits(chunk)[: len(chunk.rows[ITEMS])]

        shape = (len(queries), 1)
        logits = share_items(self.module, make_chunks, forward, shape, device=self.device, rank=rank, world=world)
        return logits[:, 0]

    def _chunks(
        self, queries: Sequence[str], passages: Sequence[str], width: int, positions: np.ndarray | None = None
    ) -> list[BatchChunk]:
        """Splits pairs into chunks, each `width` consecutive pairs together; `positions`: of the pairs, if needed."""
        if not len(queries):
            return []
        tokens, types = self.tokenizer(list(queries), list(passages))
        longest = tokens.lengths.reshape(-1, width).max(axis=1)
        groups = plan_padded(
            longest, BATCH_TOKENS[self.device.type] // width, COLUMN_STEP, max_positions_of(self.model.config)
        )
        batches = [((group[:, None] * width + np.arange(width)).ravel(), columns) for group, columns in groups]
        pairs = padded_batches(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
        kinds = padded_batches(types, batches, side="right", pad_id=0)
        none: dict[str, np.ndarray] = {}
        return [
            BatchChunk(
                none if positions is None else {ITEMS: positions[rows]},
                (ids, type_ids, lengths),
                ids.numel(),
                {"pairs": tokens.count_cuts(rows)},
            )
            for (rows, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True)
        ]

    def _logits(self, chunk: BatchChunk) -> torch.Tensor:
        """Computes the logits of a chunk's pairs, float [n, 1]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.scored(*(tensor.to(self.device) for tensor in chunk.inputs))

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns no outputs, and the chunk's contribution to the mean loss over the batch's queries."""
        logits = self._logits(chunk)
        part = pair_loss(logits.view(-1, 1 + self.options.negatives_per_query), self.options.loss)
        return {}, part / self.options.batch

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns 0, because the chunk losses contain the whole loss."""
        return torch.zeros((), device=self.device)

    def save(self, folder: Path) -> None:
        """Saves a folder that transformers, sentence-transformers' CrossEncoder and Reranker can load."""
        with with_original_values(self.model.config, self._dropouts):
            save_model(self.model, folder)
        tokenizer = load_tokenizer(self.folder, vocabulary_size=vocabulary_size_of(self.model.config))
        tokenizer.model_max_length = self.options.max_length
        tokenizer.save_pretrained(folder)


def pair_loss(logits: torch.Tensor, loss: PairLoss) -> torch.Tensor:
    """Returns the loss summed over queries, a scalar; logits: float32 [queries, 1 + negatives], positive first.

    bce: the mean over a query's pairs of -log sigmoid(s) for the positive, -log(1 - sigmoid(s)) for a negative.
    listwise: -log(exp(s_0) / sum_i exp(s_i)).
    """
    if loss == "listwise":
        return -torch.log_softmax(logits, dim=1)[:, 0].sum()
    targets = torch.zeros_like(logits)
    targets[:, 0] = 1
    every = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return every.mean(dim=1).sum()


def open_pair_tokenizer(folder: Path, max_length: int) -> PairTokenizer:
    """Loads the backbone's tokenizer for pairs of at most `max_length` tokens.

    Raises:
        InputError: If the folder is damaged, the backbone has fewer positions, or it is a decoder of the BERT family.
    """
    config = load_config(folder)
    check_files(folder, config)
    check_bidirectional(config, folder / "config.json")
    positions = max_positions_of(config)
    if positions is not None and max_length > positions:
        raise InputError(f"{Parameter('max_length', max_length)}: more than the {positions} positions of {folder}")
    return PairTokenizer(folder, max_length, vocabulary_size=vocabulary_size_of(config))


def _load_classifier(folder: Path) -> tuple[Any, dict[str, float]]:
    """Loads the backbone with a one-label head in float32 without attention dropout; also returns the original rates.

    Checkpoints of masked language models lack a classification head and a pooler; both then start from random weights.

    Raises:
        InputError: If other weights are missing.
    """
    transformers = import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config = load_config(folder)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise InputError(f"{folder}: transformers has no classification head for a {config.model_type}")
    prefix = f"{MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].base_model_prefix}."

    def is_head(name: str) -> bool:
        return not name.startswith(prefix) and not is_pooler(name)

    dropouts = attention_dropouts(config)
    off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
    model, _ = load_model(
        transformers.AutoModelForSequenceClassification,
        folder,
        dtype=torch.float32,
        fresh=[is_head, is_pooler],
        num_labels=1,
        **off,
    )
    return model, dropouts
