"""The sizes of data: those of a store, of earlier steps of a chain, or those that the user expects."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, open_table
from riptide.indexing.formats.chunking import chunk_rows
from riptide.indexing.queries.hold_out import HoldOut
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.store import Store

# What --expect may say, with the values that stand for what is unknown: the sizes of psgs_w100, Wikipedia's passages of
# 100 words.
DEFAULTS = {
    "passages": 0.0,
    "passage_tokens": 140.0,
    "passage_bytes": 650.0,
    "queries": 0.0,
    "query_tokens": 12.0,
    "dimensions": 768.0,
}
PART_SIZE = 10_000  # passages of a part, as an import makes them by default
BYTES_PER_TOKEN = 4.5  # of English text with a vocabulary of 30,000 words
SAMPLED_PARTS, SAMPLED_ROWS = 8, 64  # parts, and passages of each, whose tokens are counted


@dataclass(frozen=True)
class CorpusSize:
    """The size of a corpus.

    Attributes:
        part_rows, part_bytes: Passages and bytes of each part.
        expected_tokens: Mean tokens of a passage that the user expects; None: they are counted.
        parts: The parts, if the corpus exists.
    """

    part_rows: Sequence[int]
    part_bytes: Sequence[int]
    expected_tokens: float | None = None
    parts: Sequence[RowPart] = ()

    @property
    def rows(self) -> int:
        """The number of passages."""
        return sum(self.part_rows)

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.part_bytes)

    @property
    def exists(self) -> bool:
        """Whether the sizes are those of an existing corpus."""
        return bool(self.parts)

    def first_rows(self, limit: int | None) -> CorpusSize:
        """Returns the size of the parts with the first passages; the last part counts as many rows as are used."""
        if limit is None or limit >= self.rows:
            return self
        ends = list(itertools.accumulate(self.part_rows))
        num_parts = bisect.bisect_left(ends, limit) + 1
        rows = [*self.part_rows[:num_parts]]
        rows[-1] -= ends[num_parts - 1] - limit
        return replace(self, part_rows=rows, part_bytes=self.part_bytes[: len(rows)], parts=self.parts[: len(rows)])

    def sample_texts(self) -> list[tuple[str, str]]:
        """Returns the titles and texts of some passages, from parts spread over the corpus; [] if it does not exist."""
        step = max(1, -(-len(self.parts) // SAMPLED_PARTS))
        texts: list[tuple[str, str]] = []
        for part in self.parts[::step]:
            table = open_table(part).select(["title", "text"]).slice(0, SAMPLED_ROWS)
            texts += zip(table["title"].to_pylist(), table["text"].to_pylist(), strict=True)
        return texts


def planned_corpus(passages: int, passage_bytes: float, passage_tokens: float | None, part_size: int) -> CorpusSize:
    """Returns the size of a corpus that an import will make, whose first parts are smaller (`chunk_rows`)."""
    rows: list[int] = []
    remaining = passages
    while remaining > 0:
        rows.append(min(remaining, chunk_rows(len(rows), part_size)))
        remaining -= rows[-1]
    return CorpusSize(rows, [int(each * passage_bytes) for each in rows], passage_tokens)


def parse_sizes(texts: Mapping[str, str]) -> dict[str, float]:
    """Reads the values of --expect. Raises InputError for an unknown name, and for what is no number above 0."""
    sizes = {}
    for name, text in texts.items():
        if name not in DEFAULTS:
            raise InputError(f"{Parameter('expect', f'{name} {text}')}: expected one of {', '.join(DEFAULTS)}")
        try:
            sizes[name] = float(text)
        except ValueError:
            sizes[name] = 0.0
        if not 0 < sizes[name] < float("inf"):
            raise InputError(f"{Parameter('expect', f'{name} {text}')}: expected a number above 0")
    return sizes


@dataclass
class Sizes:
    """The sizes of data by store.

    Attributes:
        expected: What the user expects, by name; see DEFAULTS.
        corpora: The corpora that steps of the chain will make.
        queries: The numbers of queries that steps will import, by store, query set ("": the only one) and split.
        dims: The dimensions of embeddings that steps will make, by store and name.
        searched: The embeddings of the indexes that steps will make, by store and name of the index.
        made_bytes: The bytes of the artifacts that steps will make, by store and KIND/NAME.
    """

    expected: Mapping[str, float] = field(default_factory=dict)
    corpora: dict[str, CorpusSize] = field(default_factory=dict)
    queries: dict[tuple[str, str, str], int] = field(default_factory=dict)
    dims: dict[tuple[str, str], int] = field(default_factory=dict)
    searched: dict[tuple[str, str], str] = field(default_factory=dict)
    made_bytes: dict[tuple[str, str], int] = field(default_factory=dict)

    def get(self, name: str) -> float:
        """Returns an expected size, or its default."""
        return self.expected.get(name, DEFAULTS[name])

    def expected_corpus(self, part_size: int) -> CorpusSize | None:
        """Returns the corpus that the user expects; None if its number of passages is not given."""
        if "passages" not in self.expected:
            return None
        tokens, size = self.get("passage_tokens"), self.get("passage_bytes")
        if "passage_bytes" not in self.expected and "passage_tokens" in self.expected:
            size = tokens * BYTES_PER_TOKEN
        return planned_corpus(int(self.expected["passages"]), size, tokens, part_size)

    def corpus(self, store: str) -> CorpusSize | None:
        """Returns the size of a store's corpus; None if it is missing and no earlier step makes it."""
        if store in self.corpora:
            return self.corpora[store]
        if self.expected:
            return self.expected_corpus(PART_SIZE)
        with contextlib.suppress(InputError):
            parts = Corpus.open(Store(store)).parts
            rows, sizes = [part.part.rows for part in parts], [part.part.bytes for part in parts]
            self.corpora[store] = CorpusSize(rows, sizes, parts=parts)
            return self.corpora[store]
        return None

    def add_queries(self, store: str, name: str, counts: Mapping[str, int], hold_out: HoldOut | None = None) -> None:
        """Adds a query set that a step will import.

        Args:
            store: URL of the store.
            name: Name of the query set.
            counts: The number of queries by split.
            hold_out: The queries that are moved to another split; None: none.
        """
        counts = dict(counts)
        if hold_out is not None and hold_out.split in counts:
            counts |= {hold_out.name: hold_out.queries, hold_out.split: counts[hold_out.split] - hold_out.queries}
        is_only = all(place != store or other in ("", name) for place, other, _ in self.queries)
        for each in (name, "") if is_only else (name,):
            self.queries |= {(store, each, split): count for split, count in counts.items()}

    def count_queries(self, store: str, queries: str | None, split: str) -> int | None:
        """Returns the number of queries of a split; None if it is unknown."""
        if (planned := self.queries.get((store, queries or "", split))) is not None:
            return planned
        if self.expected:
            return int(self.expected["queries"]) if "queries" in self.expected else None
        with contextlib.suppress(InputError):
            return len(Queries.open(Store(store), queries).split(split).ids)
        return None

    def sample_queries(self, store: str, queries: str | None, split: str) -> list[str]:
        """Returns some queries of a split; [] if they do not exist."""
        with contextlib.suppress(InputError):
            return Queries.open(Store(store), queries).split(split, SAMPLED_PARTS * SAMPLED_ROWS).texts
        return []

    def dim(self, store: str, embeddings: str) -> int | None:
        """Returns the dimensions of embeddings; None if they are unknown."""
        if (planned := self.dims.get((store, embeddings))) is not None:
            return planned
        if self.expected:
            return int(self.get("dimensions"))
        with contextlib.suppress(InputError, IndexError):
            dim = Store(store).generations("embeddings", embeddings)[-1].config["encoder"]["dim"]
            return int(dim)
        return None
