"""Unpadded (packed) batches of BERT-family models on a CPU, which spend no time on padding.

The sequences of a batch are concatenated. The layers are called here and not through transformers' modules, whose
Python takes longer than the products of a few queries. Their weights are stored in the order in which the CPU
multiplies them. Attention is a C++ kernel: torch's takes two to three times as long for short texts.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from riptide.process import native
from riptide.retriever.forward.prompt_rows import PromptRows
from riptide.retriever.model.configuration import BERT_TYPES
from riptide.retriever.options import EncoderOptions, RerankerOptions

T = TypeVar("T")
SOURCE = Path(__file__).with_name("packing_kernel.cpp")
_LANES = 16  # The kernel's layer norm requires a width that is a multiple of this.
# Minimum tokens of a batch that make a thread worthwhile: float32 products take about eight times as long.
MIN_TOKENS = {torch.float32: 32, torch.bfloat16: 192, torch.int8: 192}
_ROWS = 512  # Weights are reordered for products of this many rows; products of other sizes are nearly as fast.

# Held while torch's number of threads is temporarily changed, and while it is read.
SETTING = threading.Lock()

log = logging.getLogger(__name__)


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Loads the kernels, compiled on first use; None if compilation fails (the reason is logged once per process)."""
    try:
        return declare(native.load_library(SOURCE))
    except OSError as error:
        log.warning("texts are encoded with padding, which takes longer: %s", error)
        return None


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the types of the kernel's functions, and returns it."""
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.riptide_attend.argtypes = [
        pointer,
        ctypes.c_int,
        long,
        pointer,
        long,
        long,
        pointer,
        *[long] * 4,
        pointer,
        pointer,
        pointer,
    ]
    library.riptide_add_and_normalize.argtypes = [
        pointer,
        pointer,
        ctypes.c_int,
        long,
        long,
        pointer,
        pointer,
        ctypes.c_float,
    ]
    library.riptide_attend.restype = library.riptide_add_and_normalize.restype = None
    return library


def uses_tiles() -> bool:
    """Whether bfloat16 attention uses the CPU's matrix tiles (AMX), which sum in another order."""
    library = load_kernel()
    return library is not None and library.riptide_tiles() == 1


def will_pack(kind: str | None, options: EncoderOptions | RerankerOptions, device: torch.device) -> bool:
    """Whether batches are packed: on a CPU with the kernel, for a supported backbone, unless compile is "always"."""
    return device.type == "cpu" and options.compile != "always" and kind in BERT_TYPES and load_kernel() is not None


def round_rows(total: int) -> int:
    """Rounds a number of tokens up to the rows of a matrix product: a multiple of 16 (a tile of the CPU) or of 32.

    oneDNN compiles a product for each number of rows, which takes as long as several products, and keeps 1,024 of them.
    """
    step = 16 if total <= 256 else 32
    return -(-total // step) * step


class Layers(Protocol):
    """The layers of a backbone over a packed batch."""

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor, prompts: KernelPrompts) -> torch.Tensor:
        """Returns the hidden states after the last layer, [t, hidden]; may overwrite the argument.

        Args:
            hidden: The hidden states before the first layer, [t, hidden].
            lengths: Tokens of each text, int64 [b].
            prompts: The prompts of the texts.
        """


