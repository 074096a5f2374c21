"""The encoder: texts in, float32 vectors out, the same bytes for the same list of texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError

from retriever.batching import TextTokenizer, Tokens, padded, plan
from retriever.errors import InputError
from retriever.files import resolve
from retriever.numerics import choose_device, choose_dtype, describe_numerics
from retriever.options import DEFAULT_OPTIONS, EncoderOptions, Side
from retriever.pooling import Head, Pooled
from retriever.recipe import Recipe, describe, fingerprint_of, read_recipe, settings_of

__all__ = ["Encoder", "EncoderOptions", "Tokens", "describe", "resolve"]

log = logging.getLogger(__name__)

# Tokens per batch, padding included: measured on the processor (2,048 to 12,288 tried), so that a layer's
# intermediate values stay in cache.
_BUDGET = {"cpu": 4096, "cuda": 65536}
# Columns of a batch are a multiple of this: the processor's attention takes up to half as long again for other widths.
_STEP = 16
# What compiled code is made for; any fixed shape will do, as long as every process takes the same.
_WARM_UP = (8, 24)
_ENCODERS_OF_SEQ2SEQ = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


class Encoder:
    """A frozen backbone with its tokenizer, pooling and head.

    dim: length of a vector. similarity: "cosine" where vectors have length 1, else "dot". config: the settings that
    shape the vectors, JSON-able; fingerprint: its sha256. numerics: the numerics class in one line. startup: seconds
    to load, and of these to compile.

    threads: for the processor's products (None leaves torch's setting; Ray sets it to 1, so name it there).
    Raises InputError for a model or a setting that cannot be used.
    """

    dim: int
    similarity: Literal["cosine", "dot"]
    config: dict[str, Any]
    fingerprint: str
    numerics: str

    def __init__(
        self,
        name_or_path: str,
        options: EncoderOptions = DEFAULT_OPTIONS,
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
        recipe = read_recipe(resolve(name_or_path), options, trust_remote_code=trust_remote_code)
        self.config = settings_of(recipe, options)
        self.fingerprint = fingerprint_of(self.config)
        self._recipe = recipe
        self._tokenizer = TextTokenizer(recipe, options, trust_remote_code=trust_remote_code)
        self._head = Head(recipe, options.dimension).to(self.device).eval()
        self.dim = recipe.dim
        self.similarity = "cosine" if self._head.normalized else "dot"
        backbone = load_backbone(recipe, self.dtype, trust_remote_code).to(self.device)
        self._eager = Pooled.over(backbone, recipe).eval().requires_grad_(False)
        self._run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._eager
        compiling = time.perf_counter()
        compiled = self._compile()
        self.numerics = describe_numerics(self.device, self.dtype, compiled)
        self.startup = {"seconds": time.perf_counter() - begun, "compile_seconds": time.perf_counter() - compiling}
        log.info("%s ready in %.1f s (compiling %.1f s): %s", name_or_path, *self.startup.values(), self.numerics)

    def encode(self, texts: Sequence[str], *, side: Side = "query", task: None = None) -> np.ndarray:
        """Vectors of texts, in order: float32 [n, dim]. Passages with titles: see `compose`.

        The bytes depend on the list of texts and the numerics class alone. `task` is for prompts, which this release
        has not: anything but None is refused. Raises InputError where a vector is not finite, naming the text.
        """
        if task is not None:
            raise InputError(f"task={task!r}: this release has no prompts; leave task out")
        return self.forward(self.tokenize(texts, side=side))

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Passages' strings by the title policy; an empty title adds nothing."""
        return self._tokenizer.compose(titles, texts, self.options.title)

    def tokenize(self, texts: Sequence[str], *, side: Side) -> Tokens:
        """Token ids of texts, prefix and special tokens included; uses the processor only."""
        return self._tokenizer(texts, side=side)

    def forward(self, tokens: Tokens) -> np.ndarray:
        """Vectors of tokenised texts, in order: float32 [n, dim]; raises as `encode` does."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        pooled = torch.empty(len(tokens), self._recipe.hidden, dtype=torch.float32, device=self.device)
        recipe = self._recipe
        batches = plan(tokens.lengths, _BUDGET[self.device.type], _STEP, recipe.positions)
        with torch.no_grad():
            for rows, ids, lengths in padded(tokens, batches, side=recipe.padding_side, pad_id=self._tokenizer.pad_id):
                vectors = self._run(ids.to(self.device), lengths.to(self.device))
                pooled[torch.from_numpy(rows).to(self.device)] = vectors[: len(rows)]
            vectors = self._head(pooled).cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise InputError(
                f"the vector of text {bad[0]} (and of {len(bad) - 1} more of {len(vectors)}) is not finite: "
                f"try dtype='float32' (now: {self.numerics})"
            )
        return vectors

    def _compile(self) -> bool:
        """Compiles and warms up where the options and the machine say so; returns whether it did."""
        asked = self.options.compile
        pays = self.device.type == "cuda" or self.dtype == torch.bfloat16
        if asked == "never" or (asked == "auto" and not pays):
            return False
        from torch._inductor import config

        compiled = torch.compile(self._eager, dynamic=True, fullgraph=True)
        ids = torch.full(_WARM_UP, self._tokenizer.pad_id, device=self.device)
        lengths = torch.arange(_WARM_UP[1] - _WARM_UP[0], _WARM_UP[1], device=self.device) + 1
        try:
            # Freezing (weights packed once, in the processor's own order) is left out when given as an option of
            # torch.compile; code that fixes the number of threads would tie the bytes to it.
            freezing = self.device.type == "cpu"
            with torch.no_grad(), config.patch({"freezing": freezing, "cpp.dynamic_threads": True}):
                compiled(ids, lengths)
        except Exception as error:  # whatever the compiler stumbles over: eager is always right
            if asked == "always":
                raise
            log.warning("not compiled, so slower: %s", (str(error).strip().splitlines() or [repr(error)])[0])
            return False
        self._run = compiled
        return True


def load_backbone(recipe: Recipe, dtype: torch.dtype, trust_remote_code: bool = False, **config: Any) -> Any:
    """The backbone in `dtype`, without a language-model head or a decoder; `config` overrides what its folder says."""
    import transformers

    kind = getattr(transformers, _ENCODERS_OF_SEQ2SEQ.get(recipe.model_type, "AutoModel"))
    try:
        return kind.from_pretrained(
            recipe.backbone, dtype=dtype, trust_remote_code=trust_remote_code, **{**recipe.config_args, **config}
        )
    except (ValueError, OSError, SafetensorError) as error:
        raise InputError(f"{recipe.backbone}: {str(error).strip().splitlines()[0]}") from error
