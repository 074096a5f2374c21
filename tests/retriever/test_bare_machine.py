"""retriever/, benchmarks/gpu.py and benchmarks/gpu_experiments.py on a machine with few packages.

These are torch, transformers, numpy, safetensors and, for gpu.py, sentence-transformers. A hook refuses what the
project's files import beside these, and hides packages that such a machine does not have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_bert, write_source

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks/gpu.py"
EXPERIMENTS = ROOT / "benchmarks/gpu_experiments.py"
# tokenizers and huggingface_hub come with transformers.
ALLOWED = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "sentence_transformers",
    "tokenizers",
    "huggingface_hub",
    "riptide",
    "benchmarks",
)
HIDDEN = (
    "ray",
    "faiss",
    "datasets",
    "pyarrow",
    "psutil",
    "sentencex",
    "boto3",
    "fastapi",
    "deepspeed",
    "peft",
    "accelerate",
    "orjson",
    "xxhash",
    "ir_measures",
)
HOOK = f"""
import builtins, sys
original = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    file = (globals or {{}}).get("__file__") or ""
    package = name.partition(".")[0]
    if level == 0 and file.startswith({str(ROOT)!r} + "/") and "site-packages" not in file:
        if package not in sys.stdlib_module_names and package not in {ALLOWED}:
            raise ModuleNotFoundError(f"{{file}} imports {{name}}, which a bare machine does not have", name=name)
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
sys.modules |= dict.fromkeys({HIDDEN})
"""


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """bare(*arguments): Python with the hook, in this process's environment and in all that it starts."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)

    def start(*arguments: object) -> subprocess.CompletedProcess:
        variables = {**os.environ, "PYTHONPATH": f"{tmp_path / 'hook'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path)

    return start


def test_the_hook_refuses_what_is_not_there(bare, tmp_path: Path) -> None:
    """The other tests mean something only if this one fails to import."""
    ended = bare("-c", "import riptide.indexing.search.snippets")
    assert "search/snippets.py imports regex, which a bare machine does not have" in ended.stderr
    assert "ModuleNotFoundError" in bare("-c", "import ray").stderr


def test_every_module_of_the_retriever_is_imported(bare) -> None:
    files = sorted((ROOT / "retriever").rglob("*.py"))
    modules = [".".join(("riptide", *file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    assert {"riptide.retriever.systems.sentences", "riptide.retriever.model.weights"} <= {*modules}
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('all')"
    ended = bare("-c", script, *modules)
    assert (ended.returncode, ended.stdout) == (0, "all\n"), ended.stderr


def test_a_measurement_runs_and_a_second_call_continues_the_file(bare, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    ended = bare(GPU, "--only", "exact-search", "training-trainer", "query-prompts", "--out", file)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(file.read_text())
    assert list(document["measurements"]) == ["exact-search", "training-trainer", "query-prompts"]
    found = document["measurements"]["exact-search"]
    assert found["status"] == "done"
    assert found["figures"]["agreement_with_peer"] > 0.99
    figures = document["measurements"]["query-prompts"]["figures"]
    assert figures["largest_difference"]["float32"] < 1e-5
    assert list(figures["traffic"]) == ["none", "fixed", "half before", "half after"]
    assert list(figures["lengths"])[:3] == ["none", "fixed 2", "fixed 5"]
    assert document["measurements"]["training-trainer"]["status"] == "skipped"
    assert "datasets, accelerate not installed" in document["measurements"]["training-trainer"]["reason"]
    assert "exact-search: in the file already" in bare(GPU, "--only", "exact-search", "--out", file).stdout
    assert json.loads(file.read_text()) == document


def load(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads a benchmark in this process."""
    name = f"benchmark_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu.py with three made-up measurements, the second of which fails, in this process."""
    module = load(GPU, monkeypatch)
    calls: dict[str, int] = {}

    def figures(name: str) -> dict[str, Any]:
        calls[name] = calls.get(name, 0) + 1
        if name == "second" and calls[name] == 1:
            raise RuntimeError("out\n  of memory")
        return {"calls": calls[name]}

    made_up = {
        name: module.Measurement(f"the {name}", lambda setting, name=name: figures(name))
        for name in ("first", "second", "third")
    }
    monkeypatch.setattr(module, "MEASUREMENTS", made_up)
    monkeypatch.setattr(module, "measure_apart", module.measure_here)
    return module


def records(file: Path) -> dict[str, dict[str, Any]]:
    """The measurements of a file, without the time that they took."""
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["measurements"]
    assert all(record.pop("seconds") >= 0 for record in found.values())
    return found


def test_a_failure_is_recorded_the_others_run_and_the_same_command_repeats_it(gpu, tmp_path: Path, capsys) -> None:
    file = tmp_path / "results/gpu.json"
    assert gpu.main(["--out", str(file)]) == 1
    assert records(file) == {
        "first": {"status": "done", "figures": {"calls": 1}},
        "second": {"status": "failed", "error": "RuntimeError: out of memory"},
        "third": {"status": "done", "figures": {"calls": 1}},
    }
    assert "failed: second" in capsys.readouterr().err
    assert gpu.main(["--out", str(file)]) == 0
    assert {name: record["figures"]["calls"] for name, record in records(file).items()} == {
        "first": 1,
        "second": 2,
        "third": 1,
    }
    assert gpu.main(["--out", str(file), "--only", "third", "--again"]) == 0
    assert records(file)["third"]["figures"] == {"calls": 2}
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


def test_the_file_is_written_after_each_measurement(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends in the second measurement: the first one is kept."""
    file = tmp_path / "gpu.json"

    def interrupted(setting: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu.MEASUREMENTS, "second", gpu.Measurement("", interrupted))
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(file)])
    assert list(records(file)) == ["first"]


def test_measurements_are_listed_and_unknown_ones_and_other_machines_refused(gpu, tmp_path: Path, capsys) -> None:
    assert gpu.main(["--list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [name, "the", name] for name in ("first", "second", "third")
    ]
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--only", "fourth"])
    assert "invalid choice: 'fourth'" in capsys.readouterr().err
    file = tmp_path / "gpu.json"
    gpu.main(["--out", str(file), "--only", "first"])
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "device": "another"}))
    with pytest.raises(SystemExit, match=r"its figures are of .*another"):
        gpu.main(["--out", str(file)])
    file.write_text("{}")
    with pytest.raises(SystemExit, match="not a file of this benchmark"):
        gpu.main(["--out", str(file)])


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to see it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_measurement_that_takes_too_long_or_dies_is_a_failure(gpu, tmp_path: Path, monkeypatch) -> None:
    """Of a process of its own, and of what that one has started."""
    monkeypatch.undo()
    marker = tmp_path / "pid"
    slow = ["sh", "-c", f"sleep 600 & echo $! > {marker}; wait"]
    commands = {"slow": slow, "dying": [sys.executable, "-c", "import os; os.abort()"]}
    monkeypatch.setattr(gpu, "command_of", lambda name, seconds, file: commands[name])
    assert gpu.measure_apart("slow", 3) == {
        "status": "failed",
        "error": "it took longer than 3 s, its limit (--seconds)",
    }
    while is_running(int(marker.read_text())):
        time.sleep(0.05)
    assert gpu.measure_apart("dying", 60)["error"] == "its process ended with status -6, without figures"


def test_rounds_end_with_the_time(gpu) -> None:
    for left_s, rounds in ((1000.0, gpu.ROUNDS), (-1.0, 1)):
        setting = gpu.Setting("cpu", time.monotonic() + left_s)
        assert gpu.compare(lambda: None, lambda: None, setting)["rounds"] == rounds


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(EXPERIMENTS, monkeypatch)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("answers", [(), ("w1", "w2", "w3", "w4")])
def test_a_set_has_each_kind_of_negatives_and_all_positives_of_the_test(experiments, tmp_path: Path, answers) -> None:
    source, folder = write_source(tmp_path / "raw", answers=answers), tmp_path / "set"
    sizes = ["--pool", "100", "--train", "25", "--test", "8", "--kept", "20"]
    assert experiments.main(["--prepare", "--source", str(source), "--set", str(folder), *sizes]) == 0
    train, test, passages = (read_lines(folder / f"{name}.jsonl") for name in ("train", "test", "passages"))
    about = json.loads((folder / "set.json").read_text())
    assert (len(train), len(test), len(passages)) == (25, 8, about["passages"])
    raw = {document["text"]: document["_id"] for document in read_lines(source / "corpus.jsonl")}
    ids = {document["text"]: document["_id"] for document in read_lines(source / "queries.jsonl")}
    for split, records in (("train", train), ("test", test)):
        judged = dict(line.split("\t")[:2] for line in (source / f"qrels/{split}.tsv").read_text().splitlines())
        for each in records:
            assert [raw[passages[row]["text"]] for row in each["positives"]] == [judged[ids[each["text"]]]]
    assert max(row for each in test for row in each["positives"]) < about["pool"] == 100
    for each in train:
        for kind, rows in each["negatives"].items():
            assert len({*rows}) == len(rows)
            assert kind == "bm25-filtered" or len(rows) == 20
            assert not {*rows} & {*each["positives"]}

    def hold_answers(kind: str) -> list[bool]:
        rows = [row for each in train for row in each["negatives"][kind]]
        return [bool({*passages[row]["text"].split()} & {*answers}) for row in rows]

    assert not any(hold_answers("bm25-filtered"))
    assert any(hold_answers("bm25")) == bool(answers)
    assert about["filter"] == ("answers" if answers else "relative margin")
    with pytest.raises(SystemExit, match="already exists"):
        experiments.main(["--prepare", "--source", str(source), "--set", str(folder)])


def test_arms_run_on_a_bare_machine_and_a_second_call_continues_the_file(
    bare, experiments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the other tests of this folder
    prepared, file = tmp_path / "set", tmp_path / "results.json"
    source = write_source(tmp_path / "raw")
    experiments.main(["--prepare", "--source", str(source), "--set", str(prepared), "--pool", "100"])
    backbones = [save_bert(tmp_path / name, seed=seed, spread=0.2) for seed, name in enumerate(("plain", "given"))]
    sizes = ["--steps", 2, "--batch", 4, "--length", 4, "--query-length", 16, "--passage-length", 32]
    command = [EXPERIMENTS, "--set", prepared, "--out", file, *sizes, "--seeds", 0]
    first = bare(*command, "--backbones", backbones[0], "--negatives", "none", "bm25")
    assert first.returncode == 0, first.stderr
    before = json.loads(file.read_text())["measurements"]
    assert [*before] == [
        f"plain {method} {kind} seed 0" for kind in ("none", "bm25") for method in ("finetune", "prompt")
    ]
    assert len({record["last_loss"] for record in before.values()}) == 4
    for record in before.values():
        ranks = record["reciprocal_ranks"]
        assert record["mrr@10"] == pytest.approx(sum(ranks) / 10)
        assert {*ranks} <= {0.0, *(float(np.float32(1 / rank)) for rank in range(1, 11))}
    second = bare(*command, "--backbones", *backbones, "--methods", "finetune")
    assert second.returncode == 0, second.stderr
    assert "plain finetune bm25 seed 0: in the file already" in second.stdout
    after = json.loads(file.read_text())["measurements"]
    assert len(after) == 10
    assert {name: after[name] for name in before} == before
    assert {record["status"] for record in after.values()} == {"done"}


def test_arms_end_with_the_time_failures_are_recorded_and_other_options_refused(
    experiments, tmp_path: Path, capsys
) -> None:
    source, prepared, file = write_source(tmp_path / "raw"), tmp_path / "set", tmp_path / "results.json"
    experiments.main(["--prepare", "--source", str(source), "--set", str(prepared), "--pool", "100"])
    (tmp_path / "empty").mkdir()
    command = ["--set", str(prepared), "--out", str(file), "--seeds", "0", "--methods", "prompt", "--negatives", "none"]
    whole = save_bert(tmp_path / "whole")
    sizes = ["--query-length", "16", "--passage-length", "32"]
    assert experiments.main([*command, *sizes, "--backbones", str(whole), "--limit-s", "0"]) == 0
    assert "whole prompt none seed 0: the time is up" in capsys.readouterr().out
    assert not file.exists()
    assert experiments.main([*command, "--backbones", str(tmp_path / "empty")]) == 1
    record = json.loads(file.read_text())["measurements"]["empty prompt none seed 0"]
    assert record["status"] == "failed"
    assert "config.json" in record["error"]
    with pytest.raises(SystemExit, match="give another --out"):
        experiments.main([*command, *sizes, "--backbones", str(whole)])
    with pytest.raises(SystemExit, match="2"):
        experiments.main([*command, "--backbones", str(tmp_path / "absent")])
    assert "expected one or more existing folders" in capsys.readouterr().err


def test_reciprocal_ranks_are_those_of_a_plain_loop(experiments) -> None:
    random = np.random.default_rng(0)
    queries, passages = (random.standard_normal((count, 8), np.float32) for count in (300, 40))
    positives = [random.choice(40, size, replace=False).tolist() for size in random.integers(1, 4, 300)]
    expected = []
    for query, rows in zip(queries, positives, strict=True):
        order = sorted(range(40), key=lambda row: -float(query.astype(float) @ passages[row].astype(float)))
        rank = 1 + min(order.index(row) for row in rows)
        expected.append(1 / rank if rank <= 10 else 0)
    assert 0 in expected
    actual = experiments.reciprocal_ranks(queries, passages, positives, torch.device("cpu"))
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))
