"""The re-ranker: a cross-encoder that reads question and passage together and gives a probability for each pair."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from retriever.batching import Tokens, padded, plan
from retriever.compiling import compile_model, warm_up_batch
from retriever.errors import InputError
from retriever.files import resolve
from retriever.numerics import choose_device, choose_dtype, describe_numerics, expected_numerics
from retriever.options import EncoderOptions
from retriever.pairs import DEFAULT_OPTIONS, PairTokenizer, RerankerOptions, read_pair_recipe, settings_of
from retriever.recipe import fingerprint_of

__all__ = ["Reranker", "RerankerOptions", "describe_reranker", "expected_reranker_numerics"]

log = logging.getLogger(__name__)

# Tokens per batch and the step of its columns: those of the encoder, whose layers these are.
_BUDGET = {"cpu": 4096, "cuda": 65536}
_STEP = 16


class Reranker:
    """A frozen cross-encoder with its tokenizer.

    config: the settings that shape the probabilities, JSON-able; fingerprint: its sha256. numerics: the numerics class
    in one line. startup: seconds to load, and of these to compile.

    name_or_path: a Hugging Face name or a folder (transformers or sentence-transformers) with a classification head.
    threads: for the processor's products (None leaves torch's setting; Ray sets it to 1, so name it there).
    Raises InputError for a model or a setting that cannot be used.
    """

    config: dict[str, Any]
    fingerprint: str
    numerics: str
    _run: Callable[..., torch.Tensor]

    def __init__(
        self,
        name_or_path: str,
        options: RerankerOptions = DEFAULT_OPTIONS,
        *,
        device: str | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
    ):
        begun = time.perf_counter()
        self._threads = threads or torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self.options = options
        self.device = choose_device(device)
        self.dtype = choose_dtype(options.dtype, self.device)
        folder = resolve(name_or_path)
        self._recipe = read_pair_recipe(folder, options, trust_remote_code=trust_remote_code)
        self.config = settings_of(self._recipe, options)
        self.fingerprint = fingerprint_of(self.config)
        self._tokenizer = PairTokenizer(folder, self._recipe.max_length, trust_remote_code=trust_remote_code)
        model = _load_classifier(folder, self.dtype, trust_remote_code).to(self.device)
        if model.config.pad_token_id is None:  # decoders look for the last token that is no padding
            model.config.pad_token_id = self._tokenizer.pad_id
        scored = Scored(model, self._tokenizer.types).eval().requires_grad_(False)
        compiling = time.perf_counter()
        ids, lengths = warm_up_batch(self._tokenizer.pad_id, self.device)
        warm_ups = [(ids, torch.zeros_like(ids), lengths)]
        self._run, compiled = compile_model(scored, options.compile, self.device, self.dtype, warm_ups)
        self.numerics = describe_numerics(self.device, self.dtype, "compiled" if compiled else "eager")
        self.startup = {"seconds": time.perf_counter() - begun, "compile_seconds": time.perf_counter() - compiling}
        log.info("%s ready in %.1f s (compiling %.1f s): %s", name_or_path, *self.startup.values(), self.numerics)

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray:
        """The probability that passages[i] answers queries[i]: float32 [n]. Passages with titles: see `compose`.

        The bytes depend on the list of pairs and the numerics class alone. Raises InputError where the lists differ in
        length, and where a logit is not finite, naming the pair.
        """
        return self.forward(*self.tokenize(queries, passages))

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Passages' strings by the title policy; an empty title adds nothing."""
        return self._tokenizer.compose(titles, texts, self.options.title)

    def tokenize(self, queries: Sequence[str], passages: Sequence[str]) -> tuple[Tokens, Tokens]:
        """Token ids of pairs, and each token's type (0 question, 1 passage); uses the processor only."""
        return self._tokenizer(queries, passages)

    def forward(self, tokens: Tokens, types: Tokens) -> np.ndarray:
        """Probabilities of tokenised pairs, in order: float32 [n]; raises as `score` does."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        logits = torch.empty(len(tokens), self._recipe.labels, dtype=torch.float32)
        batches = plan(tokens.lengths, _BUDGET[self.device.type], _STEP, self._recipe.positions)
        pairs = padded(tokens, batches, side="right", pad_id=self._tokenizer.pad_id)
        kinds = padded(types, batches, side="right", pad_id=0)
        with torch.no_grad():
            for (rows, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True):
                found = self._run(ids.to(self.device), type_ids.to(self.device), lengths.to(self.device))
                logits[torch.from_numpy(rows)] = found[: len(rows)].cpu()
        bad = np.flatnonzero(~np.isfinite(logits.numpy()).all(axis=1))
        if len(bad):
            raise InputError(
                f"the score of pair {bad[0]} (and of {len(bad) - 1} more of {len(logits)}) is not finite: "
                f"try dtype='float32' (now: {self.numerics})"
            )
        label = self._recipe.positive_label
        return (torch.sigmoid(logits[:, 0]) if label is None else torch.softmax(logits, dim=1)[:, label]).numpy()


def describe_reranker(name_or_path: str | Path, options: RerankerOptions = DEFAULT_OPTIONS) -> dict[str, Any]:
    """The settings that shape the probabilities, JSON-able: a Reranker's `config`, without loading the model."""
    return settings_of(read_pair_recipe(resolve(name_or_path), options), options)


def expected_reranker_numerics(options: RerankerOptions, device: str | None) -> str:
    """The numerics class of a Reranker on this machine, without loading one."""
    return expected_numerics(EncoderOptions(dtype=options.dtype, compile=options.compile), device)


class Scored(nn.Module):
    """A classifier over padded pairs: (ids, types int64 [b, n], lengths int64 [b]) -> logits float32 [b, labels]."""

    def __init__(self, model: nn.Module, types: bool):
        super().__init__()
        self.model = model
        self.types = types and "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: torch.Tensor, types: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        extra = {"token_type_ids": types} if self.types else {}
        return self.model(input_ids=ids, attention_mask=inside.long(), **extra).logits.float()


def _load_classifier(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The classifier in `dtype`. Raises InputError where the folder lacks weights, those of the head among them."""
    from transformers import AutoModelForSequenceClassification

    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (ValueError, OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    if found["missing_keys"]:
        names = ", ".join(sorted(found["missing_keys"])[:4])
        raise InputError(f"{folder}: the weights lack {names}: not a trained cross-encoder")
    return model
