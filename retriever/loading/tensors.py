"""Reads safetensors files in time linear in their bytes, in short steps, between which other threads run.

safetensors' own reader parses the header while it holds Python's GIL, and does not notice a name that stands twice.
"""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from retriever.errors import InputError
from retriever.loading.documents import has_type, shown
from retriever.loading.parsing import parse_json

MOST_HEADER = 4 << 20  # bytes of a header
MOST_TENSORS = 32_768  # tensors of a file
MOST_DIMENSIONS = 16  # of a tensor
# The bits of a number, by the names that safetensors gives to types of numbers.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
         "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
         "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}  # fmt: skip
_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
           "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
           "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
           "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
           "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor as the header of a file describes it.

    Attributes:
        dtype: The type of its numbers, by safetensors' name.
        shape: Its shape.
        begin: The position of its first byte in the file.
        end: The position after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name, from its header.

    Raises:
        InputError: If the file is missing, if the header is damaged, has a name twice or exceeds MOST_HEADER bytes or
            MOST_TENSORS tensors, or if the tensors are not the bytes after the header, each byte once.
    """
    start, size, text = _read_text(file)
    try:
        tensors = parse_json(text, convert=functools.partial(_convert, start, file))
    except json.JSONDecodeError as error:
        raise _damaged(file, f"its header is not a table of tensors: {error.msg}") from error
    if not isinstance(tensors, dict):
        raise _damaged(file, f"its header is {shown(tensors)}, expected an object")
    tensors.pop("__metadata__", None)
    if len(tensors) > MOST_TENSORS:
        raise InputError(f"{file}: {len(tensors):,} tensors, expected up to {MOST_TENSORS:,}")
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin != position:
            raise _damaged(file, f"{shown(name)} begins at byte {tensor.begin}, expected byte {position}")
        position = tensor.end
    if position != size:
        raise _damaged(file, f"its tensors end at byte {position}, and the file has {size:,}")
    return tensors


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file by name, on the CPU; their numbers are read when they are used.

    The file must not change while the tensors exist.

    Raises:
        InputError: As `read_header`, and if torch does not have the type of a tensor's numbers.
    """
    header = read_header(file)
    try:
        content = torch.from_numpy(np.memmap(file, np.uint8, mode="c"))  # private: what is written stays in memory
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; expected a safetensors file") from error
    tensors = {}
    for name, stored in header.items():
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise InputError(f"{file}: {shown(name)} is {stored.dtype}, a type of numbers that torch does not have")
        numbers = content[stored.begin : stored.end]
        if stored.begin % dtype.itemsize:
            numbers = numbers.clone()
        tensors[name] = numbers.view(dtype).view(stored.shape)
    return tensors


def _read_text(file: Path) -> tuple[int, int, str]:
    """Returns the position after the header, the size of the file and the text of the header."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = 8 + int.from_bytes(stream.read(8), "little")
            if size < 8 or start > size:
                raise _damaged(file, f"{size:,} bytes, and its header ends at byte {start}")
            if start - 8 > MOST_HEADER:
                raise InputError(f"{file}: a header of {start - 8:,} bytes, expected up to {MOST_HEADER:,}")
            return start, size, stream.read(start - 8).decode()
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; expected a safetensors file") from error
    except UnicodeDecodeError as error:
        raise _damaged(file, f"its header is not UTF-8 at byte {8 + error.start}") from error


def _convert(start: int, file: Path, name: str, entry: Any) -> StoredTensor | None:
    """Returns the tensor of an entry of the header, None for metadata. Raises InputError for a wrong type or value."""
    if name == "__metadata__":
        if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
            raise _damaged(file, f"__metadata__: expected names and texts, got {shown(entry)}")
        return None
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"{shown(name)}: expected dtype, shape and data_offsets, got {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damaged(file, f"{shown(name)}: dtype: expected one of {', '.join(_BITS)}, got {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise _damaged(file, f"{shown(name)}: shape: expected up to {MOST_DIMENSIONS} sizes, got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"{shown(name)}: data_offsets: expected two positions, got {shown(offsets)}")
    begin, end = offsets
    if _BITS[dtype] * math.prod(shape) != 8 * (end - begin):
        raise _damaged(file, f"{shown(name)}: {dtype} {shown(shape)} is not what {end - begin} bytes hold")
    return StoredTensor(dtype, tuple(shape), start + begin, start + end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(has_type(value, int) and 0 <= value < 1 << 63 for value in values)


def _damaged(file: Path, problem: str) -> InputError:
    return InputError(f"{file}: cannot be loaded: {problem}; copy the file again")
