"""The tasks of an encoder: the prompts of both sides, and the assignment of a prompt to each text of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process.memory import free_memory
from riptide.retriever.forward.batching import Tokens
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.options import SIDES, Side
from riptide.retriever.prompts.prompt_table import PromptSnapshot, PromptTable
from riptide.retriever.prompts.query_words import NO_WORDS, WordPooling
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.synthesiser import KeptSynthesiser
from riptide.retriever.prompts.task_prompt import TaskPrompt
from riptide.retriever.topics.model import NO_TOPIC
from riptide.retriever.topics.saved import NO_TOPIC_WORDS, TextTopics

# Maximum bytes of the prompts of a batch if some are computed; larger batches are split. Every prompt is padded to the
# longest of the batch. (On the CPU, blocks above 32 MiB would be mapped again for each batch.)
_COMPUTED_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}


class TaskSnapshot(NamedTuple):
    """A snapshot of the tasks: their names, the prompts of both sides, and the rules that infer topics of texts."""

    names: frozenset[str]
    prompts_by_side: dict[Side, PromptSnapshot]
    topics: Mapping[str, TextTopics]


class TextPrompts(NamedTuple):
    """The prompt of each text of a call, as slots in a snapshot of one side.

    Attributes:
        snapshot: All prompts of a side; None: no text has one.
        slots: The slot of each text, int64 [texts].
        wordless: bool [texts], texts without the words by which their prompts are found; their vectors become NaN.
        topicless: bool [texts], those of them that lack the words by which their topic is inferred.
        max_embeddings: Returns the maximum of the word embeddings of texts: int64 [n] -> float32 [n, d]. None without
            a snapshot.
    """

    snapshot: PromptSnapshot | None
    slots: np.ndarray
    wordless: np.ndarray
    topicless: np.ndarray
    max_embeddings: Callable[[np.ndarray], torch.Tensor] | None = None

    def reasons(self) -> dict[int, str]:
        """Returns, by text number, the reason why each wordless text has no prompt."""
        texts = np.flatnonzero(self.wordless).tolist()
        return {text: NO_TOPIC_WORDS if self.topicless[text] else NO_WORDS for text in texts}

    def split_batch(self, texts: np.ndarray, device: torch.device) -> list[np.ndarray]:
        """Splits a batch into several batches if the prompts of its texts would take too much memory."""
        if self.snapshot is None or not (size := self.snapshot.computed_prompt_bytes(self.slots[texts])):
            return [texts]
        max_texts = max(1, _COMPUTED_BYTES[device.type] // size)
        return [texts[start : start + max_texts] for start in range(0, len(texts), max_texts)]

    def rows(self, texts: np.ndarray) -> PromptRows | None:
        """Returns the prompts of the batch with these text numbers; None if no text has a prompt."""
        if self.snapshot is None:
            return None
        max_embeddings = self.max_embeddings
        assert max_embeddings is not None
        return self.snapshot.rows(self.slots[texts], lambda rows: max_embeddings(texts[rows]))


class EncoderTasks:
    """The tasks of an encoder and one table of prompts per side.

    Only one thread at a time may call `put` and `drop`. Other threads read the snapshot, which is replaced as a whole.

    Attributes:
        tables: The prompts of each side.
        snapshot: The current snapshot; a forward pass reads it once, at its start.

    Args:
        shape: The shape of the backbone's keys and values.
        dtype: The type of the prompts.
        device: Where they are.
        word_pooling: Returns what finds the words of texts, for prompts that are computed.
    """

    def __init__(
        self, shape: PromptShape, dtype: torch.dtype, device: torch.device, word_pooling: Callable[[], WordPooling]
    ):
        self._shape, self._dtype, self._device, self._word_pooling = shape, dtype, device, word_pooling
        self.tables = {side: PromptTable(shape, dtype, device) for side in SIDES}
        self._take_snapshot(frozenset(), {})

    def _take_snapshot(self, names: frozenset[str], topics: Mapping[str, TextTopics]) -> None:
        self.snapshot = TaskSnapshot(names, {side: table.snapshot() for side, table in self.tables.items()}, topics)

    def put(self, name: str, prompt: TaskPrompt) -> None:
        """Adds or replaces a task's prompt."""
        for side, table in self.tables.items():
            if matrices := prompt.matrices(side):
                table.put(name, matrices, prompt.offset(side))
            elif side == "query" and prompt.synthesis is not None:
                synthesiser = prompt.synthesis.open(self._shape)
                table.put_synthesiser(name, KeptSynthesiser(synthesiser, self._dtype, self._device))
            else:
                table.drop(name)
        topics = {name: prompt.topics.text_topics} if prompt.topics else {}
        self._take_snapshot(self.snapshot.names | {name}, self._topics_without(name) | topics)

    def drop(self, name: str) -> None:
        """Removes a task. Raises InputError if there is no such task."""
        check_tasks([name], self.snapshot.names)
        for table in self.tables.values():
            table.drop(name)
        self._take_snapshot(self.snapshot.names - {name}, self._topics_without(name))

    def _topics_without(self, name: str) -> dict[str, TextTopics]:
        return {task: topics for task, topics in self.snapshot.topics.items() if task != name}

    def check_room(self, prompt: TaskPrompt) -> None:
        """Raises InputError if the prompt tables would exceed the free memory once this prompt is added."""
        free = free_memory(self._device)
        if prompt.synthesis is not None:
            size = self._synthesiser_bytes(prompt.synthesis)
            if size > free:
                raise InputError(
                    f"the synthesiser of the prompts takes {size / 2**30:.1f} GiB, expected up to the "
                    f"{free / 2**30:.1f} GiB that are free"
                )
            free -= size  # The remaining memory must also hold the passage prompt of the task, if it has a fixed one.
        sides = {side: matrices for side in self.tables if (matrices := prompt.matrices(side))}
        lengths = {side: matrices[0].shape[3] for side, matrices in sides.items()}
        size = sum(self.tables[side].bytes_needed(lengths[side], len(matrices)) for side, matrices in sides.items())
        if size and size > free:
            raise InputError(
                f"with a prompt of {max(lengths.values())} tokens the table of all prompts takes "
                f"{size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: each takes as much as the longest"
            )

    def _synthesiser_bytes(self, synthesis: SavedSynthesis) -> int:
        """Returns the bytes that a synthesiser needs: its kept tensors, and their float32 form while it opens."""
        return synthesis.count_kept_numbers() * (4 + self._dtype.itemsize)

    def synthesiser(self, name: str) -> KeptSynthesiser:
        """Returns the synthesiser of a task's query prompts. Raises InputError if all queries have the same prompt."""
        snapshot = self.snapshot
        check_tasks([name], snapshot.names)
        if synthesiser := snapshot.prompts_by_side["query"].synthesisers.get(name):
            return synthesiser
        raise InputError(
            f"task {name!r}: all its queries have the same prompt: expected one whose prompts are computed from each "
            "query"
        )

    def topics_of(self, texts: Sequence[str], side: Side, task: str | Sequence[str | None]) -> np.ndarray | None:
        """Infers the topics of texts; see `Encoder.topics_of`."""
        tasks, by_task = _tasks_of(task, len(texts)), self.snapshot.topics
        names = by_task.keys() & _names_in(task if isinstance(task, str) else tasks)
        if not names:
            return None
        topics = np.full(len(texts), NO_TOPIC, np.int64)
        for name in names:
            rows = [row for row, each in enumerate(tasks) if each == name]
            topics[rows] = by_task[name].topics_of([texts[row] for row in rows], side)
        return topics

    def prompts_of(
        self, tokens: Tokens, side: Side, task: str | Sequence[str | None], topics: np.ndarray | None
    ) -> TextPrompts:
        """Returns the current prompts and the prompt slot of each text.

        Args:
            tokens: The texts.
            side: Whether they are queries or passages.
            task: The task of all texts, or of each one.
            topics: The topic of each text, int64 [texts]; None if no task has prompts of topics.

        Raises:
            InputError: If a task or a topic does not exist.
        """
        snapshot, tasks = self.snapshot, _tasks_of(task, len(tokens))
        names = _names_in(task if isinstance(task, str) else tasks)
        check_tasks(names, snapshot.names)
        wordless, topicless = np.zeros((2, len(tokens)), bool)
        if by_topic := names & snapshot.topics.keys():
            topicless = _check_topics({name: snapshot.topics[name] for name in by_topic}, tasks, topics)
        prompts = snapshot.prompts_by_side[side]
        slots = prompts.slots_of(tasks, topics if by_topic else None)
        if (slots < 0).any():
            wordless = (slots < 0) & (self._word_pooling().count_words(tokens) == 0)
        wordless = wordless | topicless
        slots[wordless] = 0
        return TextPrompts(
            prompts, slots, wordless, topicless, lambda texts: self._word_pooling().max_embeddings(tokens, texts)
        )


