"""Clients of a server: the owner of a token, its rate, and its share of the queues."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from riptide.serve.service_errors import OverloadedError


@dataclass(eq=False)
class Caller:
    """The owner of a token. Belongs to one event loop, and counts its queries to this process.

    Attributes:
        name: Its name in logs, or "anonymous" without tokens.
        rate: Queries (texts, documents to re-rank) per second, averaged over time; None: any number.
        share: Maximum share of each queue that its waiting queries fill.
    """

    name: str
    rate: float | None = None
    share: float = 1.0
    _credit: float = field(default=0.0, init=False)  # queries that it may send now; below 0 after a large request
    _updated: float = field(default=-math.inf, init=False)

    def take(self, queries: int) -> None:
        """Counts queries against the rate. A request is accepted if the previous ones have kept the rate.

        So a request of any size is answered, and later ones are refused for as long as its queries take at this rate.

        Raises:
            OverloadedError: If the client exceeds its rate.
        """
        if self.rate is None:
            return
        now = time.monotonic()
        self._credit = min(self.rate, self._credit + self.rate * (now - self._updated))
        self._updated = now
        if self._credit <= 0:
            raise OverloadedError(math.ceil(max(1.0, -self._credit / self.rate)), f"more than {self.rate:g} queries/s")
        self._credit -= queries


ANONYMOUS = Caller("anonymous")  # every client of a server without tokens, or without a token on a public route
