"""Trains, measures and compares the arms of a file; arms/ has the experiments of docs/measurements/.

    python benchmarks/experiment.py --arms benchmarks/arms/table3.yaml --store S --plan
    python benchmarks/experiment.py --arms benchmarks/arms/table3.yaml --store S --results results/table3.json.gz

The dev split chooses among the values of an arm; the test split is measured once. jobs/experiments/arms.py describes
the file. An interrupted experiment resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from riptide.jobs.commands.cli import run

from riptide.jobs.experiments import RunExperiment, main

if __name__ == "__main__":
    run(main, RunExperiment)
