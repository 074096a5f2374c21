"""The re-ranker: a cross-encoder that reads a query and a passage together and returns a probability per pair."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process.forks import need_threads
from riptide.retriever.encoding.pair_encoding import (
    DEFAULT_PAIR_OPTIONS,
    PairTokenizer,
    RerankerOptions,
    pair_settings,
    read_pair_recipe,
)
from riptide.retriever.forward.batching import (
    BATCH_TOKENS,
    COLUMN_STEP,
    Tokens,
    packed_batch,
    padded_batches,
    plan_packed,
    plan_padded,
)
from riptide.retriever.forward.compiling import compile_model, warm_up_batch
from riptide.retriever.forward.int8 import Int8Layers
from riptide.retriever.forward.numerics import Mode, choose_device, choose_dtype, describe_numerics
from riptide.retriever.forward.packing import (
    MIN_TOKENS,
    Layers,
    PackedBackbone,
    PackedLayers,
    ThreadTeam,
    will_pack,
)
from riptide.retriever.model.failures import readable_errors
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.model_folder import BackboneFiles, find_model_folder
from riptide.retriever.model.recipe import fingerprint_of
from riptide.retriever.model.weights import load_model

__all__ = ["Reranker", "RerankerOptions", "describe_reranker"]

log = logging.getLogger(__name__)


@refuse_unknown_names
class Reranker:
    """A frozen cross-encoder with its tokenizer.

    Attributes:
        config: The settings that shape the probabilities, JSON-serialisable.
        fingerprint: The sha256 of `config`.
        numerics: The numerics class in one line.
        startup: Seconds to load, and the part of them spent on compiling.

    Args:
        name_or_path: A Hugging Face name or a folder (transformers or sentence-transformers) with a classification
            head.
        options: How a pair becomes a probability.
        device: "cpu" or "cuda"; None: CUDA if it is available.
        threads: Threads for matrix products on the CPU. None keeps torch's setting; Ray sets that to 1.
        trust_remote_code: Whether code in the model folder may run.
        pinned: The numerics class of existing scores, which the dtype "auto" follows; None: the faster dtype of this
            machine.

    Raises:
        InputError: If a model or a setting cannot be used.
    """

    config: dict[str, Any]
    fingerprint: str
    numerics: str
    _run: Callable[..., torch.Tensor]

    def __init__(
        self,
        name_or_path: str,
        options: RerankerOptions = DEFAULT_PAIR_OPTIONS,
        *,
        device: str | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
        pinned: str | None = None,
    ):
        started = time.perf_counter()
        need_threads("the first encoding or dense search")
        self._threads = threads or torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self.options = options
        self.device = choose_device(device, options.dtype)
        self._products = choose_dtype(options.dtype, self.device, pinned)
        is_int8 = self._products == torch.int8
        self.dtype = torch.float32 if is_int8 else self._products
        folder = find_model_folder(name_or_path)
        self._recipe = read_pair_recipe(folder, options, trust_remote_code=trust_remote_code)
        files = BackboneFiles(folder)
        self.config = pair_settings(self._recipe, options)
        self.fingerprint = fingerprint_of(self.config)
        self._tokenizer = PairTokenizer(
            folder,
            self._recipe.max_length,
            vocabulary_size=self._recipe.vocabulary_size,
            trust_remote_code=trust_remote_code,
        )
        model = _load_classifier(folder, self.dtype, trust_remote_code).to(self.device)
        if model.config.pad_token_id is None:  # Decoders need the padding id to find the last token before the padding.
            model.config.pad_token_id = self._tokenizer.pad_id
        scored = PairClassifier(model, self._tokenizer.types).eval().requires_grad_(False)
        scored.check_layers(self._tokenizer, folder)
        files.check()
        compiling = time.perf_counter()
        is_packed = is_int8 or (will_pack(self._recipe.model_type, options, self.device) and not trust_remote_code)
        self._team = ThreadTeam(self._threads) if is_packed else None
        mode: Mode = "packed"
        if is_packed:
            make_layers = Int8Layers if is_int8 else PackedLayers
            self._run = PackedClassifier(scored, self._recipe.first_position, make_layers).eval()
        else:
            ids, lengths = warm_up_batch(self._tokenizer.pad_id, self.device)
            warm_up_batches = [(ids, torch.zeros_like(ids), lengths)]
            self._run, compiled = compile_model(scored, options.compile, self.device, self.dtype, warm_up_batches)
            mode = "compiled" if compiled else "eager"
        self.numerics = describe_numerics(self.device, self._products, mode)
        self.startup = {"seconds": time.perf_counter() - started, "compile_seconds": time.perf_counter() - compiling}
        log.info("%s ready in %.1f s (compiling %.1f s): %s", name_or_path, *self.startup.values(), self.numerics)

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray:
        """Returns the probability that passages[i] answers queries[i], float32 [n]. For titles, see `compose`.

        The bytes depend only on the list of pairs and the numerics class.

        Raises:
            InputError: If the lists differ in length, or if a logit is not finite; names the pair.
        """
        return self.forward(*self.tokenize(queries, passages))

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Joins titles and texts of passages as the options say; an empty title adds nothing."""
        return self._tokenizer.compose(titles, texts, self.options.title)

    def tokenize(self, queries: Sequence[str], passages: Sequence[str]) -> tuple[Tokens, Tokens]:
        """Returns the token ids of pairs and the type of each token (0 query, 1 passage); runs on the CPU only."""
        return self._tokenizer(queries, passages)

    def forward(self, tokens: Tokens, types: Tokens) -> np.ndarray:
        """Scores tokenised pairs: returns probabilities in order, float32 [n]. Raises the same errors as `score`."""
        need_threads("the first encoding or dense search")
        logits = torch.empty(len(tokens), self._recipe.labels, dtype=torch.float32)
        if self._team is None:
            self._score_padded(tokens, types, logits)
        else:
            self._score_packed(tokens, types, logits, self._team)
        bad = np.flatnonzero(~np.isfinite(logits.numpy()).all(axis=1))
        if len(bad):
            raise InputError(
                f"the score of pair {bad[0]} (and of {len(bad) - 1} more of {len(logits)}) is not finite: "
                f"try {Parameter('dtype', 'float32')} (now: {self.numerics})"
            )
        label = self._recipe.positive_label
        return (torch.sigmoid(logits[:, 0]) if label is None else torch.softmax(logits, dim=1)[:, label]).numpy()

    def _score_packed(self, tokens: Tokens, types: Tokens, logits: torch.Tensor, team: ThreadTeam) -> None:
        """Writes the logits of pairs, float32 [n, labels], without padding, one thread per batch."""

        def fill(rows: np.ndarray) -> None:
            ids, lengths = packed_batch(tokens, rows)
            type_ids, _ = packed_batch(types, rows)
            with torch.inference_mode():
                logits[torch.from_numpy(rows)] = self._run(ids, type_ids, lengths)

        team.run(fill, plan_packed(tokens.lengths, min_tokens=MIN_TOKENS[self._products]))

    def _score_padded(self, tokens: Tokens, types: Tokens, logits: torch.Tensor) -> None:
        """Writes the logits of pairs, float32 [n, labels], in padded batches, one at a time."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        batches = plan_padded(tokens.lengths, BATCH_TOKENS[self.device.type], COLUMN_STEP, self._recipe.max_positions)
        pairs = padded_batches(tokens, batches, side="right", pad_id=self._tokenizer.pad_id)
        kinds = padded_batches(types, batches, side="right", pad_id=0)
        with torch.no_grad():
            for (rows, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True):
                outputs = self._run(ids.to(self.device), type_ids.to(self.device), lengths.to(self.device))
                logits[torch.from_numpy(rows)] = outputs[: len(rows)].cpu()


def describe_reranker(name_or_path: str | Path, options: RerankerOptions = DEFAULT_PAIR_OPTIONS) -> dict[str, Any]:
    """Returns a Reranker's `config`, the JSON-serialisable settings that shape probabilities; loads no model."""
    return pair_settings(read_pair_recipe(find_model_folder(name_or_path), options), options)


