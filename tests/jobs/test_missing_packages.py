"""An installation without extras: what works, and the one line that names a missing extra and its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from samples import save_tiny_bert

from riptide.process.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
WORKS = """
import sys, riptide
store = riptide.Store("store")
rows = [{"id": str(n), "text": f"w{n} w1", "year": 1900 + n} for n in range(20)]
store.import_corpus(rows, filters={"year": "int64"})
store.import_queries([{"id": "q", "query": "w3", "relevant": "3"}], name="mine", split="test")
store.encode_corpus(sys.argv[1], name="tiny", allow_unknown_tokens=True)
hits = store.search("exact")("w3 w1", k=3, filter="year < 1910")
store.search_queries("exact", name="run")
print(len(hits), store.evaluate("run", metrics="RR@10").mean, riptide.Client)
"""
COMMANDS = {
    "fastapi": ("serve-search", "--store", "store"),
    "pyserini": ("build-bm25", "--store", "store"),
    "ray": ("encode-corpus", "--store", "store", "--encoder", "MODEL", "--name", "other", "--ray"),
    "deepspeed": ("tune-prompts", "--store", "store", "--task", "t", "--backbone", "MODEL", "--negatives", "none"),
    "matplotlib": ("draw", "rates", "--evaluation", "none.json", "--png", "rates.png"),
}
REFUSED = """
import json, os, sys
from riptide.jobs.commands.console import run_command
for package, command in json.loads(sys.argv[1]).items():
    try:
        run_command(command, "")
    except SystemExit as end:
        print(f"status of {package}: {end.code}", file=sys.stderr)
"""


def test_each_package_is_in_the_extra_that_its_message_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {"jnius": "pyserini", "multipart": "python-multipart", "sklearn": "scikit-learn", "starlette": "fastapi"}
    names["opentelemetry"] = "opentelemetry-sdk"
    for package, extra in EXTRAS.items():
        distributions = {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in extras[extra]}
        assert names.get(package, package).replace("-", "_") in distributions, package
    assert set(EXTRAS.values()) - {"mteb"} == set(re.split(r"[\[\],]", extras["all"][0])[1:-1])


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages that `pip install riptide` installs, and those that they require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required, names = list(project["dependencies"]), set[str]()
    while required:
        requirement = Requirement(required.pop())
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        required += metadata.requires(name) or ()
    (tmp_path / "site").mkdir()
    for distribution in map(metadata.distribution, names):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / "site" / top).exists():
                (tmp_path / "site" / top).symlink_to(str(distribution.locate_file(top)))
    return tmp_path / "site"


def test_an_installation_without_extras(installed: Path, tmp_path: Path, documented: Callable[..., None]) -> None:
    model = save_tiny_bert(tmp_path / "model")

    def python(program: str, argument: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-S", "-c", program, argument]  # -S: without the packages of this environment
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)

    worked = python(WORKS, str(model))
    assert worked.stdout.startswith("3 "), worked.stderr
    commands = {name: [word.replace("MODEL", str(model)) for word in words] for name, words in COMMANDS.items()}
    lines = python(REFUSED, json.dumps(commands)).stderr.splitlines()
    for package, (job, *_) in COMMANDS.items():
        line = lines[lines.index(f"status of {package}: 1") - 1]
        expected = f"needs the package {package}, which is not installed: pip install 'riptide[{EXTRAS[package]}]'"
        assert line.startswith("error: "), line
        assert line.endswith(expected), line
        documented("Installation", f"{job} without the package {package}", line.removeprefix("error: "), 1)
