"""Clients of a server: the owner of a token, its rate, its share of the queues, and its quota of a day."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from riptide.serve.service_errors import OverloadedError

DAY_S = 86_400  # seconds of a day, which begins at midnight UTC


@dataclass(eq=False)
class Caller:
    """The owner of a token. Belongs to one event loop, and counts its queries to this process.

    Attributes:
        name: Its name in logs, or "anonymous" without tokens.
        rate: Queries (texts, documents to re-rank) per second, averaged over time; None: any number.
        share: Maximum share of each queue that its waiting queries fill.
        quota: Queries of a day (UTC), after which none is accepted; None: any number. A new process counts from 0.
    """

    name: str
    rate: float | None = None
    share: float = 1.0
    quota: int | None = None
    _credit: float = field(default=0.0, init=False)  # queries that it may send now; below 0 after a large request
    _updated: float = field(default=-math.inf, init=False)
    _day: int = field(default=0, init=False)  # of the latest query
    _used: int = field(default=0, init=False)  # queries of this day

    @property
    def remaining(self) -> int | None:
        """Queries that the quota leaves for today; None: there is no quota."""
        if self.quota is None:
            return None
        return max(0, self.quota - self._used) if self._day == int(time.time() // DAY_S) else self.quota

    def take(self, queries: int) -> None:
        """Counts queries against the rate and the quota. A request is accepted if the previous ones have kept both.

        So a request of any size is answered, and later ones are refused for as long as its queries take at this rate,
        or until the day ends.

        Raises:
            OverloadedError: If the client exceeds its rate or its quota.
        """
        if self.quota is not None:
            day, second = divmod(time.time(), DAY_S)
            if day != self._day:
                self._day, self._used = int(day), 0
            if self._used >= self.quota:
                raise OverloadedError(math.ceil(DAY_S - second), f"more than {self.quota:,} queries per day")
        self._keep_rate(queries)
        self._used += queries

    def give_back(self, queries: int) -> None:
        """Takes back the count of queries that were accepted and then refused by a full queue."""
        self._used = max(0, self._used - queries)
        if self.rate is not None:
            self._credit += queries

    def _keep_rate(self, queries: int) -> None:
        if self.rate is None:
            return
        now = time.monotonic()
        self._credit = min(self.rate, self._credit + self.rate * (now - self._updated))
        self._updated = now
        if self._credit <= 0:
            raise OverloadedError(math.ceil(max(1.0, -self._credit / self.rate)), f"more than {self.rate:g} queries/s")
        self._credit -= queries


ANONYMOUS = Caller("anonymous")  # every client of a server without tokens, or without a token on a public route
