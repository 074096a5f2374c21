"""Measures the CPU time of searches with and without explanations, and whether their hits are the same.

    python benchmarks/explanations.py --store S --queries squad

The searches run one after the other in this process, in turns without and with explanations.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.explanations import HitExplanation
from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.protocol import SearchRequest
from riptide.serve.release.live import read_live_release
from riptide.serve.service.service_options import ServiceOptions


def errors_of_sums(explanation: HitExplanation) -> list[float]:
    """Returns the relative error of the sum of the sources' parts, and of each sum of terms."""
    sums = [(sum(source.part for source in explanation.sources), explanation.score)]
    for source in explanation.sources:
        if source.terms is not None and source.score is not None:
            sums.append((sum(term.score for term in source.terms) + source.other_terms, source.score))
    return [abs(total - score) / abs(score) for total, score in sums]


async def measure(arguments: argparse.Namespace) -> None:
    """Prints a line per mode: median milliseconds of CPU time per query and median bytes of a result."""
    store = Store(arguments.store)
    release, _ = read_live_release(store)
    assert release is not None, "serve the store once"
    texts = Queries.open(store, arguments.queries).split(arguments.split).texts[: arguments.count]
    service = open_local(store, ServiceOptions(threads=1), device="cpu")
    await service.serve_release(release)

    errors: list[float] = []

    async def search(**fields: Any) -> tuple[float, bytes, list[str]]:
        start = time.process_time()
        _, _, [(answer, _)] = await service.search(SearchRequest(**fields), 60)
        assert answer.error is None, answer.error
        milliseconds = 1000 * (time.process_time() - start)
        errors.extend(error for hit in answer.hits if hit.explanation for error in errors_of_sums(hit.explanation))
        return milliseconds, answer.json, [hit.id for hit in answer.hits]

    for mode in arguments.modes:
        columns: dict[bool, list[tuple[float, bytes, list[str]]]] = {False: [], True: []}
        for text in [*texts[:10], *texts]:  # the first 10 warm up
            for explain in columns:
                columns[explain].append(await search(query=text, mode=mode, k=arguments.k, explain=explain))
        pairs = zip(columns[False], columns[True], strict=True)
        equal = sum(plain[2] == explained[2] for plain, explained in pairs)
        medians = [
            f"{statistics.median(ms for ms, *_ in column[10:]):.1f} ms, "
            f"{statistics.median(len(json) for _, json, _ in column[10:]):,.0f} bytes"
            for column in columns.values()
        ]
        print(f"{mode}: without {medians[0]}; with {medians[1]}; same hits {equal} of {len(texts) + 10}")
    print(f"largest relative error of {len(errors):,} sums: {max(errors):.1e}")
    await service.drain()
    service.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--queries")
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--modes", nargs="+", default=["bm25", "dense", "hybrid"])
    asyncio.run(measure(parser.parse_args()))
