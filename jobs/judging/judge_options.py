"""Options of `judge`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from riptide.base.option_fields import option
from riptide.indexing.judging.judging_pool import MEASURES
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.comparison.compare_options import TwoRuns


@dataclass(frozen=True, kw_only=True)
class Judge(TwoRuns):
    GROUP: ClassVar = "comparison"

    split: str | None = None
    """The split of the queries, or all; default: that of the runs. Its judgements are not used."""
    measure: str = MEASURES[0]
    """DCG@k or P@k, by which the runs are compared: the sum of a weight of each relevant hit, at most 1 per query."""
    margin: float = option(0.0, minimum=0)
    """Decide that the runs are equal, rather than that one is better, if the interval of the difference is within
    -MARGIN and MARGIN; 0: never."""
    VERDICTS: ClassVar = Heading("verdicts")
    verdicts: tuple[str, ...] = option((), metavar="FILE")
    """Files of verdicts of people to add: JSON lines with query_id, id and verdict (relevant, not or skip)."""
    model_verdicts: tuple[str, ...] = option((), metavar="FILE")
    """Files of verdicts of a model to add: as those of people, or with a number from 0 to 1. They set
    the order in which people judge, so they come before the first verdicts of people, and make the interval shorter as
    far as these confirm them."""
    round_size: int = option(50, minimum=10)
    """Number of pairs of the first round. Each later round ends at 1.5 times as many verdicts."""
    seed: int = option(0, minimum=0)
    """Seed of the random order in which pairs are judged."""
    OUTPUT: ClassVar = Heading("output")
    folder: str | None = option(None, metavar="FOLDER")
    """Folder for the pairs to judge, the page, the verdicts and the report; default: results/judging-NAMES-DIGITS. The
    digits are a hash of what is compared."""
    all_pairs: bool = False
    """Also write all pairs that the runs rank differently to all-pairs.jsonl, for a model that judges them."""