class PackedBackbone(nn.Module):
    """A backbone and its pooling: (ids int64 [t], lengths int64 [b], prompts of the b rows) -> float32 [b, hidden].

    Computes no gradients. Token types, int64 [t], are all 0 unless they are given.

    Args:
        backbone: A transformers model with a `model_type` in BERT_TYPES; only its embeddings are kept.
        pooling: "cls", "mean" or "last".
        first: The usual position of a text's first token.
        make_layers: Makes the computation of all layers of the backbone's layers: `PackedLayers` or `Int8Layers`.
    """

    def __init__(self, backbone: Any, pooling: str, first: int, make_layers: Callable[[Sequence[Any]], Layers]):
        super().__init__()
        # Tables are read without their modules, which would take longer than the rows of a query.
        tables = backbone.embeddings
        self._words, self._types, self._position_rows = (
            table.weight.detach()
            for table in (tables.word_embeddings, tables.token_type_embeddings, tables.position_embeddings)
        )
        self.norm = tables.LayerNorm
        # Present in ELECTRA if embeddings and layers differ in width.
        self.project = getattr(backbone, "embeddings_project", None)
        self.layers = make_layers(backbone.encoder.layer)
        self.pooling = pooling
        self.first = first

    def forward(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        prompt: PromptRows | None = None,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self._embed(ids, self._positions(ids, lengths, prompt), types)
        hidden = self.layers(hidden, lengths, KernelPrompts.from_rows(prompt, len(lengths)))
        if self.pooling == "mean":
            return torch.segment_reduce(hidden.float(), "mean", lengths=lengths)
        ends = lengths.cumsum(0)
        return hidden.index_select(0, ends - lengths if self.pooling == "cls" else ends - 1).float()

    def _positions(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None) -> torch.Tensor:
        """Returns the position of each token, int64 [t].

        RoBERTa-family models do not count padding tokens, which a text may contain as well. numpy takes less time than
        torch for a few tokens.
        """
        counts = lengths.numpy()
        before = counts.cumsum() - counts
        is_counted = None if self.first == 0 else ids.numpy() != self.first - 1
        if is_counted is None:
            positions = np.arange(len(ids))
        else:
            positions = is_counted.cumsum()
            before = (positions - is_counted)[before]
        if prompt is not None and prompt.position_offsets is not None:
            before = before - prompt.position_offsets.numpy()
        positions = positions - before.repeat(counts)
        return torch.from_numpy(positions if is_counted is None else positions * is_counted + self.first - 1)

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        hidden = self._words.index_select(0, ids)
        hidden += self._types[0] if types is None else self._types.index_select(0, types)
        hidden += self._position_rows.index_select(0, positions)
        hidden = self.norm(hidden)
        return hidden if self.project is None else self.project(hidden)


class KernelPrompts(NamedTuple):
    """The prompts of a batch in the form of the kernel's arguments.

    table: as in PromptRows; None: there are no prompts. rows: the prompt of each row, int64 [b]. lengths: int64
    [prompts].
    """

    table: torch.Tensor | None
    rows: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def from_rows(cls, prompt: PromptRows | None, batch: int) -> KernelPrompts:
        nothing = torch.zeros(batch, dtype=torch.int64)
        if prompt is None:
            return cls(None, nothing, nothing)
        table = prompt.table if prompt.table.stride(-1) == 1 else prompt.table.contiguous()
        lengths = (
            torch.full((table.shape[2],), table.shape[4], dtype=torch.int64)
            if prompt.is_prompt_token is None
            else prompt.is_prompt_token.sum(1)
        )
        return cls(table, nothing if prompt.rows is None else prompt.rows.contiguous(), lengths)

    def layer_arguments(self, layer: int) -> tuple[int | None, ...]:
        """Returns the kernel's arguments for a layer: addresses of its numbers, rows and lengths, and four strides."""
        if self.table is None:
            return None, 0, 0, 0, 0, None, None
        numbers = self.table[layer]
        return numbers.data_ptr(), *numbers.stride()[:4], self.rows.data_ptr(), self.lengths.data_ptr()


def inward_projection(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and biases of queries, keys and values together: [3 * hidden, hidden] and [3 * hidden]."""
    together = [attention.query, attention.key, attention.value]
    weight, bias = (torch.cat([getattr(one, name).detach() for one in together]) for name in ("weight", "bias"))
    return weight, bias


def attend(
    inward: torch.Tensor,
    lengths: torch.Tensor,
    total: int,
    heads: int,
    head_dim: int,
    prompts: tuple[int | None, ...],
) -> torch.Tensor:
    """Returns what each token's attention sees, [t, heads * head_dim].

    Args:
        inward: Queries, keys and values, [t, 3 * heads * head_dim]; the rows from `total` on are filler.
        lengths: Tokens of each text, int64 [b].
        total: Tokens of all texts.
        heads: The number of heads.
        head_dim: The width of a head.
        prompts: The arguments of `KernelPrompts.layer_arguments`.
    """
    seen = torch.empty(len(inward), heads * head_dim, dtype=inward.dtype)
    seen[total:] = 0
    library = load_kernel()
    assert library is not None
    library.riptide_attend(
        inward.data_ptr(),
        int(inward.dtype == torch.bfloat16),
        len(lengths),
        lengths.data_ptr(),
        heads,
        head_dim,
        *prompts,
        seen.data_ptr(),
    )
    return seen


class PackedLayers:
    """The layers of a BERT-family backbone in float32 or bfloat16: arguments and result as of `Layers`."""

    def __init__(self, layers: Sequence[Any]):
        self.layers = [PackedLayer(layer) for layer in layers]

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor, prompts: KernelPrompts) -> torch.Tensor:
        total = len(hidden)
        hidden = functional.pad(hidden, (0, 0, 0, round_rows(total) - total))
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, lengths, total, prompts.layer_arguments(number))
        return hidden[:total]


class PackedLayer:
    """A BERT layer: self-attention with its output projection, then the feed-forward network."""

    def __init__(self, layer: Any):
        own, out = layer.attention.self, layer.attention.output
        self.heads, self.head_dim = own.num_attention_heads, own.attention_head_size
        self.inward = PackedLinear(*inward_projection(own))
        self.outward = PackedLinear(out.dense.weight, out.dense.bias)
        self.after_attention = _Norm(out.LayerNorm)
        act = layer.intermediate.intermediate_act_fn
        gelu = type(act).__name__ == "GELUActivation"
        self.widen = PackedLinear(layer.intermediate.dense.weight, layer.intermediate.dense.bias, gelu)
        self.act = None if gelu else act
        self.narrow = PackedLinear(layer.output.dense.weight, layer.output.dense.bias)
        self.at_end = _Norm(layer.output.LayerNorm)

    def __call__(
        self, hidden: torch.Tensor, lengths: torch.Tensor, total: int, prompts: tuple[int | None, ...]
    ) -> torch.Tensor:
        """Computes the hidden states after the layer, [t, hidden].

        Args:
            hidden: [t, hidden]; the rows from `total` on are filler.
            lengths: Tokens of each text, int64 [b].
            total: Tokens of all texts.
            prompts: The arguments of `KernelPrompts.layer_arguments`.
        """
        seen = attend(self.inward(hidden), lengths, total, self.heads, self.head_dim, prompts)
        hidden = self.after_attention(self.outward(seen), hidden)
        wide = self.widen(hidden)
        return self.at_end(self.narrow(wide if self.act is None else self.act(wide)), hidden)


class _Norm:
    """Layer norm of the sum of two tensors in one pass; overwrites the first tensor."""

    def __init__(self, norm: nn.LayerNorm):
        self.norm = norm
        self.weight, self.bias = norm.weight.detach().contiguous(), norm.bias.detach().contiguous()

    def __call__(self, values: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        library = load_kernel()
        assert library is not None
        if values.shape[-1] % _LANES or self.weight.dtype != values.dtype:
            return self.norm(values + added)
        library.riptide_add_and_normalize(
            values.data_ptr(),
            added.data_ptr(),
            int(values.dtype == torch.bfloat16),
            *values.shape,
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            self.norm.eps,
        )
        return values


def takes_reordered(dtype: torch.dtype) -> bool:
    """Whether matrix products on this CPU accept reordered weights of a dtype."""
    mkldnn = torch.backends.mkldnn
    return bool(
        mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


class PackedLinear:
    """x W^T + b, then GELU if requested; the weights are stored in the memory layout of the CPU's products.

    Only this class and `takes_reordered` use torch's private operators for oneDNN, which its own compiler uses.
    On one core of an AMD CPU with AVX-512 BF16, at widths from 384 to 3,072, products of 16 and 224 rows are 2.2 to
    2.8 times as fast as `functional.linear` in float32, and 1.05 to 1.44 times in bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, gelu: bool = False):
        self.reordered = takes_reordered(weight.dtype)
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self.reordered else weight
        self.bias = bias.detach()
        self.gelu = gelu

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if not self.reordered:
            product = functional.linear(values, self.weight, self.bias)
            return functional.gelu(product) if self.gelu else product
        after: tuple[str, list[float], str] = ("gelu", [], "none") if self.gelu else ("none", [], "")
        return torch.ops.mkldnn._linear_pointwise.default(values, self.weight, self.bias, *after)


def compute_alone() -> None:
    """Makes the calling thread compute single-threaded products from now on, so that a ThreadTeam may work in it."""
    with SETTING:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        # Later threads copy the number that was set last, so a thread that ends at once sets the former one.
        restore = threading.Thread(target=torch.set_num_threads, args=(others,))
        try:
            restore.start()
        except RuntimeError:  # the process may have no more threads
            torch.set_num_threads(others)
        else:
            restore.join()


class ThreadTeam:
    """Threads that each compute single-threaded products, so that results do not depend on the number of threads.

    If several threads share a product, each sums a part of it, and their number decides how the sum is rounded.
    """

    def __init__(self, size: int):
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="encoder")
        together = threading.Barrier(size, timeout=60)

        def begin(_: int) -> None:
            # The first call in a thread copies the process's number, which would override the next line.
            torch.get_num_threads()
            torch.set_num_threads(1)
            together.wait()

        with SETTING:
            try:
                list(self._threads.map(begin, range(size)))
            finally:
                torch.set_num_threads(size)

    def run(self, function: Callable[[T], None], items: Sequence[T]) -> None:
        """Calls function(item) for all items; raises the first exception after all calls have ended.

        The calling thread computes a single item if its products are single-threaded too (`compute_alone`), as waking
        another thread takes a tenth of the time of a lone query's encoding.
        """
        if len(items) == 1 and torch.get_num_threads() == 1:
            function(items[0])
            return
        futures = [self._threads.submit(function, item) for item in items]
        wait(futures)
        for future in futures:
            future.result()
