"""A new term of the loss, and a new value of --loss, are a file and an entry of a registry each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_commands import COMMON

from riptide.indexing.store.store import Store

ROOT = Path(__file__).resolve().parents[3]
# The job in a process whose registries have the toys as an engineer adds them: an import, and an entry of the list.
JOB = """
import sys
from pathlib import Path
from types import ModuleType

toys = [("pair_losses", "toy_loss", "MARGIN_MSE)", "TOY"), ("terms", "toy_term", "FlopsTerm]", "ToyTerm")]
for name, file, last, toy in toys:
    source = Path(f"retriever/objectives/{name}.py").read_text()
    assert source.count(last) == 1
    source = source.replace(last, f"{last[:-1]}, {toy}{last[-1]}")
    source = source.replace("\\nfrom riptide", f"\\nfrom {file} import {toy}\\nfrom riptide", 1)
    module = sys.modules[f"riptide.retriever.objectives.{name}"] = ModuleType(f"riptide.retriever.objectives.{name}")
    exec(source, module.__dict__)

import riptide.jobs.train_retriever as job
from riptide.jobs.commands.cli import options_class_of, run
try:
    run(job.main, options_class_of(job.main), sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


def train(*arguments: object) -> str:
    """Returns what the job prints, and in the last line whether it has imported torch."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", JOB, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_help_has_the_options_of_a_new_term_and_a_new_loss_without_torch() -> None:
    text = " ".join(train("--help").split())
    assert "toy term: --toy-weight X Weight of the toy term. (default: 0.0)" in text
    assert "--loss {contrastive,symmetric,symmetric-sum,kl,margin-mse,toy}" in text
    assert "(Hofstätter et al. 2020); toy: the number 7. (default: contrastive)" in text
    assert text.endswith(" False")


def test_a_retriever_is_trained_with_a_new_term_and_a_new_loss(world: Any, mined: Store) -> None:
    data = ("--store", world.store, "--backbone", world.model, "--train", "prompts", *COMMON, "--negatives", "hand")
    train(*data, "--task", "toy", "--steps", 2, "--loss", "toy", "--toy-weight", 2)
    artifact = Store(str(world.store)).open("prompts", "toy")
    assert artifact.notes["loss"] == 9
    assert artifact.config["tuning"]["toy"] == {"weight": 2.0}
    assert artifact.config["tuning"]["loss"] == "toy"
