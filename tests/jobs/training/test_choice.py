"""The dev split chooses the settings by their mean over the seeds, then the best seed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from riptide.base.errors import DivergedError, InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.jobs.training.sweep import SweepOutcome, SweepRun, SweepStage, choose_run, read_outcomes
from riptide.jobs.training.sweep_report import chosen_line, draw_sweep, table_lines

GRID = {(0.01, 0): 0.30, (0.01, 1): 0.50, (0.03, 0): 0.42, (0.03, 1): 0.44, (0.1, 0): 0.9, (0.1, 1): None}


def outcomes(values: dict[tuple[float, int], float | None]) -> list[SweepOutcome]:
    return [
        SweepOutcome(
            f"prompts/t-lr{lr:g}-seed{seed}" if value else "",
            {"lr": lr, "seed": seed},
            value,
            100,
            "" if value else "step 3: the loss is nan",
        )
        for (lr, seed), value in values.items()
    ]


def test_settings_are_compared_by_their_mean_over_the_seeds() -> None:
    """The best single run belongs to other settings, and the settings of a run that diverged are out."""
    choice = choose_run(outcomes(GRID))
    assert choice.outcome.artifact == "prompts/t-lr0.03-seed1"
    assert (choice.mean, choice.seeds) == (pytest.approx(0.43), 2)
    assert chosen_line(choice, "dev MRR@10") == (
        "chosen: prompts/t-lr0.03-seed1, dev MRR@10 0.4400, the best of 2 seeds with a mean of 0.4300"
    )


def test_of_equal_settings_the_first_is_chosen() -> None:
    assert choose_run(outcomes({(0.01, 0): 0.5, (0.03, 0): 0.5})).outcome.settings["lr"] == 0.01


def test_a_sweep_whose_runs_have_all_diverged_is_refused() -> None:
    with pytest.raises(InputError, match="every run of the sweep has diverged, the first one: step 3: the loss is nan"):
        choose_run(outcomes({(1.0, 0): None, (2.0, 0): None}))


def test_the_problem_of_a_run_has_the_words_of_the_command_line(tmp_path: Path) -> None:
    def diverge(run: SweepRun) -> Artifact:
        raise DivergedError(f"step 3: the loss is nan: give a smaller {Parameter('learning_rate', run.settings['lr'])}")

    run = SweepRun({"lr": 9.0}, None)
    stage, draft = SweepStage((run,), diverge), Store(str(tmp_path)).create("sweeps", "t", config={})
    [unit] = stage.units({})
    stage.make(unit, [], draft, LocalRunner(), SimpleNamespace(count=lambda amount: None))  # type: ignore[arg-type]
    [outcome] = read_outcomes(draft)
    assert outcome.problem == "step 3: the loss is nan: give a smaller --learning-rate 9.0"


def test_the_table_has_a_line_for_each_run() -> None:
    lines = table_lines(outcomes(GRID), "dev MRR@10")
    assert lines[0].split() == ["lr", "seed", "dev", "MRR@10", "step", "artifact"]
    assert lines[1].split() == ["0.01", "0", "0.3000", "100", "prompts/t-lr0.01-seed0"]
    assert lines[-1].split() == ["0.1", "1", "diverged"]


def test_the_picture_and_the_numbers_are_written(tmp_path: Path) -> None:
    found = outcomes(GRID)
    picture = draw_sweep(found, choose_run(found), tmp_path / "new", "t", "dev MRR@10")
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "new/sweep.json").read_text())
    assert document["chosen"]["settings"] == {"lr": 0.03, "seed": 1}
    assert [run["quality"] for run in document["runs"]] == list(GRID.values())
