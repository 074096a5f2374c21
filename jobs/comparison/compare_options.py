"""Options of `compare`, and those that it shares with `judge`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import Common
from riptide.jobs.evaluation.evaluating import METRICS


@dataclass(frozen=True, kw_only=True)
class TwoRuns(Common):
    """Options of a job that compares two runs."""

    GROUP: ClassVar = "runs"
    HELP_FIRST: ClassVar = ("runs",)
    NAMED_BY: ClassVar = ("second",)
    READS: ClassVar = {"first": "runs", "second": "runs"}

    first: str = option(positional=True, metavar="RUN")
    """The baseline: name of a run in the store, or a file of TREC or of JSON lines."""
    second: str = option(positional=True, metavar="RUN")
    """The run that is compared with it."""
    queries: str | None = None
    """Name of the query set; default: that of the runs. For two files it may be left out if the store has only
    one."""
    limit: int | None = option(None, minimum=1)
    """Compare for the first N queries of the split."""

    def __post_init__(self) -> None:
        """Raises InputError if the runs are the same one."""
        super().__post_init__()
        if self.first == self.second:
            raise InputError(f"{self.first}: the same run twice, expected two runs to compare; name another one")


@dataclass(frozen=True, kw_only=True)
class Compare(TwoRuns):
    GROUP: ClassVar = "comparison"

    split: str | None = None
    """The split of the queries whose judgements count; default: that of the runs, and test for two files."""
    metrics: tuple[str, ...] = METRICS
    """Metrics, as evaluate takes them. The first one orders the queries. The p-values are adjusted for their number."""
    examples: int = option(10, minimum=1)
    """Number of the most won queries that are printed and on the page, and of the most lost ones."""
    OUTPUT: ClassVar = Heading("output")
    json: str | None = option(None, metavar="FILE")
    """Output file for all values, those of each query included; default: results/comparison-SPLIT-NAMES-DIGITS.json.
    The digits are a hash of what is compared."""
    html: str | None = option(None, metavar="FILE")
    """Output file for a page with charts and examples. It is one file that loads nothing else. Default: no page."""
    overwrite: bool = False
    """Replace the files of --json and --html if they have other content."""

    def __post_init__(self) -> None:
        """Raises InputError for two equal runs, or if no metric is given."""
        super().__post_init__()
        if not " ".join(self.metrics).split():
            raise InputError(
                f"{Parameter('metrics')}: expected at least one metric, which orders the queries; name one"
            )
