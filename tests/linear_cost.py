"""Measures how the CPU time and the memory of reading an input grow with its size."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.retriever.training.freed_memory import keep_freed_memory

MAX_GROWTH = 2.5  # maximum factor of CPU time and of memory when the size of an input doubles
MAX_UNITS = 1 << 22
BLOCK = 128  # pieces of a random content, which it repeats
NOISE_S = 0.005  # CPU seconds below which neither growth nor cost per MiB can be measured, and both are harmless
NOISE_MIB = 64.0  # memory below which a growth is that of the allocator

Content = str | bytes


@dataclass(frozen=True)
class Input:
    """Something that a user, a file or a client controls.

    Attributes:
        name: What it is.
        read: Reads a value that `prepare` returns.
        patterns: The worst known contents by name: each returns a content of n units.
        pieces: Pieces of random contents.
        prepare: Writes a content to a folder, or converts it; None: `read` takes the content itself.
        refusals: The errors that may refuse a content.
        frame: The start and the end of random contents, by which more of them are read.
        fields: Names of fields that may take the place of the first one of the frame.
        max_bytes: Size of the largest content that is measured.
        max_cost: Bound of the CPU time of each further byte, as a multiple of that of `reference_s`.
        max_mib: Bound of the memory, in MiB per MiB of the content.
        modules: The modules under riptide whose parsers it reaches.
    """

    name: str
    read: Callable[[Any], object]
    patterns: Mapping[str, Callable[[int], Content]]
    pieces: Sequence[str] = ("a", " ", "\n")
    prepare: Callable[[Path, Content], Any] | None = None
    refusals: tuple[type[Exception], ...] = (InputError,)
    frame: tuple[str, str] = ("", "")
    fields: tuple[str, ...] = ()
    max_bytes: int = 8 << 20
    max_cost: float = 2_000
    max_mib: float = 800
    modules: tuple[str, ...] = field(default=(), kw_only=True)

    def value_of(self, content: Content, folder: Path) -> Any:
        """Returns what `read` takes."""
        return content if self.prepare is None else self.prepare(folder, content)

    def is_read(self, value: Any) -> bool:
        """Reads a value. Returns whether it was accepted; raises any error that is not a refusal."""
        try:
            self.read(value)
        except self.refusals:
            return False
        return True

    def random_content(self, units: int, seed: int = 0) -> str:
        """Returns a content that repeats a block of random pieces: the longer one is like the shorter one."""
        block = "".join(random.Random(seed).choices(self.pieces, k=BLOCK))
        start, end = self.frame
        start = start.replace("FIELD", "".join(self.fields[:1]))
        return start + block * (units // BLOCK) + block[: units % BLOCK] + end

    def all_patterns(self) -> dict[str, Callable[[int], Content]]:
        """Returns the patterns, and the random one."""
        return {**self.patterns, "random": self.random_content}


@dataclass(frozen=True)
class Cost:
    """The cost of reading a content of the size at which it took the longest.

    Attributes:
        size: Bytes of the content.
        seconds: CPU seconds.
        growth: Factor of the CPU time per doubling, over the last two; 1 if it cannot be measured.
        seconds_per_mib: CPU seconds of each further MiB between a quarter of this size and this size; 0 if they cannot
            be measured.
        mib: Memory in MiB, of this process at its peak.
        memory_growth: Factor of the memory per doubling, over the last two; 1 if it cannot be measured.
    """

    size: int
    seconds: float
    growth: float
    seconds_per_mib: float
    mib: float = 0.0
    memory_growth: float = 1.0


def measure(
    tested: Input,
    pattern: Callable[[int], Content],
    folder: Path,
    *,
    seconds: float,
    runs: int = 5,
    with_memory: bool = False,
) -> Cost:
    """Reads contents whose number of units doubles until one takes some CPU time, or has the size of the limit.

    Args:
        tested: The input.
        pattern: Returns a content of a number of units.
        folder: A folder for files.
        seconds: CPU seconds at which the sizes no longer double.
        runs: Number of measurements of each of the two sizes that are compared; the minimum counts.
        with_memory: Whether memory is measured too.
    """
    tested.is_read(tested.value_of(pattern(1), folder))  # what is computed once
    units, times = 16, dict[int, float]()
    while units <= MAX_UNITS:
        content = pattern(units)
        if size_of(content) > tested.max_bytes:
            break
        value = tested.value_of(content, folder)
        times[units] = _seconds(tested, value)
        if times[units] >= seconds:
            times[units] = min(times[units], _seconds(tested, value))  # without what the first call has loaded
        if times[units] >= seconds:
            break
        units *= 2
    # A refusal may make the largest contents cheap.
    large = max(times, key=lambda units: times[units])
    sizes = [max(large // 4, 1), large]
    contents = [pattern(units) for units in sizes]
    growth = 1.0
    for _ in range(2):  # once more before a failure, as other programs use the machine
        values = [tested.value_of(content, folder) for content in contents]
        # In turn, as the speed of the machine changes. Without kept memory only large contents would meet page faults.
        with keep_freed_memory():
            rounds = [[_seconds(tested, value) for value in values] for _ in range(runs)]
        small_s, large_s = map(min, zip(*rounds, strict=True))
        growth = (large_s / max(small_s, 1e-9)) ** 0.5 if large_s > NOISE_S else 1.0
        if growth <= MAX_GROWTH:
            break
    small_size, large_size = map(size_of, contents)
    more_s = max(large_s - small_s, 0) if large_s > NOISE_S else 0.0
    cost = Cost(large_size, large_s, growth, more_s * (1 << 20) / max(large_size - small_size, 1))
    if not with_memory:
        return cost
    small_mib, large_mib = (peak_mib(tested, tested.value_of(content, folder)) for content in contents)
    memory_growth = (large_mib / max(small_mib, 0.1)) ** 0.5 if large_mib > NOISE_MIB else 1.0
    return replace(cost, mib=large_mib, memory_growth=memory_growth)


def size_of(content: Content) -> int:
    """Returns the bytes of a content."""
    return len(content) if isinstance(content, bytes) else len(content.encode("utf-8", "surrogatepass"))


def reference_s(runs: int = 5) -> float:
    """Returns the CPU seconds per MiB of a plain text that Python's json parses, as the unit of other costs."""
    text = json.dumps(["a few words", 1, 2.5, None] * 10_000)
    mib = len(text) / (1 << 20)
    return min(_seconds(Input("", json.loads, {}), text) for _ in range(runs)) / mib


def _seconds(tested: Input, value: Any) -> float:
    gc.collect(0)
    gc.disable()
    try:
        start = time.process_time()
        tested.is_read(value)
        return time.process_time() - start
    finally:
        gc.enable()


def peak_mib(tested: Input, value: Any) -> float:
    """Returns the memory in MiB that reading a value adds to this process, that of libraries in C++ included."""
    _release_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _status_kib("VmRSS")
    tested.is_read(value)
    return (_status_kib("VmHWM") - before) / 1024


def _release_memory() -> None:
    import pyarrow as pa

    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)


def _status_kib(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert match
    return int(match[1])