def without_prompts(num_texts: int) -> TextPrompts:
    """Returns the TextPrompts of texts that have no prompts."""
    wordless, topicless = np.zeros((2, num_texts), bool)
    return TextPrompts(None, np.zeros(num_texts, np.int64), wordless, topicless)


def _tasks_of(task: str | Sequence[str | None], num_texts: int) -> list[str | None]:
    """Returns the task of each text; a single task applies to all texts."""
    tasks: list[str | None] = [task] * num_texts if isinstance(task, str) else list(task)
    if len(tasks) != num_texts:
        raise InputError(f"task: expected one for each of the {num_texts} texts, found {len(tasks)}")
    return tasks


def _names_in(task: str | Sequence[str | None]) -> set[str]:
    """Returns the set of task names in a `task` argument."""
    return {task} if isinstance(task, str) else {name for name in task if name is not None}


def check_tasks(names: Collection[str], existing: Collection[str]) -> None:
    """Raises InputError unless all named tasks exist."""
    for name in names:
        if name not in existing:
            raise InputError(
                f"{Parameter('task', repr(name))}: no such task; there are: {', '.join(sorted(existing)) or 'none'}"
            )


def _check_topics(
    by_task: Mapping[str, TextTopics], tasks: Sequence[str | None], topics: np.ndarray | None
) -> np.ndarray:
    """Returns a mask of texts that lack the topic their task needs, bool [texts]. Raises InputError for bad topics."""
    if topics is None or topics.shape != (len(tasks),):
        actual = "none" if topics is None else str(list(topics.shape))
        raise InputError(
            f"task {min(by_task)!r}: has prompts of topics: expected the topics of {len(tasks)} texts "
            f"(topics_of), found {actual}"
        )
    numbers = {name: own.model.num_topics for name, own in by_task.items()}
    counts = np.array([numbers.get(name, 0) if name is not None else 0 for name in tasks])
    if len(bad := np.flatnonzero((counts > 0) & ((topics >= counts) | (topics < NO_TOPIC)))):
        raise InputError(
            f"task {tasks[bad[0]]!r}: text {bad[0]} has the topic {topics[bad[0]]}, expected -1 to {counts[bad[0]] - 1}"
        )
    return (counts > 0) & (topics == NO_TOPIC)
