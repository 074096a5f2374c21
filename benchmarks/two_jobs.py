"""Runs a training alone and two at once on the same cores, with each way in which threads may wait for each other.

    python benchmarks/two_jobs.py --store /tmp/squad

The store needs a corpus with queries, such as `riptide import-corpus --source examples/squad`; the trainings are added
to it. Two jobs that share the cores fairly take twice the time of one. Where the threads of a job spin while they wait,
each job takes time from the other one without work. The settings are values of OMP_WAIT_POLICY and GOMP_SPINCOUNT, as
`active`, `passive` or a number of turns; `default` leaves both as riptide sets them, `none` as libraries do without it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
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


def run_jobs(store: str, count: int, setting: str, steps: int, model: str) -> list[float]:
    """Runs trainings at once, and returns the seconds of each one. Ends the program if one fails."""
    common = (sys.executable, "jobs/train_retriever.py", "--store", store, "--backbone", model, *TRAINING)
    names = [f"two-jobs-{uuid.uuid4().hex[:8]}" for _ in range(count)]
    commands = [[*common, "--task", name, "--steps", str(steps)] for name in names]
    started = time.perf_counter()
    environment = environment_of(setting)
    jobs = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    seconds: dict[int, float] = {}
    while len(seconds) < count:
        time.sleep(0.05)
        for number, job in enumerate(jobs):
            if number not in seconds and job.poll() is not None:
                seconds[number] = time.perf_counter() - started
                if job.returncode:
                    raise SystemExit(f"error: {' '.join(commands[number])}: {(job.communicate()[1] or b'').decode()}")
    return [seconds[number] for number in range(count)]


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
    found: dict[str, dict[str, list[float]]] = {name: {"alone": [], "together": []} for name in options.settings}
    for _ in range(options.rounds):
        for name in options.settings:
            found[name]["alone"] += run_jobs(store, 1, name, options.steps, options.model)
            found[name]["together"].append(max(run_jobs(store, 2, name, options.steps, options.model)))
    for name, seconds in found.items():
        alone, together = (statistics.median(seconds[kind]) for kind in ("alone", "together"))
        print(f"{name:10} alone {alone:7.1f} s, two at once {together:7.1f} s: {together / alone:.2f} times")
    write_json(options.json, {"options": vars(options), "seconds": found})


if __name__ == "__main__":
    main()
