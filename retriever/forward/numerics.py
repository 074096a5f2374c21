"""Describes the arithmetic of a process: dtype, CPU vendor, instruction set, and packed, compiled or eager batches."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Literal

import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process import native
from riptide.retriever.forward import int8
from riptide.retriever.forward.packing import SETTING, PackedLinear, ThreadTeam, takes_reordered, uses_tiles, will_pack
from riptide.retriever.options import EncoderOptions, RerankerOptions

Mode = Literal["packed", "compiled", "eager"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_PROBE = (512, 768, 768)  # rows, inner and outer width of the matrix product that is measured
_PROBE_SECONDS = 0.15
_MARGIN = 1.05  # float32 must be that much faster to be chosen on a CPU with bfloat16 products


def choose_device(device: str | None, dtype: str = "auto") -> torch.device:
    """Returns the torch device of a name. Raises InputError for unknown ones.

    None: CUDA if it is available and the dtype is not int8, otherwise the CPU.
    """
    try:
        return torch.device(device or ("cuda" if torch.cuda.is_available() and dtype != "int8" else "cpu"))
    except (RuntimeError, TypeError):
        raise InputError(f"device {device!r}: expected cpu, cuda or cuda:N") from None


def choose_dtype(name: str, device: torch.device, pinned: str | None = None, *, measure: bool = True) -> torch.dtype:
    """Returns the dtype of matrix products by its name.

    Args:
        name: "float32", "bfloat16", "int8" or "auto": bfloat16 if the GPU multiplies it (Ampere and later), or if the
            CPU does and is not measurably faster in float32; otherwise float32.
        device: The device.
        pinned: The numerics class that "auto" follows if this device has its dtype.
        measure: Whether "auto" may measure the CPU; if not, its flags decide.

    Raises:
        InputError: If this machine cannot compute int8, which needs a CPU and a compiler for the kernel.
    """
    if name == "int8":
        try:
            if device.type != "cpu":
                raise OSError(f"expected device cpu, found {device}")
            int8.load_kernel()
        except OSError as error:
            raise InputError(f"{Parameter('dtype', 'int8')}: {error}; use bfloat16 or float32") from None
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    if bfloat16_instructions() is None:
        return torch.float32
    if pinned is not None and pinned.startswith("cpu "):
        return torch.bfloat16 if " bfloat16 " in pinned else torch.float32
    return torch.bfloat16 if not measure or bfloat16_speed() * _MARGIN >= 1 else torch.float32


@functools.cache
def bfloat16_speed() -> float:
    """Returns the speed of this CPU's matrix products in bfloat16, relative to float32.

    CPU flags do not show which dtype is faster: some CPUs with AVX-512 BF16 multiply float32 faster. The ratio is
    measured once per machine and version of torch, in 0.15 s, and stored in the folder of the compiled kernels,
    where later processes read it.
    """
    flags, model = native.cpu_info()
    key = "\0".join((torch.__version__, model, *sorted(flags)))
    file = None
    try:
        file = native.cache_directory() / f"bfloat16-speed-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        return float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        speed = measure_bfloat16_speed()
    if file is not None:
        with contextlib.suppress(OSError):  # without the file, each process measures
            partial = file.with_name(f"{file.name}-{os.getpid()}")
            partial.write_text(f"{speed:.3f}\n", encoding="utf-8")
            partial.replace(file)
    return speed


def describe_dtype_choice(options: EncoderOptions, numerics: str) -> str | None:
    """Returns a line if dtype "auto" became another dtype than the CPU's flags suggest, or a slow one; otherwise None.

    Args:
        options: The options of the encoder.
        numerics: The numerics class that its vectors have.
    """
    if options.dtype != "auto" or not numerics.startswith("cpu ") or bfloat16_instructions() is None:
        return None
    if (speed := bfloat16_speed()) * _MARGIN >= 1:
        return None
    if " bfloat16 " in numerics:
        return (
            f"the vectors that exist have bfloat16, so the others get it too; this CPU multiplies float32 "
            f"{1 / speed:.1f} times as fast: {Parameter('dtype', 'float32')} with another {Parameter('name')} is faster"
        )
    return f"dtype auto is float32, which this CPU multiplies {1 / speed:.1f} times as fast as bfloat16"


def measure_bfloat16_speed() -> float:
    """Measures the speed of matrix products in bfloat16, relative to float32, by the CPU time of one thread."""
    rows, inner, outer = _PROBE
    products = []
    for dtype in (torch.float32, torch.bfloat16):
        values, weight, bias = (torch.ones(shape, dtype=dtype) for shape in ((rows, inner), (outer, inner), (outer,)))
        products.append((PackedLinear(weight, bias), values))
    fastest = [float("inf")] * 2

    def measure(turns: int) -> None:
        with torch.inference_mode():
            for multiply, values in products:
                multiply(values)  # oneDNN compiles the product
            end = time.thread_time() + _PROBE_SECONDS
            while turns > 0 or time.thread_time() < end:
                turns -= 1
                for number, (multiply, values) in enumerate(products):
                    started = time.thread_time()
                    multiply(values)
                    fastest[number] = min(fastest[number], time.thread_time() - started)

    with SETTING:
        threads = torch.get_num_threads()
    try:
        ThreadTeam(1).run(measure, [3])
    finally:
        with SETTING:
            torch.set_num_threads(threads)
    return fastest[0] / fastest[1]


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


def will_compile(options: EncoderOptions | RerankerOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an encoder with these options compiles; "auto": if compilation makes it faster and a compiler exists."""
    if options.compile != "auto":
        return options.compile == "always"
    return device.type == "cuda" or (dtype == torch.bfloat16 and shutil.which("g++") is not None)


def expected_numerics(
    options: EncoderOptions | RerankerOptions, device: str | None, kind: str | None, pinned: str | None = None
) -> str:
    """Returns the numerics class that an encoder or a re-ranker would have on this machine, without loading it.

    Args:
        options: Its options.
        device: As of `choose_device`.
        kind: The `model_type` of the backbone, which decides whether its batches are packed; None: they are not.
        pinned: As of `choose_dtype`.
    """
    chosen = choose_device(device, options.dtype)
    dtype = choose_dtype(options.dtype, chosen, pinned)
    if dtype == torch.int8 or will_pack(kind, options, chosen):
        return describe_numerics(chosen, dtype, "packed")
    return describe_numerics(chosen, dtype, "compiled" if will_compile(options, chosen, dtype) else "eager")
