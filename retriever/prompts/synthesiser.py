"""The network that computes a query's prompt from the query's words (HYPER, section 3.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape, separate_prompt_rows, to_attention_axes
from riptide.retriever.options.synthesis import SynthesisOptions

# Bytes of prompts that the prefix encoder computes at a time on a CPU, so that they are still in cache when their axes
# are reordered for attention.
_CACHE = 1 << 20


class SynthesisResult(NamedTuple):
    """Prompts that a synthesiser computed for a batch of queries, and the weights of the basic prompts.

    Attributes:
        rows: The prompts, one for each query.
        weights: The weight of each basic prompt, float32 [b, N], rows of sum 1.
    """

    rows: PromptRows
    weights: torch.Tensor


class Synthesiser(nn.Module):
    """Mixes N basic prompts, weighted by the words of a query, into keys and values of all layers.

    With x the maximum of the query's word embeddings, q = LayerNorm(W2^T GELU(W1 x)) (Eq. 1), and p^_i the maximum of
    basic prompt i over its tokens, the weights are a = softmax(q . p^_i / tau) (Eq. 2). The prefix encoder
    W_up tanh(W_dp p), position by position (Eq. 3), reads the sum of a_i p_i (mix "before"); or it reads each basic
    prompt, and the sum is over its outputs (mix "after"). No linear layer has a bias.

    Args:
        shape: The shape of the backbone's keys and values.
        width: Length of a word's embedding (d).
        options: Numbers, lengths and sizes.
    """

    def __init__(self, shape: PromptShape, width: int, options: SynthesisOptions):
        super().__init__()
        self.shape, self.options = shape, options
        # Initial values are between 0 and 1, as in the authors' code, so that all weights are nearly equal at first.
        self.basic = nn.Parameter(torch.rand(options.prompts, options.length, width))
        self.adapter = nn.Sequential(
            nn.Linear(width, options.hidden, bias=False), nn.GELU(), nn.Linear(options.hidden, width, bias=False)
        )
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, options.bottleneck, bias=False)
        self.up = nn.Linear(options.bottleneck, 2 * shape.layers * shape.heads * shape.head_dim, bias=False)

    def forward(self, words: torch.Tensor) -> SynthesisResult:
        """Computes the prompts of queries and the weights of the basic prompts.

        Args:
            words: The maximum of each query's word embeddings, float32 [b, d]; see `max_embedding`.
        """
        weights = mixture_weights(words, self.keys(), (self.adapter, self.norm), self.options)
        if self.options.mix == "before":
            numbers = self.up(self.down(_mix(weights, self.basic)).tanh())
        else:
            numbers = _mix(weights, self.encode_basic_prompts())
        return SynthesisResult(separate_prompt_rows(numbers, self.shape), weights)

    def keys(self) -> torch.Tensor:
        """Returns the keys to which queries are compared: the maximum of each basic prompt over its tokens, [N, d]."""
        return self.basic.amax(1)

    def encode_basic_prompts(self) -> torch.Tensor:
        """Returns the prefix encoder's output for each basic prompt, [N, m, layers * 2 * heads * head_dim]."""
        numbers: torch.Tensor = self.up(self.down(self.basic).tanh())
        return numbers


class KeptSynthesiser:
    """A trained synthesiser for serving, which precomputes everything that does not depend on the query.

    With mix "after" it keeps the outputs of the prefix encoder for all basic prompts. With mix "before" it keeps the
    outputs of the prefix encoder's first layer, which is linear. It gives the same prompts as the trained module,
    within rounding.

    Args:
        trained: The trained module.
        dtype: The dtype of the prompts.
        device: Their device.
    """

    def __init__(self, trained: Synthesiser, dtype: torch.dtype, device: torch.device):
        self.shape, self.options = trained.shape, trained.options
        with torch.no_grad():
            self._keys = trained.keys().to(device)
            # With mix "after", the bank is [N, layers * 2 * heads * m * head_dim], with axes in the order of attention.
            if self.options.mix == "after":
                self._bank = (
                    to_attention_axes(trained.encode_basic_prompts(), self.shape)
                    .to(device, dtype)
                    .flatten(1)
                    .contiguous()
                )
                self._up = None
            else:
                self._bank = trained.down(trained.basic).to(device, dtype)
                self._up = trained.up.weight.detach().to(device, dtype)
        # The layers that compute the weights; the basic prompts are not needed for that.
        self._network = copy.deepcopy(nn.ModuleList([trained.adapter, trained.norm])).to(device).requires_grad_(False)

    def weights(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the weights of the basic prompts (Eq. 1 and 2), float32 [b, N].

        Args:
            words: As in `Synthesiser.forward`.
        """
        with torch.no_grad():
            return mixture_weights(words, self._keys, self._network, self.options)

    def fill(self, words: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the prompts of queries to `out`, and returns the weights of the basic prompts, float32 [b, N].

        Args:
            words: As in `Synthesiser.forward`.
            out: [b, layers, 2, heads, m, head_dim], which is overwritten; it may be a part of a larger tensor.
        """
        weights = self.weights(words)
        with torch.no_grad():
            rounded = weights.to(self._bank.dtype)
            if self._up is not None:
                hidden = _mix(rounded, self._bank).tanh()
                size = out[0].numel() * out.element_size()
                step = max(1, _CACHE // size) if out.device.type == "cpu" else len(out)
                for some in map(slice, range(0, len(out), step), range(step, len(out) + step, step)):
                    out[some] = to_attention_axes(hidden[some] @ self._up.T, self.shape)
            elif out.is_contiguous():
                torch.mm(rounded, self._bank, out=out.view(len(out), -1))
            else:
                out.copy_((rounded @ self._bank).view(out.shape))
        return weights

    def __call__(self, words: torch.Tensor) -> SynthesisResult:
        """Computes the prompts of queries; arguments as in `Synthesiser.forward`."""
        layers, heads, head_dim = self.shape
        numbers = self._bank.new_empty((len(words), layers, 2, heads, self.options.length, head_dim))
        weights = self.fill(words, numbers)
        rows = PromptRows(numbers.permute(1, 2, 0, 3, 4, 5), torch.arange(len(words), device=numbers.device))
        return SynthesisResult(rows, weights)


def mixture_weights(
    words: torch.Tensor, keys: torch.Tensor, network: Iterable[Callable[..., torch.Tensor]], options: SynthesisOptions
) -> torch.Tensor:
    """Returns the weight of each basic prompt (Eq. 1 and 2), [b, N]; each row sums to 1.

    Args:
        words: The maximum of each query's word embeddings, [b, d].
        keys: The maximum of each basic prompt over its tokens, [N, d].
        network: The layers over `words`.
        options: The temperature, and whether the weights depend on the query.
    """
    if options.attention == "uniform":
        return words.new_full((len(words), options.prompts), 1 / options.prompts)
    for layer in network:
        words = layer(words)
    return torch.softmax(words @ keys.T / options.temperature, 1)


def max_embedding(embeddings: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the element-wise maximum of each query's word embeddings: float32 [b, d], without gradients.

    Args:
        embeddings: The embeddings of the tokens, [b, n, d].
        counts: Whether a token counts: bool [b, n]; not at padding. At least one token of each query counts.
    """
    return embeddings.detach().float().masked_fill(~counts[..., None], float("-inf")).amax(1)


def _mix(weights: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sums of prompts: [b, N] and [N, m, width] -> [b, m, width]."""
    return (weights @ prompts.flatten(1)).unflatten(1, prompts.shape[1:])
