"""The probe of this machine, cluster files, and the options of estimates."""

from __future__ import annotations

from riptide.jobs.commands.cli import options_class_of

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from riptide.jobs.commands.console import command_names
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.plans import CHAINS
from riptide.jobs.planning import calibration
from riptide.jobs.planning.backbone_sizes import find_backbone
from riptide.jobs.planning.machine import CLUSTERS
from riptide.jobs.planning.planner import ESTIMATES
from riptide.retriever.options import EncoderOptions

Refused = Callable[..., str]
TODAY = "2026-11-01"
WITHOUT_ESTIMATE = ("compare", "convert_prompts", "draw", "judge", "replay", "store", "verify")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the node, which holds its calibration, for this test alone."""
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_probe_is_kept_for_later_plans(
    world: Any, model: str, done: Callable[..., str], own_cache: Path, tmp_path: Path
) -> None:
    """It is in the cache of the node, which each session of tests has for itself."""
    assert calibration.calibration_file() == own_cache / "calibration.json"
    backbone = find_backbone(model, Path(model))
    assert backbone is not None
    encode = ("encode_corpus", "--store", world.store, "--encoder", model, "--name", "new", "--plan")
    assert "on this machine (not calibrated)" in done(*encode)
    measured = calibration.calibrate(Path(model), backbone, EncoderOptions(), 0, tmp_path, seconds=0.3)
    assert calibration.read_calibration(0) == measured
    assert calibration.read_calibration(8) is None  # of another machine
    [rates] = measured.models.values()
    machine = calibration.this_machine(tmp_path, 0, backbone)
    assert machine.throughput.forward_tflops.value == rates.forward_tflops > 0
    assert machine.throughput.disk_mb_per_s.source.startswith("measured here")
    assert "on this machine (calibrated " in done(*encode)
    calibration.calibration_file().write_text("{}")
    assert "on this machine (not calibrated)" in done(*encode)


def test_a_probe_of_a_busy_machine_warns() -> None:
    assert calibration.describe_load(0.2, 2) == ""
    assert calibration.describe_load(1.4, 2).startswith("warning: ")
    assert "other programs use 1.4 of 2 cores" in calibration.describe_load(1.4, 2)
    assert calibration.busy_cores(0.01) >= 0


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("a cluster file without a price", {"price": None}),
        ("a cluster file with a price without a source", {"price": {"per_hour": 1, "currency": "EUR", "date": TODAY}}),
        ("a cluster file with an unknown key", {"core": 4}),
        (
            "a cluster file with an unknown key of the price",
            {"price": {"per_hour": 1, "currency": "EUR", "source": "ours", "date": TODAY, "day": 1}},
        ),
        (
            "a cluster file with a negative price",
            {"price": {"per_hour": -1, "currency": "EUR", "source": "ours", "date": TODAY}},
        ),
        ("a cluster file with a negative figure", {"cores": -32}),
        ("a cluster file without a throughput", {"throughput": {}}),
        ("a cluster file with GPUs without memory", {"gpus": 8}),
    ],
)
def test_bad_cluster_files_are_one_line(
    case: str, changes: dict[str, Any], world: Any, tmp_path: Path, refused: Refused, documented: Callable[..., None]
) -> None:
    content = yaml.safe_load((CLUSTERS / "cpu32.yaml").read_text(encoding="utf-8")) | changes
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    line = refused("build_bm25", "--store", world.store, "--plan", "--cluster", file)
    assert f"{file}: " in line
    documented("Estimates of --plan", f"--cluster: {case}", line, 1)


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("--cluster without --plan", ("build_bm25", "--cluster", "arm")),
        ("--cluster: no such file", ("build_bm25", "--plan", "--cluster", "b200x8")),
        ("--cluster and --calibrate", ("build_bm25", "--plan", "--calibrate", "--cluster", "arm")),
        ("--expect with an unknown name", ("build_bm25", "--plan", "--expect", "rows", "7")),
        ("--expect with no number", ("build_bm25", "--plan", "--expect", "passages", "many")),
        ("--expect with zero", ("build_bm25", "--plan", "--expect", "passages", "0")),
    ],
)
def test_bad_options_of_estimates_are_one_line(
    case: str, arguments: tuple[str, ...], world: Any, refused: Refused, documented: Callable[..., None]
) -> None:
    line = refused(*arguments, "--store", world.store)
    documented("Estimates of --plan", case, line, 1)


def test_options_of_estimates_are_unknown_to_jobs_without_one(
    job: Callable[..., Any], world: Any, documented: Callable[..., None]
) -> None:
    """Each other job has an estimate, but for the chains, which add up those of their jobs.

    `migrate` prints that of encoding the corpus.
    """
    names = {name.replace("-", "_") for name in command_names()}
    assert names == {*ESTIMATES, *CHAINS, *WITHOUT_ESTIMATE, "tune_prompts", "migrate"}
    for name in names:
        module = importlib.import_module(f"riptide.jobs.{name}")
        has_estimate = "cluster" in options_by_name(options_class_of(module.main))
        assert has_estimate == (name not in WITHOUT_ESTIMATE), name
    outcome = job("verify", "--plan", "--cluster", "arm", "--store", world.store)
    documented("Estimates of --plan", "--cluster of a job without an estimate", outcome.err[7:-1], outcome.status)


def test_a_model_that_is_too_large_for_a_probe_is_refused(
    tmp_path: Path, documented: Callable[..., None], world: Any, refused: Refused
) -> None:
    backbone = find_backbone("google-t5/t5-11b")
    assert backbone is not None
    with pytest.raises(ValueError, match="too many for a probe of 30 s") as error:
        calibration.calibrate(tmp_path, backbone, EncoderOptions(), 0, tmp_path)
    documented("Estimates of --plan", "--calibrate with T5-XXL and without a GPU", f"{error.value}", 1)
