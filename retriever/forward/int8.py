"""BERT layers whose matrix products multiply 8-bit integers on the CPU; everything else is float32.

Weights have one scale per output, activations one scale and zero point per token, computed during quantisation, so that
no calibration data is needed. Sums of integers are exact, so that the vector of a text depends neither on the other
texts of its batch nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from riptide.base import native
from riptide.retriever.forward.packing import inward_projection

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
    library.riptide_int8_after_attention.argtypes = [pointer, pointer, long, pointer, pointer, ctypes.c_float]
    library.riptide_int8_attend.argtypes = [pointer, long, pointer, long, long, pointer, *[long] * 4, *[pointer] * 3]
    library.riptide_int8_attend.restype = None
    library.riptide_int8_pack.restype = library.riptide_int8_linear.restype = None
    library.riptide_int8_after_attention.restype = None
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


class Int8Layer:
    """A BERT layer in int8; as `PackedLayer`, which is float32 or bfloat16.

    Args:
        layer: The layer of transformers, float32, with GELU.
    """

    def __init__(self, layer: Any):
        own, out = layer.attention.self, layer.attention.output
        self.heads, self.head_dim = own.num_attention_heads, own.attention_head_size
        self.inward = Int8Linear(*inward_projection(own))
        after = (out.dense, layer.intermediate.dense, layer.output.dense)
        self.after = [Int8Linear(one.weight, one.bias) for one in after]
        self._linears = (_KernelLinear * 3)(*(one.struct for one in self.after))
        norms: tuple[nn.LayerNorm, nn.LayerNorm] = (out.LayerNorm, layer.output.LayerNorm)
        self._norms = [getattr(norm, name).detach().contiguous() for norm in norms for name in ("weight", "bias")]
        self._norm_pointers = (ctypes.c_void_p * 4)(*(numbers.data_ptr() for numbers in self._norms))
        self._epsilon = norms[0].eps

    def __call__(
        self, hidden: torch.Tensor, lengths: torch.Tensor, total: int, prompts: tuple[int | None, ...]
    ) -> torch.Tensor:
        """Computes the hidden states after the layer in place; arguments as of `PackedLayer`."""
        inward = self.inward(hidden)
        seen = torch.empty_like(hidden)
        seen[total:] = 0
        kernel = load_kernel()
        kernel.riptide_int8_attend(
            inward.data_ptr(),
            len(lengths),
            lengths.data_ptr(),
            self.heads,
            self.head_dim,
            *prompts,
            seen.data_ptr(),
        )
        kernel.riptide_int8_after_attention(
            hidden.data_ptr(), seen.data_ptr(), len(hidden), self._linears, self._norm_pointers, self._epsilon
        )
        return hidden
