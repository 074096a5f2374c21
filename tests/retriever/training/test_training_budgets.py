"""benchmarks/training_budgets.py at toy size: all methods train, and a second call repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_bert, write_source

from benchmarks import gpu_experiments, training_budgets
from benchmarks.common import training_runs
from benchmarks.common.files import read_json


@pytest.mark.long
def test_each_method_trains_and_the_best_rate_gets_the_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # the process has further tests
    monkeypatch.setattr(training_runs, "RATES", dict.fromkeys(training_runs.RATES, (1e-3, 1e-2)))
    monkeypatch.setattr(training_budgets, "QUERY_LENGTH", 16)
    monkeypatch.setattr(training_budgets, "PASSAGE_LENGTH", 32)
    source, prepared, file = tmp_path / "raw", tmp_path / "set", tmp_path / "figures.json.gz"
    write_source(source)
    gpu_experiments.main(["--prepare", "--source", str(source), "--set", str(prepared), "--pool", "100"])
    backbone = save_bert(tmp_path / "backbone", spread=0.2)
    sizes = ["--minutes", "0.0001", "0.0002", "--seeds", "0", "1", "--batch", "4", "--dev", "6"]
    command = ["--sets", str(prepared), "--backbone", str(backbone), "--out", str(file), *sizes]
    training_budgets.main(command)
    runs = read_json(file)["measurements"]
    for method in training_budgets.METHODS:
        smaller = {name: run for name, run in runs.items() if name.startswith(f"set {method} 0.0001 min")}
        assert len(smaller) == (2 if method == "peer-cached" else 3)
        assert all(run["steps"] == 4 and len(run["reciprocal_ranks"]) == 10 for run in smaller.values())
        first = {name: run["dev mrr@10"] for name, run in smaller.items() if name.endswith("seed 0")}
        best = max(first, key=lambda name: first[name])
        assert f"{best.removesuffix('0')}1" in smaller
    before = file.read_bytes()
    training_budgets.main(command)
    assert file.read_bytes() == before
    capsys.readouterr()
    training_budgets.main(["--out", str(file), "--tables"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")].count("| riptide, LoRA") == 4
    assert "| 0.0002 min | learning rate | steps | seeds | set | mean | minus sentence-transformers |" in lines


def test_a_rate_that_a_method_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        training_budgets.main(["--sets", str(tmp_path), "--methods", "peer", "lora", "--rates", "1e-4"])
    assert "--rates: expected some of 0.0003, 0.001, 0.003 for lora, got 0.0001" in capsys.readouterr().err
