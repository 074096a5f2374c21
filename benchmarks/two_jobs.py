"""Runs a training alone and two at once on the same cores, with each way in which threads may wait for each other.

    python benchmarks/two_jobs.py --store /tmp/squad

The store needs a corpus with queries, such as `riptide import-corpus --source examples/squad`; the trainings are added
to it. Two jobs that share the cores fairly take twice the time of one. If the threads of a job spin while they wait,
they take time from the other job. The settings are values of OMP_WAIT_POLICY and GOMP_SPINCOUNT, as
`active`, `passive` or a number of turns; `default` is riptide's setting, and with `none` neither variable has a value.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.files import write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser

TRAINING = ("--train", "prompts", "--negatives", "none", "--batch", "32", "--length", "16", "--lr", "1e-3")


def environment_of(setting: str) -> dict[str, str]:
    """Returns the environment of a job whose threads wait as a setting says."""
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    if setting == "default":
        return others
    if setting == "none":
        return others | {"OMP_WAIT_POLICY": ""}
    return others | ({"GOMP_SPINCOUNT": setting} if setting.isdigit() else {"OMP_WAIT_POLICY": setting})


def run_job(command: list[str], environment: dict[str, str]) -> float:
    """Runs a job and returns its seconds. Ends the program if it fails."""
    started = time.perf_counter()
    job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if job.returncode:
        raise SystemExit(f"error: {' '.join(command)}: {job.stderr}")
    return time.perf_counter() - started


def run_jobs(store: str, count: int, setting: str, steps: int, model: str) -> list[float]:
    """Runs trainings at once, and returns the seconds of each one. Ends the program if one fails."""
    common = (sys.executable, "jobs/train_retriever.py", "--store", store, "--backbone", model, *TRAINING)
    names = [f"two-jobs-{uuid.uuid4().hex[:8]}" for _ in range(count)]
    commands = [[*common, "--task", name, "--steps", str(steps)] for name in names]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_job, commands, [environment_of(setting)] * count))


def main() -> None:
    """Reads the options, runs the trainings, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with a corpus and queries", required=True)
    parser.add("--model", MINILM, "backbone")
    parser.add("--steps", 40, "steps of a training")
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--settings", ["default", "none"], "how threads wait: default, none, active, passive, or a number")
    parser.add("--json", "results/two_jobs.json", "output file")
    options = parser.parse_args()
    store = str(Path(options.store).resolve())
    seconds_of: dict[str, dict[str, list[float]]] = {name: {"alone": [], "together": []} for name in options.settings}
    for _ in range(options.rounds):
        for name in options.settings:
            seconds_of[name]["alone"] += run_jobs(store, 1, name, options.steps, options.model)
            seconds_of[name]["together"].append(max(run_jobs(store, 2, name, options.steps, options.model)))
    for name, seconds in seconds_of.items():
        alone, together = (statistics.median(seconds[kind]) for kind in ("alone", "together"))
        print(f"{name:10} alone {alone:7.1f} s, two at once {together:7.1f} s: {together / alone:.2f} times")
    write_json(options.json, {"options": vars(options), "seconds": seconds_of})


if __name__ == "__main__":
    main()
