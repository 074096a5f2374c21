"""How long a private Ray takes to start and to run its first task: as jobs start it, and as `ray.init` does.

    python benchmarks/start.py --rounds 5

Each start is a process of its own; the two take turns, and the ratio is of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = """
import contextlib, logging, sys, time
from jobs.session import quick_start
import ray

begun = time.perf_counter()
with quick_start() if sys.argv[1] == "quick" else contextlib.nullcontext():
    ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
ray.get(ray.remote(lambda: 0).remote())
print(time.perf_counter() - begun)
"""


def seconds(how: str) -> float:
    command = [sys.executable, "-c", START, how]
    return float(subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="results/start.json")
    options = parser.parse_args()
    rounds = [{how: seconds(how) for how in ("plain", "quick")} for _ in range(options.rounds)]
    for one in rounds:
        plain, quick = one["plain"], one["quick"]
        print(f"ray.init {plain:.1f} s, as jobs start it {quick:.1f} s: {quick / plain:.2f}")
    print(f"median {statistics.median(one['quick'] / one['plain'] for one in rounds):.2f}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
