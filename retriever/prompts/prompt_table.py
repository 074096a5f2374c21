"""The prompts of many tasks in one tensor on a device, so that a batch can mix tasks."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.options import Side
from riptide.retriever.prompts.synthesiser import KeptSynthesiser
from riptide.retriever.prompts.task_prompt import TaskPrompt

_Item = TypeVar("_Item")

# torch.compile specialises on dimensions of size one.
_MIN_SIZE = 2


class _Slot:
    """A slot of the table; it becomes free when no snapshot refers to it."""

    def __init__(self, number: int, length: int, offset: int):
        self.number, self.length, self.offset = number, length, offset


@dataclass(frozen=True)
class PromptSnapshot:
    """An immutable snapshot of the prompts of one side: later calls of `put` and `drop` do not change it.

    Attributes:
        slots: Task -> its slot, or a slot for each of its topics, for the tasks whose prompts are not computed.
        numbers: [l_max, layers, 2, capacity, heads, head_dim].
        lengths: int64 [capacity]. Slot 0 is the empty prompt, of length 0.
        position_offsets: int64 [capacity], by how many positions the texts of a slot start later than usual.
        synthesisers: Task -> what computes the prompts of its texts, for the other tasks.
    """

    slots: Mapping[str, tuple[_Slot, ...]]
    numbers: torch.Tensor
    lengths: torch.Tensor
    position_offsets: torch.Tensor
    synthesisers: Mapping[str, KeptSynthesiser]

    def slots_of(self, tasks: Sequence[str | None], topics: np.ndarray | None = None) -> np.ndarray:
        """Returns the slot of each text's prompt: int64 [n].

        It is 0 where a task is None or has no prompt on this side, and negative where prompts are computed.

        Args:
            tasks: The task of each text.
            topics: The topic of each text whose task has several: int64 [n].
        """
        known = {name: [slot.number for slot in own] for name, own in self.slots.items()}
        known |= {name: [-place] for place, name in enumerate(self.synthesisers, 1)}
        own = [known.get(task, [0]) if task is not None else [0] for task in tasks]
        text_topics = [0] * len(own) if topics is None else topics.tolist()
        pairs = zip(own, text_topics, strict=True)
        return np.fromiter((slots[topic] if len(slots) > 1 else slots[0] for slots, topic in pairs), np.int64, len(own))

    def rows(self, slots: np.ndarray, words: Callable[[np.ndarray], torch.Tensor] | None = None) -> PromptRows | None:
        """Returns the prompts of a batch.

        None if no row has a prompt; one shared prompt if all rows have the same; otherwise one per row, cut to the
        longest of the batch. Offsets are given only if a text of the batch has one.

        Args:
            slots: The slot of each row, int64 [b].
            words: Returns the maximum of the word embeddings of rows: int64 [n] -> float32 [n, d]. Needed if a slot is
                negative.
        """
        slot_numbers = set(slots.tolist())
        if slot_numbers == {0}:
            return None
        if min(slot_numbers) < 0:
            assert words is not None
            return self._compute_rows(slots, words)
        used = [slot for slot in self._fixed_slots() if slot.number in slot_numbers]
        longest = max(slot.length for slot in used)
        rows = torch.from_numpy(slots).to(self.numbers.device)
        position_offsets = self.position_offsets.index_select(0, rows) if any(slot.offset for slot in used) else None
        if len(slot_numbers) == 1 and longest >= _MIN_SIZE:
            [number] = slot_numbers
            table = _in_attention_order(self.numbers[:longest, :, :, number : number + 1]).contiguous()
            return PromptRows(table, position_offsets=position_offsets)
        table = _in_attention_order(self.numbers[: max(longest, _MIN_SIZE)])
        columns = torch.arange(table.shape[4], device=table.device)
        return PromptRows(table, rows, columns < self.lengths[:, None], position_offsets)

    def computed_prompt_bytes(self, slots: np.ndarray) -> int:
        """Returns the bytes per row of the prompts of a batch in which some are computed; 0 if none is computed."""
        if not (slots < 0).any():
            return 0
        return max(self._lengths_of(slots)) * self.numbers[0, :, :, 0].numel() * self.numbers.element_size()

    def _fixed_slots(self) -> Iterator[_Slot]:
        """Yields the slots of all fixed prompts, which are not computed from texts."""
        return itertools.chain.from_iterable(self.slots.values())

    def _lengths_of(self, slots: np.ndarray) -> list[int]:
        """Returns the number of prompt tokens of each slot."""
        lengths = {slot.number: slot.length for slot in self._fixed_slots()}
        computed = [synthesiser.options.length for synthesiser in self.synthesisers.values()]
        return [computed[-slot - 1] if slot < 0 else lengths.get(slot, 0) for slot in slots.tolist()]

    def _compute_rows(self, slots: np.ndarray, words: Callable[[np.ndarray], torch.Tensor]) -> PromptRows:
        """Returns the prompts of a batch in which some are computed; arguments as in `rows`.

        A fixed prompt is copied once, and each computed prompt is written at its place: both lie in the order in which
        attention reads them.
        """
        fixed, places = np.unique(slots[slots >= 0], return_inverse=True)
        rows = np.empty(len(slots), np.int64)
        rows[slots >= 0] = places
        lengths, parts, synthesisers = self._lengths_of(fixed), [], list(self.synthesisers.values())
        for slot in np.unique(slots[slots < 0]):
            synthesiser, members = synthesisers[-slot - 1], np.flatnonzero(slots == slot)
            rows[members] = np.arange(len(lengths), len(lengths) + len(members))
            lengths += [synthesiser.options.length] * len(members)
            parts.append((synthesiser, members))
        device, longest = self.numbers.device, max(_MIN_SIZE, *lengths)
        lengths += [0] * (_MIN_SIZE - len(lengths))
        _, layers, two, _, heads, head_dim = self.numbers.shape
        numbers = self.numbers.new_empty((len(lengths), layers, two, heads, longest, head_dim))
        table, numbers_of_fixed = self.numbers[:longest], torch.from_numpy(fixed).to(device)
        numbers[: len(fixed), ..., : len(table), :] = table.index_select(3, numbers_of_fixed).permute(3, 1, 2, 4, 0, 5)
        numbers[: len(fixed), ..., len(table) :, :] = 0
        end = len(fixed)
        for synthesiser, members in parts:
            part, length = numbers[end : end + len(members)], synthesiser.options.length
            synthesiser.fill(words(members), part[..., :length, :])
            part[..., length:, :] = 0  # Masked columns must be finite.
            end += len(members)
        numbers[end:] = 0
        is_prompt_token = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
        position_offsets = None
        if any(slot.offset for slot in self._fixed_slots() if slot.number in set(fixed.tolist())):
            position_offsets = self.position_offsets.index_select(0, torch.from_numpy(np.maximum(slots, 0)).to(device))
        on_device = torch.from_numpy(rows).to(device)
        return PromptRows(numbers.permute(1, 2, 0, 3, 4, 5), on_device, is_prompt_token, position_offsets)


class PromptTable:
    """The prompts of all tasks for one side, in one tensor.

    The length is the first dimension: a slice of fewer columns keeps the strides, and with them the compiled code.

    Memory: l_max * capacity * layers * 2 * heads * head_dim numbers of `dtype`. l_max is the longest prompt so far;
    capacity is the smallest power of two that holds the largest number of prompts so far, plus one. While the table
    grows, the old and the new tensor both exist. A task that is dropped during a forward pass keeps its slot until the
    pass ends. A forward pass copies the prompt of a batch that shares one, and nothing else.
    """

    def __init__(self, shape: PromptShape, dtype: torch.dtype, device: torch.device):
        self._lock = threading.Lock()
        self._free: list[int] = [1]
        layers, heads, head_dim = shape
        numbers = torch.zeros((_MIN_SIZE, layers, 2, 2, heads, head_dim), dtype=dtype, device=device)
        empty = torch.zeros(2, dtype=torch.int64, device=device)
        self._current = PromptSnapshot({}, numbers, empty, empty, {})

    def snapshot(self) -> PromptSnapshot:
        """Returns a snapshot of the prompts."""
        return self._current

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self._current.numbers.nbytes

    def bytes_needed(self, length: int, num_prompts: int = 1) -> int:
        """Returns the bytes of the larger tensor that more prompts need; 0 if they fit into the current tensor."""
        with self._lock:
            shape, numbers = self._shape_for(length, num_prompts), self._current.numbers
        return 0 if shape == numbers.shape else math.prod(shape) * numbers.element_size()

    def put(self, task: str, matrices: Sequence[torch.Tensor], offset: int = 0) -> None:
        """Adds or replaces the prompts of a task: one for all texts, or one for each topic.

        Args:
            task: Name of the task.
            matrices: [layers, 2, heads, l, head_dim] each.
            offset: By how many positions its texts start later than usual.
        """
        with self._lock, torch.no_grad():
            length = matrices[0].shape[3]
            numbers = self._make_room(length, len(matrices))
            slots = []
            for matrix in matrices:
                slot = _Slot(self._free.pop(), length, offset)
                weakref.finalize(slot, self._free.append, slot.number).atexit = False
                numbers[:, :, :, slot.number] = 0
                numbers[:length, :, :, slot.number] = matrix.detach().permute(3, 0, 1, 2, 4).to(numbers)
                slots.append(slot)
            without = _without(self._current.synthesisers, task)
            self._replace_contents({**self._current.slots, task: tuple(slots)}, numbers, without)

    def put_synthesiser(self, task: str, synthesiser: KeptSynthesiser) -> None:
        """Adds or replaces a task's synthesiser, which computes prompts from the task's texts."""
        with self._lock:
            synthesisers = {**self._current.synthesisers, task: synthesiser}
            self._replace_contents(_without(self._current.slots, task), self._current.numbers, synthesisers)

    def drop(self, task: str) -> None:
        """Removes the prompts of a task, if it has any."""
        with self._lock:
            slots, synthesisers = _without(self._current.slots, task), _without(self._current.synthesisers, task)
            self._replace_contents(slots, self._current.numbers, synthesisers)

    def _replace_contents(
        self,
        slots: Mapping[str, tuple[_Slot, ...]],
        numbers: torch.Tensor,
        synthesisers: Mapping[str, KeptSynthesiser],
    ) -> None:
        lengths, position_offsets = np.zeros((2, numbers.shape[3]), np.int64)
        for slot in itertools.chain.from_iterable(slots.values()):
            lengths[slot.number], position_offsets[slot.number] = slot.length, slot.offset
        device = numbers.device
        on_device = (torch.from_numpy(lengths).to(device), torch.from_numpy(position_offsets).to(device))
        self._current = PromptSnapshot(slots, numbers, *on_device, synthesisers)

    def _shape_for(self, length: int, num_prompts: int = 1) -> torch.Size:
        """Returns the shape of a tensor with free slots for `num_prompts` prompts of `length` tokens."""
        columns, layers, two, capacity, heads, head_dim = self._current.numbers.shape
        wanted = capacity
        while len(self._free) + wanted - capacity < num_prompts:
            wanted *= 2
        return torch.Size((max(columns, length), layers, two, wanted, heads, head_dim))

    def _make_room(self, length: int, num_prompts: int) -> torch.Tensor:
        """Returns the current tensor or a larger copy, with free slots for `num_prompts` prompts of `length` tokens."""
        old = self._current.numbers
        shape = self._shape_for(length, num_prompts)
        if shape == old.shape:
            return old
        columns, capacity, wanted = old.shape[0], old.shape[3], shape[3]
        numbers = old.new_zeros(shape)
        numbers[:columns, :, :, :capacity] = old
        self._replace_contents(self._current.slots, numbers, self._current.synthesisers)
        # The list is in descending order, because `put` takes the last slot, which has the lowest number.
        self._free[:0] = range(wanted - 1, capacity - 1, -1)
        return numbers


def warm_up_rows(
    shape: PromptShape,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_computed: bool = False,
    has_offsets: bool = False,
) -> list[PromptRows]:
    """Returns warm-up prompts for compilation: a shared and a mixed one, or a mixed and a partly computed one.

    Their sizes differ from all other dimensions: torch.compile takes dimensions of equal size for the same one.

    Args:
        shape: The shape of the backbone's keys and values.
        batch: Number of rows.
        dtype: The dtype of the prompts.
        device: Their device.
        has_computed: Whether some prompts are computed.
        has_offsets: Whether texts start later than usual.
    """
    taken = {*shape, batch, 2}
    length, prompts = [size for size in (11, 13, 17, 19, 23, 29) if size not in taken][:2]
    layers, heads, head_dim = shape
    numbers = torch.zeros((length, layers, 2, prompts, heads, head_dim), dtype=dtype, device=device)
    rows = torch.arange(batch, device=device) % prompts
    lengths = torch.arange(prompts, device=device)
    is_prompt_token = torch.arange(length, device=device) < lengths[:, None]
    position_offsets = torch.ones_like(rows) if has_offsets else None
    mixed = PromptRows(_in_attention_order(numbers), rows, is_prompt_token, position_offsets)
    if has_computed:
        computed_numbers = numbers.permute(3, 1, 2, 4, 0, 5).contiguous()
        return [mixed, PromptRows(computed_numbers.permute(1, 2, 0, 3, 4, 5), rows, is_prompt_token, position_offsets)]
    return [
        PromptRows(_in_attention_order(numbers[:, :, :, :1]).contiguous(), position_offsets=position_offsets),
        mixed,
    ]


def task_config(config: Mapping[str, Any], prompt: TaskPrompt | None, side: Side) -> dict[str, Any]:
    """Returns an encoder's `config`, extended by the digest of a task's prompt on one side.

    It has the entry "prompt" if the task has a prompt there: the sha256 of the matrix's shape and its float32 numbers,
    of the options and weights of what computes the prompts, or of the topics and their prompts; and the entry
    "position_offset" if the positions of its texts start after the prompt.
    """
    if prompt is not None and prompt.synthesis is not None and side == "query":
        return {**config, "prompt": prompt.synthesis.digest()}
    matrix = None if prompt is None else prompt.fixed_matrix(side)
    if prompt is None or (matrix is None and prompt.topics is None):
        return dict(config)
    offset = {"position_offset": prompt.offset(side)} if prompt.position_offset else {}
    if matrix is None:
        assert prompt.topics is not None
        return {**config, "prompt": prompt.topics.digest(), **offset}
    contents = matrix.detach().float().cpu().contiguous()
    digest = hashlib.sha256(repr(tuple(contents.shape)).encode())
    digest.update(contents.numpy().reshape(-1).view(np.uint8).data)
    return {**config, "prompt": digest.hexdigest(), **offset}


def _without(mapping: Mapping[str, _Item], task: str) -> dict[str, _Item]:
    return {name: item for name, item in mapping.items() if name != task}


def _in_attention_order(numbers: torch.Tensor) -> torch.Tensor:
    """Permutes [l, layers, 2, prompts, heads, head_dim] for attention: [layers, 2, prompts, heads, l, head_dim]."""
    return numbers.permute(1, 2, 3, 4, 0, 5)
