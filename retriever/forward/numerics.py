"""Describes the arithmetic of a process: dtype, CPU vendor, instruction set, and packed, compiled or eager batches."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Literal

import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.forward import int8
from riptide.retriever.forward.packing import takes_reordered, uses_tiles, will_pack
from riptide.retriever.options import EncoderOptions

Mode = Literal["packed", "compiled", "eager"]


def choose_device(device: str | None) -> torch.device:
    """Returns the torch device of a name; None: CUDA if available, else the CPU. Raises InputError for unknown ones."""
    try:
        return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise InputError(f"device {device!r}: expected cpu, cuda or cuda:N") from None


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of matrix products by its name: "float32", "bfloat16", "int8" or "auto".

    "auto" is bfloat16 if the hardware multiplies it (CUDA from Ampere on, AMX, AVX512-BF16), else float32.

    Raises:
        InputError: If this machine has no int8: it is computed on the CPU, by a kernel that has to be compiled.
    """
    if name == "int8":
        try:
            if device.type != "cpu":
                raise OSError(f"it is computed on the CPU, and the device is {device}")
            int8.load_kernel()
        except OSError as error:
            raise InputError(f"{Parameter('dtype', 'int8')}: {error}; use bfloat16 or float32") from None
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[name]
    if device.type == "cuda":
        is_fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        is_fast = bfloat16_instructions() is not None
    return torch.bfloat16 if is_fast else torch.float32


def bfloat16_instructions() -> str | None:
    """Returns the CPU's fastest instruction set for bfloat16 products: "amx" or "avx512_bf16"; None if it has none."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_tile"):
        return "amx"
    return "avx512_bf16" if capabilities.get("avx512_bf16") else None


@functools.cache
def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the vendor of the CPU: "intel", "amd", …; "unknown" if the system does not report one (ARM, macOS).

    With the same instruction set, libraries take other code paths for each vendor, and round differently.
    """
    try:
        match = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    name = match.group(1).lower() if match else "unknown"
    return {"genuineintel": "intel", "authenticamd": "amd", "hygongenuine": "hygon"}.get(name, name)


def describe_numerics(device: torch.device, dtype: torch.dtype, mode: Mode = "eager") -> str:
    """Returns the numerics class. Vectors of one class are byte-identical; those of two classes differ by rounding."""
    if device.type == "cuda":
        unit = f"cuda {torch.cuda.get_device_name(device)}"
    elif dtype == torch.bfloat16 and (instructions := bfloat16_instructions()):
        unit = f"cpu {cpu_vendor()} {instructions}"
    else:
        vendor = f"cpu {cpu_vendor()}" if device.type == "cpu" else device.type
        unit = f"{vendor} {torch.backends.cpu.get_cpu_capability().lower()}"
    name = str(dtype).removeprefix("torch.")
    order = ""  # suffix of the class if the order of summation differs
    if mode == "packed" and dtype == torch.bfloat16 and uses_tiles():
        order = " tiles"
    elif mode == "packed" and dtype == torch.float32 and takes_reordered(dtype):
        order = " reordered"
    return f"{unit} {name} {mode}{order} torch-{torch.__version__}"


def will_compile(options: EncoderOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an encoder with these options compiles; "auto": if compilation makes it faster and a compiler exists."""
    if options.compile != "auto":
        return options.compile == "always"
    return device.type == "cuda" or (dtype == torch.bfloat16 and shutil.which("g++") is not None)


def expected_numerics(options: EncoderOptions, device: str | None, kind: str | None = None) -> str:
    """Returns the numerics class that an encoder would have on this machine, without loading it.

    Args:
        options: The options of the encoder.
        device: As of `choose_device`.
        kind: The `model_type` of the backbone, which decides whether its batches are packed; None: they are not.
    """
    chosen = choose_device(device)
    dtype = choose_dtype(options.dtype, chosen)
    if dtype == torch.int8 or will_pack(kind, options, chosen):
        return describe_numerics(chosen, dtype, "packed")
    return describe_numerics(chosen, dtype, "compiled" if will_compile(options, chosen, dtype) else "eager")
