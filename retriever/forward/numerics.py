"""Which arithmetic a process uses: dtype, processor, instruction set; packed, compiled or eager."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Literal

import torch

from retriever.forward.packing import in_tiles, packs, reorders
from retriever.options import EncoderOptions

Mode = Literal["packed", "compiled", "eager"]


def choose_device(device: str | None) -> torch.device:
    """The device asked for, else CUDA where there is one, else the processor."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where its products run in hardware (CUDA from Ampere on, AMX, AVX512-BF16), else float32."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor: "intel", "amd", …; "unknown" where the system does not tell (ARM, macOS).

    Libraries take other code paths, and so other roundings, per vendor at the same instruction set.
    """
    try:
        found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found.group(1).lower() if found else "unknown"
    return {"genuineintel": "intel", "authenticamd": "amd", "hygongenuine": "hygon"}.get(name, name)


def describe_numerics(device: torch.device, dtype: torch.dtype, mode: Mode = "eager") -> str:
    """The numerics class in one line: vectors are byte-identical within one, and close (cosine 0.9999) across."""
    if device.type == "cuda":
        unit = f"cuda {torch.cuda.get_device_name(device)}"
    elif dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        unit = f"cpu {cpu_vendor()} amx"
    elif dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        unit = f"cpu {cpu_vendor()} avx512_bf16"
    else:
        vendor = f"cpu {cpu_vendor()}" if device.type == "cpu" else device.type
        unit = f"{vendor} {torch.backends.cpu.get_cpu_capability().lower()}"
    name = str(dtype).removeprefix("torch.")
    way = ""
    if mode == "packed" and dtype == torch.bfloat16 and in_tiles():
        way = " tiles"
    elif mode == "packed" and dtype == torch.float32 and reorders(dtype):
        way = " reordered"
    return f"{unit} {name} {mode}{way} torch-{torch.__version__}"


def compiles(options: EncoderOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an encoder of these options compiles: when told to, or where it pays and a compiler is there."""
    if options.compile != "auto":
        return options.compile == "always"
    return device.type == "cuda" or (dtype == torch.bfloat16 and shutil.which("g++") is not None)


def expected_numerics(options: EncoderOptions, device: str | None, kind: str | None = None) -> str:
    """The numerics class of an encoder on this machine, without loading one. kind: the backbone's `model_type`, where
    it may be one whose texts go end to end."""
    chosen = choose_device(device)
    dtype = choose_dtype(options.dtype, chosen)
    if packs(kind, options, chosen):
        return describe_numerics(chosen, dtype, "packed")
    return describe_numerics(chosen, dtype, "compiled" if compiles(options, chosen, dtype) else "eager")
