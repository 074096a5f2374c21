"""The rate of a search: what is timed, and what is not."""

from __future__ import annotations

import pytest

from riptide.indexing.measures import rates


def test_the_first_round_is_not_measured_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 10 queries take 100, 2, 5 and 1 s by the clock that the search moves."""
    clock, batches, seconds = 0.0, [], iter([100.0, 2.0, 5.0, 1.0])

    def search(texts: list[str]) -> None:
        nonlocal clock
        batches.append(texts)
        if len(texts) == 2:  # the last batch of a round
            clock += next(seconds)

    monkeypatch.setattr(rates.time, "perf_counter", lambda: clock)
    texts = [str(number) for number in range(10)]
    rate = rates.measure_rate(search, texts, batch=4)
    assert batches == [texts[:4], texts[4:8], texts[8:]] * 4
    assert len({id(batch) for batch in batches}) == 12  # the vectors of a list that is searched again may be kept
    assert rate.rounds == (5, 2, 10)
    assert (rate.queries_per_s, rate.queries, rate.batch) == (5, 10, 4)
