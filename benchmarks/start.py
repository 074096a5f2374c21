"""How long a private Ray takes to start and to run its first task: as jobs start it, and as `ray.init` does.

    python benchmarks/start.py --rounds 5

Each start is a process of its own; the two take turns, and the ratio is of the same round. With --beside another Ray
runs meanwhile, as it does where two jobs run on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = """
import contextlib, logging, sys, time
from jobs.session import quick_start
import ray

begun = time.perf_counter()
with quick_start() if sys.argv[1] == "quick" else contextlib.nullcontext():
    ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
ray.get(ray.remote(lambda: 0).remote())
print(time.perf_counter() - begun, flush=True)
if sys.argv[2:]:
    sys.stdin.read()
"""
ENVIRONMENT = {**os.environ, "RAY_enable_metrics_collection": "0"}  # as jobs have it


def seconds(how: str) -> float:
    command = [sys.executable, "-c", START, how]
    told = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, text=True, stdout=subprocess.PIPE)
    return float(told.stdout)


@contextlib.contextmanager
def another() -> Iterator[None]:
    """A Ray that is up while the block lasts."""
    command = [sys.executable, "-c", START, "plain", "stay"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="while another Ray runs")
    parser.add_argument("--json", default="results/start.json")
    options = parser.parse_args()
    orders = [("plain", "quick"), ("quick", "plain")]
    with another() if options.beside else contextlib.nullcontext():
        rounds = [{how: seconds(how) for how in orders[number % 2]} for number in range(options.rounds)]
    for one in rounds:
        plain, quick = one["plain"], one["quick"]
        print(f"ray.init {plain:.1f} s, as jobs start it {quick:.1f} s: {quick / plain:.2f}")
    print(f"median {statistics.median(one['quick'] / one['plain'] for one in rounds):.2f}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
