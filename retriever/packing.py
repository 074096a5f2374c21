"""BERT and its kin without padding: on a processor, what is not computed for padding is time that is not spent.

Texts stand end to end. The layers are called here and not through transformers' modules, whose Python alone takes
longer than the products of a few questions; their weights are kept in the order in which the processor multiplies
them, and attention is a kernel of our own: torch's takes two to three times as long where texts are short.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional

from retriever import native
from retriever.attention import PromptRows
from retriever.options import EncoderOptions

T = TypeVar("T")
# Kinds of backbone (`model_type`) that have BERT's layers.
PACKABLE = frozenset({"bert", "electra", "roberta", "xlm-roberta", "camembert"})
SOURCE = Path(__file__).with_name("packing_kernel.cpp")
_LANES = 16  # of the kernel: what it normalises is a multiple of them wide
_ROWS = 512  # of a product, for which the order of the weights is chosen; it serves all others nearly as well

# Held while torch's number of threads is another for a moment, and by who asks for it.
SETTING = threading.Lock()

log = logging.getLogger(__name__)


@functools.cache
def kernel() -> ctypes.CDLL | None:
    """Attention, compiled on first use, or None where it cannot be (the reason is logged once per process)."""
    try:
        library = native.load(SOURCE)
    except OSError as error:
        log.warning("texts are encoded with padding, which takes longer: %s", error)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.riptide_attend.argtypes = [
        pointer, ctypes.c_int, long, pointer, long, long, pointer, *[long] * 4, pointer, pointer, pointer
    ]  # fmt: skip
    library.riptide_add_and_normalize.argtypes = [
        pointer, pointer, ctypes.c_int, long, long, pointer, pointer, ctypes.c_float
    ]  # fmt: skip
    library.riptide_attend.restype = library.riptide_add_and_normalize.restype = None
    return library


def in_tiles() -> bool:
    """Whether attention of bfloat16 goes in the processor's tiles, which sum in another order."""
    library = kernel()
    return library is not None and library.riptide_tiles() == 1


def packs(kind: str | None, options: EncoderOptions, device: torch.device) -> bool:
    """Whether texts go end to end: on a processor that the kernel runs on, where the kind of backbone allows it, unless
    compiled code is asked for."""
    return device.type == "cpu" and options.compile != "always" and kind in PACKABLE and kernel() is not None


