"""Many tasks' prompts on one device, so that a batch may hold rows of any of them."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from retriever.attention import PromptRows, PromptShape
from retriever.options import Side
from retriever.prompts import TaskPrompt

# Compiled code treats a dimension of one as a case of its own.
_LEAST = 2


class _Slot:
    """A place in the table; it is free again once no snapshot holds it."""

    def __init__(self, number: int, length: int):
        self.number, self.length = number, length


@dataclass(frozen=True)
class Prompts:
    """One side's prompts as they were at one moment: what is put or dropped later leaves this as it is.

    slots: of each task that has a prompt. numbers: [l_max, layers, 2, capacity, heads, head_dim]. lengths: int64
    [capacity]. Slot 0 is the empty prompt, of length 0.
    """

    slots: Mapping[str, _Slot]
    numbers: torch.Tensor
    lengths: torch.Tensor

    def slots_of(self, tasks: Sequence[str | None]) -> np.ndarray:
        """The slot of each task: int64 [n], 0 where it is None or has no prompt on this side."""
        known = {name: slot.number for name, slot in self.slots.items()}
        return np.fromiter((known.get(task, 0) if task is not None else 0 for task in tasks), np.int64, len(tasks))

    def rows(self, slots: np.ndarray) -> PromptRows | None:
        """The prompts of a batch by its rows' slots, int64 [b]: None where no row has one, shared where all have the
        same, else each row's own, cut to the longest of the batch."""
        present = set(slots.tolist())
        if present == {0}:
            return None
        longest = max(slot.length for slot in self.slots.values() if slot.number in present)
        if len(present) == 1 and longest >= _LEAST:
            [slot] = present
            return PromptRows(_in_order(self.numbers[:longest, :, :, slot : slot + 1]).contiguous())
        table = _in_order(self.numbers[: max(longest, _LEAST)])
        columns = torch.arange(table.shape[4], device=table.device)
        rows = torch.from_numpy(slots).to(table.device)
        return PromptRows(table, rows, columns < self.lengths[:, None])


class PromptTable:
    """One side's prompts of all tasks in one tensor, whose length comes first: a cut to fewer columns leaves strides
    as they are, and with them the code that was compiled.

    Memory: l_max * capacity * layers * 2 * heads * head_dim numbers of `dtype`, l_max being the longest prompt that
    ever was there and capacity the least power of two that holds the most tasks that ever were there at a time, and
    one more; while it grows the old and the new tensor are both there. A task dropped while forwards use it keeps its
    slot until they are through. A forward copies one prompt for a batch that shares it. Nothing else is copied.
    """

    def __init__(self, shape: PromptShape, dtype: torch.dtype, device: torch.device):
        self._lock = threading.Lock()
        self._free: list[int] = [1]
        layers, heads, head_dim = shape
        numbers = torch.zeros((_LEAST, layers, 2, 2, heads, head_dim), dtype=dtype, device=device)
        self._now = Prompts({}, numbers, torch.zeros(2, dtype=torch.int64, device=device))

    def now(self) -> Prompts:
        """The prompts as they are at this moment."""
        return self._now

    def growth(self, length: int) -> int:
        """Bytes of the larger tensor that a prompt of so many tokens needs; 0 where there is room for it."""
        with self._lock:
            shape, numbers = self._shape_for(length), self._now.numbers
        return 0 if shape == numbers.shape else math.prod(shape) * numbers.element_size()

    def put(self, task: str, matrix: torch.Tensor) -> None:
        """Enter a task's prompt, [layers, 2, heads, l, head_dim]; one of that name is replaced."""
        with self._lock, torch.no_grad():
            length = matrix.shape[3]
            numbers = self._with_room(length)
            slot = _Slot(self._free.pop(), length)
            weakref.finalize(slot, self._free.append, slot.number).atexit = False
            numbers[:, :, :, slot.number] = 0
            numbers[:length, :, :, slot.number] = matrix.detach().permute(3, 0, 1, 2, 4).to(numbers)
            self._become({**self._now.slots, task: slot}, numbers)

    def drop(self, task: str) -> None:
        """Take a task's prompt out; without one, nothing happens."""
        with self._lock:
            slots = {name: slot for name, slot in self._now.slots.items() if name != task}
            self._become(slots, self._now.numbers)

    def _become(self, slots: Mapping[str, _Slot], numbers: torch.Tensor) -> None:
        lengths = np.zeros(numbers.shape[3], np.int64)
        for slot in slots.values():
            lengths[slot.number] = slot.length
        self._now = Prompts(slots, numbers, torch.from_numpy(lengths).to(numbers.device))

    def _shape_for(self, length: int) -> torch.Size:
        """The tensor's shape with a free slot for a prompt of `length`."""
        columns, layers, two, capacity, heads, head_dim = self._now.numbers.shape
        wanted = capacity if self._free else 2 * capacity
        return torch.Size((max(columns, length), layers, two, wanted, heads, head_dim))

    def _with_room(self, length: int) -> torch.Tensor:
        """The present tensor, or a larger one of the same contents, with a free slot for a prompt of `length`."""
        old = self._now.numbers
        shape = self._shape_for(length)
        if shape == old.shape:
            return old
        columns, capacity, wanted = old.shape[0], old.shape[3], shape[3]
        numbers = old.new_zeros(shape)
        numbers[:columns, :, :, :capacity] = old
        self._become(self._now.slots, numbers)
        # Lowest numbers first, as the last of the list is taken.
        self._free[:0] = range(wanted - 1, capacity - 1, -1)
        return numbers


def free_memory(device: torch.device) -> int:
    """Bytes of memory that can be had on a device."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes
    return int(torch.cuda.mem_get_info(device)[0]) + held


def warm_up_rows(shape: PromptShape, batch: int, dtype: torch.dtype, device: torch.device) -> list[PromptRows]:
    """A shared and a mixed prompt to compile for, of sizes that are those of no other dimension: compiled code takes
    dimensions that are alike for the same."""
    taken = {*shape, batch, 2}
    length, prompts = [size for size in (11, 13, 17, 19, 23, 29) if size not in taken][:2]
    layers, heads, head_dim = shape
    numbers = torch.zeros((length, layers, 2, prompts, heads, head_dim), dtype=dtype, device=device)
    rows = torch.arange(batch, device=device) % prompts
    lengths = torch.arange(prompts, device=device)
    inside = torch.arange(length, device=device) < lengths[:, None]
    return [
        PromptRows(_in_order(numbers[:, :, :, :1]).contiguous()),
        PromptRows(_in_order(numbers), rows, inside),
    ]


def task_config(config: Mapping[str, Any], prompt: TaskPrompt | None, side: Side) -> dict[str, Any]:
    """An encoder's `config` with what shapes the vectors of a task's texts of one side: "prompt", the sha256 of the
    matrix's shape and float32 numbers; without a prompt on that side the config as it is."""
    matrix = None if prompt is None else prompt.of(side)
    if matrix is None:
        return dict(config)
    contents = matrix.detach().float().cpu().contiguous()
    digest = hashlib.sha256(repr(tuple(contents.shape)).encode())
    digest.update(contents.numpy().tobytes())
    return {**config, "prompt": digest.hexdigest()}


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """[l, layers, 2, prompts, heads, head_dim] as attention takes it: [layers, 2, prompts, heads, l, head_dim]."""
    return numbers.permute(1, 2, 3, 4, 0, 5)
