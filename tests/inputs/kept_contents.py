"""Contents that once failed, by input. Each is read again in every run of the tests."""

from __future__ import annotations

KEPT: dict[str, list[str | bytes]] = {
    "judgements": ['q\t"a"\rb\t1\n'],
    "results: of an experiment": ["[" * 20_000],
    "tokens of a server": ["[" * 20_000],
}