def rounded(total: int) -> int:
    """How many rows stand for so many tokens in a product: oneDNN compiles one for each number that it meets, which
    takes as long as several products, and keeps 1,024 of them. A tile of the processor has 16 rows."""
    step = 16 if total <= 256 else 32
    return -(-total // step) * step


class Packed(nn.Module):
    """A backbone and its pooling: (ids int64 [t], lengths int64 [b], prompts of the b rows) -> float32 [b, hidden].

    Without gradients. backbone: a transformers model of a kind that is PACKABLE; only its embeddings are kept. first:
    the position of a text's first token.
    """

    def __init__(self, backbone: Any, pooling: str, first: int):
        super().__init__()
        self.embeddings = backbone.embeddings
        self.project = getattr(backbone, "embeddings_project", None)  # ELECTRA's, where the two widths differ
        self.layers = [_Layer(layer) for layer in backbone.encoder.layer]
        self.pooling = pooling
        self.first = first

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None = None) -> torch.Tensor:
        ends = lengths.cumsum(0)
        starts = ends - lengths
        hidden = self._embedded(ids, self._positions(ids, lengths, starts))
        total = len(hidden)
        hidden = functional.pad(hidden, (0, 0, 0, rounded(total) - total))
        seen = _Prompts.of(prompt, len(lengths))
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, lengths, total, seen.at(number))
        hidden = hidden[:total]
        if self.pooling == "mean":
            return torch.segment_reduce(hidden.float(), "mean", lengths=lengths)
        return hidden.index_select(0, starts if self.pooling == "cls" else ends - 1).float()

    def _positions(self, ids: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Of each token. RoBERTa and its kin pass over padding tokens, which a text that spells one has too."""
        if self.first == 0:
            return torch.arange(len(ids)) - starts.repeat_interleave(lengths)
        counted = (ids != self.first - 1).long()
        numbers = counted.cumsum(0)
        before = (numbers - counted).index_select(0, starts)
        return (numbers - before.repeat_interleave(lengths)) * counted + self.first - 1

    def _embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        made = self.embeddings
        hidden = made.word_embeddings(ids) + made.token_type_embeddings.weight[0] + made.position_embeddings(positions)
        hidden = made.LayerNorm(hidden)
        return hidden if self.project is None else self.project(hidden)


class _Prompts(NamedTuple):
    """What the kernel is told of a batch's prompts. table: as PromptRows has it; None: there are none. rows: int64 [b],
    which of them; lengths: int64, of each."""

    table: torch.Tensor | None
    rows: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, prompt: PromptRows | None, batch: int) -> _Prompts:
        nothing = torch.zeros(batch, dtype=torch.int64)
        if prompt is None:
            return cls(None, nothing, nothing)
        table = prompt.table if prompt.table.stride(-1) == 1 else prompt.table.contiguous()
        lengths = (
            torch.full((table.shape[2],), table.shape[4], dtype=torch.int64)
            if prompt.inside is None
            else prompt.inside.sum(1)
        )
        return cls(table, nothing if prompt.rows is None else prompt.rows.contiguous(), lengths)

    def at(self, layer: int) -> tuple[int | None, ...]:
        """Of one layer: where its numbers are, the strides of kinds, prompts, heads and columns; rows, lengths."""
        if self.table is None:
            return None, 0, 0, 0, 0, None, None
        numbers = self.table[layer]
        return numbers.data_ptr(), *numbers.stride()[:4], self.rows.data_ptr(), self.lengths.data_ptr()


class _Layer:
    """One of BERT's layers: attention and its output, then the two products between which the width is larger."""

    def __init__(self, layer: Any):
        own, out = layer.attention.self, layer.attention.output
        together = [own.query, own.key, own.value]
        self.heads, self.head_dim = own.num_attention_heads, own.attention_head_size
        weight, bias = (torch.cat([getattr(one, name) for one in together]) for name in ("weight", "bias"))
        self.inward = _Linear(weight, bias)
        self.outward = _Linear(out.dense.weight, out.dense.bias)
        self.after_attention = _Norm(out.LayerNorm)
        act = layer.intermediate.intermediate_act_fn
        gelu = type(act).__name__ == "GELUActivation"
        self.widen = _Linear(layer.intermediate.dense.weight, layer.intermediate.dense.bias, gelu)
        self.act = None if gelu else act
        self.narrow = _Linear(layer.output.dense.weight, layer.output.dense.bias)
        self.at_end = _Norm(layer.output.LayerNorm)

    def __call__(
        self, hidden: torch.Tensor, lengths: torch.Tensor, total: int, prompts: tuple[int | None, ...]
    ) -> torch.Tensor:
        """hidden [t, hidden] -> the same; lengths: int64 [b] of the texts in the first `total` rows, the rest fills up;
        prompts: as the kernel takes them."""
        inward = self.inward(hidden)
        seen = torch.empty_like(hidden)
        seen[total:] = 0
        library = kernel()
        assert library is not None
        library.riptide_attend(
            inward.data_ptr(), int(inward.dtype == torch.bfloat16), len(lengths), lengths.data_ptr(), self.heads,
            self.head_dim, *prompts, seen.data_ptr(),
        )  # fmt: skip
        hidden = self.after_attention(self.outward(seen), hidden)
        wide = self.widen(hidden)
        return self.at_end(self.narrow(wide if self.act is None else self.act(wide)), hidden)


class _Norm:
    """The sum of two tensors, normalised, in one go over both; the first one's memory is used for it."""

    def __init__(self, norm: nn.LayerNorm):
        self.norm = norm
        self.weight, self.bias = norm.weight.detach().contiguous(), norm.bias.detach().contiguous()

    def __call__(self, values: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        library = kernel()
        assert library is not None
        if values.shape[-1] % _LANES or self.weight.dtype != values.dtype:
            return self.norm(values + added)
        library.riptide_add_and_normalize(
            values.data_ptr(), added.data_ptr(), int(values.dtype == torch.bfloat16), *values.shape,
            self.weight.data_ptr(), self.bias.data_ptr(), self.norm.eps,
        )  # fmt: skip
        return values


def reorders(dtype: torch.dtype) -> bool:
    """Whether this processor's products take reordered weights."""
    mkldnn = torch.backends.mkldnn
    return bool(
        mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


class _Linear:
    """x W^T + b, then GELU; the weights are kept as the processor's products take them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, gelu: bool = False):
        self.reordered = reorders(weight.dtype)
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self.reordered else weight
        self.bias = bias.detach()
        self.gelu = gelu

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if not self.reordered:
            found = functional.linear(values, self.weight, self.bias)
            return functional.gelu(found) if self.gelu else found
        after: tuple[str, list[float], str] = ("gelu", [], "none") if self.gelu else ("none", [], "")
        return torch.ops.mkldnn._linear_pointwise.default(values, self.weight, self.bias, *after)


class Team:
    """Threads whose products each take one: a batch's numbers then do not depend on how many there are, as they do
    where several share a product and each sums a part of it."""

    def __init__(self, size: int):
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="encoder")
        together = threading.Barrier(size, timeout=60)

        def begin(_: int) -> None:
            torch.get_num_threads()  # a thread takes the number of all when it first asks; what is set then, it keeps
            torch.set_num_threads(1)
            together.wait()

        with SETTING:
            try:
                list(self._threads.map(begin, range(size)))
            finally:
                torch.set_num_threads(size)

    def run(self, function: Callable[[T], None], items: Sequence[T]) -> None:
        """function(item) of all; the first exception is raised once none is at work."""
        futures = [self._threads.submit(function, item) for item in items]
        wait(futures)
        for future in futures:
            future.result()