class PairClassifier(nn.Module):
    """A classifier over padded pairs: (ids, types int64 [b, n], lengths int64 [b]) -> logits float32 [b, labels]."""

    def __init__(self, model: nn.Module, types: bool):
        super().__init__()
        self.model = model
        self.types = types and "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: torch.Tensor, types: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_token = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        extra = {"token_type_ids": types} if self.types else {}
        return self.model(input_ids=ids, attention_mask=is_token.long(), **extra).logits.float()

    def check_layers(self, tokenizer: PairTokenizer, folder: Path) -> None:
        """Scores a pair of short texts. Raises InputError for settings with which the layers cannot run."""
        tokens, types = tokenizer(["a"], ["a"])
        # A masked token of padding, as most batches have.
        row = torch.tensor([[*tokens.ids, tokenizer.pad_id], [*types.ids, 0]], device=next(self.parameters()).device)
        with readable_errors(folder / "config.json"), torch.no_grad():
            self(row[:1], row[1:], torch.from_numpy(tokens.lengths).to(row.device))


class PackedClassifier(nn.Module):
    """A BERT-family classifier over packed pairs: (ids, types int64 [t], lengths int64 [b]) -> float32 [b, labels].

    Args:
        classifier: The classifier over padded pairs, of whose backbone only the embeddings and the pooler are kept.
        first: The usual position of a pair's first token.
        make_layers: As of `PackedBackbone`.
    """

    def __init__(self, classifier: PairClassifier, first: int, make_layers: Callable[[Sequence[Any]], Layers]):
        super().__init__()
        model: Any = classifier.model
        self.types = classifier.types
        self.backbone = PackedBackbone(model.base_model, "cls", first, make_layers)
        self.pooler = getattr(model.base_model, "pooler", None)  # RoBERTa and ELECTRA have theirs in the head
        self.head = model.classifier

    def forward(self, ids: torch.Tensor, types: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        first_states = self.backbone(ids, lengths, types=types if self.types else None)
        states = first_states[:, None].to(next(self.head.parameters()).dtype)
        logits: torch.Tensor = self.head(states if self.pooler is None else self.pooler(states)).float()
        return logits


def _load_classifier(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Loads the classifier in `dtype`. Raises InputError if weights are missing, including those of the head."""
    transformers = import_transformers()

    model, _ = load_model(
        transformers.AutoModelForSequenceClassification, folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
    return model
