"""Moves queries of a split to a new split, which serves to choose among models and not to report results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


@dataclass(frozen=True)
class HoldOut:
    """The parameters by which an import draws queries of a split and moves them to a new split.

    Attributes:
        queries: Number of queries. Only queries with a relevant passage are taken.
        split: The split that they are taken from.
        seed: The seed of the draw.
        name: The new split.
    """

    queries: int
    split: str = "train"
    seed: int = 0
    name: str = "held-out"

    def __post_init__(self) -> None:
        """Raises InputError if the number of queries or the seed is too small."""
        if self.queries < 1:
            raise InputError(f"{Parameter('hold_out', self.queries)}: expected at least 1")
        if self.seed < 0:
            raise InputError(f"{Parameter('hold_out_seed', self.seed)}: expected 0 or more")

    def apply(self, qrels: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Returns the judgements by split, with those of randomly drawn queries moved to the new split.

        The draw is a function of the seed and of the ids of the queries, regardless of the order of the file.

        Raises:
            InputError: If the split is missing or has too few queries, or if the new split exists already.
        """
        if self.split not in qrels:
            have = ", ".join(qrels) or "no split"
            raise InputError(
                f"{Parameter('hold_out_split', repr(self.split))}: found no such split, expected one of {have}; name "
                f"one of them or leave {Parameter('hold_out')} out"
            )
        if self.name in qrels:
            raise InputError(
                f"{Parameter('hold_out', self.queries)}: found a split {self.name!r} in the source, which the held-out "
                "queries would get; rename its file or leave the parameter out"
            )
        table = qrels[self.split]
        ids = sorted(set(table.filter(pc.field("score") > 0)["query_id"].to_pylist()))
        if len(ids) <= self.queries:
            raise InputError(
                f"{Parameter('hold_out', self.queries)}: the split {self.split!r} has {len(ids):,} queries with a "
                "relevant passage, expected more than are held out; lower it"
            )
        chosen = np.random.default_rng(self.seed).choice(len(ids), self.queries, replace=False)
        is_chosen = pc.is_in(table["query_id"], pa.array([ids[number] for number in chosen], table["query_id"].type))
        return {**qrels, self.split: table.filter(pc.invert(is_chosen)), self.name: table.filter(is_chosen)}
