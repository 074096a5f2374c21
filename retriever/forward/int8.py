"""BERT layers whose matrix products multiply 8-bit integers on the CPU; everything else is float32.

Weights have one scale per output, activations one scale and zero point per token, computed during quantisation, so that
no calibration data is needed. Sums of integers are exact, so that the states of a text depend neither on the other
texts of its batch nor on the number of threads. Products outside of the layers are float32, and do depend on the batch:
ELECTRA's projection of embeddings, and a model's dense layers after pooling.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from riptide.process import native
from riptide.retriever.forward.packing import KernelPrompts, inward_projection

SOURCE = Path(__file__).with_name("int8_kernel.cpp")
_LARGEST = 127  # magnitude of quantised weights


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """Loads the kernel, compiled on first use. Raises OSError if that fails."""
    return declare(native.load_library(SOURCE))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the types of the kernel's functions, and returns it."""
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.riptide_int8_pack.argtypes = [pointer, long, long, pointer]
    library.riptide_int8_linear.argtypes = [pointer, long, pointer, pointer]
    prompts: list[Any] = [pointer, *[long] * 4, pointer, pointer]
    library.riptide_int8_attend.argtypes = [pointer, long, pointer, long, long, *prompts, pointer]
    library.riptide_int8_layers.argtypes = [pointer, pointer, long, ctypes.c_float, long, pointer, long, *prompts, long]
    library.riptide_int8_attend.restype = library.riptide_int8_layers.restype = None
    library.riptide_int8_pack.restype = library.riptide_int8_linear.restype = None
    return library


class _KernelLinear(ctypes.Structure):
    """The kernel's struct of a linear layer."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
    ]


class Int8Linear:
    """The quantised weights of x W^T + b, in the kernel's order.

    Args:
        weight: float32 [outer, inner].
        bias: float32 [outer].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        weight = weight.detach().float()
        library = load_kernel()
        self.scales = weight.abs().amax(1) / _LARGEST
        quantised = (weight / self.scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        self.sums = quantised.sum(1, dtype=torch.int32)
        self.bias = bias.detach().float().contiguous()
        outer, inner = weight.shape
        memory = torch.empty(weight.numel() + 64, dtype=torch.int8)
        start = -memory.data_ptr() % 64  # registers are loaded from whole cache lines
        self.weights = memory[start : start + weight.numel()]
        library.riptide_int8_pack(quantised.contiguous().data_ptr(), outer, inner, self.weights.data_ptr())
        self.struct = _KernelLinear(
            self.weights.data_ptr(), self.sums.data_ptr(), self.scales.data_ptr(), self.bias.data_ptr(), inner, outer
        )

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Computes float32 [rows, outer] of float32 [rows, inner]."""
        out = torch.empty(len(values), self.struct.outer)
        load_kernel().riptide_int8_linear(values.data_ptr(), len(values), ctypes.byref(self.struct), out.data_ptr())
        return out


class _KernelLayer(ctypes.Structure):
    """The kernel's struct of a layer."""

    _fields_ = [
        *((name, _KernelLinear) for name in ("inward", "outward", "widen", "narrow")),
        ("norms", ctypes.c_void_p * 4),
    ]


class Int8Layers:
    """The layers of a BERT-family backbone in int8: arguments and result as of `Layers`.

    Args:
        layers: The layers of transformers, float32, with GELU.
    """

    def __init__(self, layers: Sequence[Any]):
        self._heads = layers[0].attention.self.num_attention_heads
        self._epsilon = layers[0].attention.output.LayerNorm.eps
        self._linears: list[Int8Linear] = []  # these and the next hold the memory that the kernel reads
        self._norms: list[torch.Tensor] = []
        self._layers = (_KernelLayer * len(layers))(*map(self._convert, layers))

    def _convert(self, layer: Any) -> _KernelLayer:
        out = layer.attention.output
        after = [(one.weight, one.bias) for one in (out.dense, layer.intermediate.dense, layer.output.dense)]
        linears = [Int8Linear(*one) for one in (inward_projection(layer.attention.self), *after)]
        norms: tuple[nn.LayerNorm, nn.LayerNorm] = (out.LayerNorm, layer.output.LayerNorm)
        numbers = [getattr(norm, name).detach().contiguous() for norm in norms for name in ("weight", "bias")]
        self._linears += linears
        self._norms += numbers
        return _KernelLayer(
            *(one.struct for one in linears), (ctypes.c_void_p * 4)(*(one.data_ptr() for one in numbers))
        )

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor, prompts: KernelPrompts) -> torch.Tensor:
        load_kernel().riptide_int8_layers(
            hidden.data_ptr(),
            self._layers,
            len(self._layers),
            self._epsilon,
            len(lengths),
            lengths.data_ptr(),
            self._heads,
            *prompts.layer_arguments(0),
            0 if prompts.table is None else prompts.table.stride(0),
        )
        return hidden
