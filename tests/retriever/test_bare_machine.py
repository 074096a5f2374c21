"""retriever/ and benchmarks/gpu.py on a machine with torch, transformers, numpy, safetensors and sentence-transformers.

A hook refuses what the project's files import beside these, and hides packages that such a machine does not have.
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

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks/gpu.py"
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu.py with three made-up measurements, the second of which fails, in this process."""
    spec = importlib.util.spec_from_file_location("benchmark_gpu", GPU)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_gpu", module)
    spec.loader.exec_module(module)
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
