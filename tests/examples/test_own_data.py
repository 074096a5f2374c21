"""docs/tutorial.md: its commands run as they are written, from the files of examples/own_data to an endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "tutorial.md"
VARIES = re.compile(r"\d+\.\d+|[\d,]+/s")  # times, rates and scores, which depend on the machine


class Block(NamedTuple):
    """A fenced block of the page."""

    chapter: str
    language: str
    text: str


def blocks(chapter: str) -> list[Block]:
    """Returns the blocks of a chapter, in order."""
    [text] = [part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if part.startswith(chapter)]
    return [Block(chapter, *match) for match in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)]


def commands(block: Block) -> list[str]:
    """Returns the commands of a block."""
    return block.text.replace("\\\n", "").splitlines() if block.language == "bash" else []


def masked(text: str) -> list[str]:
    """Returns the lines of a text without numbers that vary."""
    return [" ".join(VARIES.sub("#", line).split()) for line in text.splitlines()]


class Reader:
    """Runs the commands of the page in order, each as it is written."""

    def __init__(self, folder: Path, call_job: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.call_job, self.capsys = folder, call_job, capsys
        self.output = ""  # of the last block of commands
        self.evaluations: list[dict[str, Any]] = []

    def run(self, command: str) -> None:
        """Runs a job in this process, and stores what it prints."""
        program, job, *arguments = shlex.split(command)
        assert program == "riptide"
        self.capsys.readouterr()
        assert self.call_job(job.replace("-", "_"), *arguments) == 0, (command, self.capsys.readouterr().err)
        printed = self.capsys.readouterr()
        self.output += (printed.out + printed.err).replace(str(self.folder), "…")
        if job == "evaluate":
            [file] = re.findall(r"figures in (\S+)", printed.out)
            self.evaluations.append(json.loads(Path(file).read_text(encoding="utf-8")))

    def read(self, block: Block) -> None:
        """Runs the commands of a block, or compares the output that the page shows with that of the last commands."""
        if block.language == "bash":
            self.output = ""
            for command in commands(block):
                self.run(command)
        elif block.language == "text":
            missing = set(masked(block.text)) - set(masked(self.output))
            assert not missing, (missing, self.output)

    def quality(self, metric: str) -> list[float]:
        """Returns the means of the last evaluation: by BM25, dense and hybrid search."""
        return [means[metric] for means in self.evaluations[-1]["mean"].values()]


def wait_until_ready(url: str) -> None:
    """Returns when a server answers that it is ready."""
    for _ in range(600):
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/readyz"):
            return
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")


@contextlib.contextmanager
def served(command: str) -> Iterator[str]:
    """Runs the command that serves a store, on a free port; provides its address once it is ready."""
    arguments = [sys.executable, "-m", "riptide", *shlex.split(command)[1:], "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        try:
            url = next(line.split()[1] for line in process.stdout if line.startswith("serving")).rstrip("/")
            wait_until_ready(url)
            yield url
        finally:
            process.terminate()


def answer(command: str, url: str) -> dict[str, Any]:
    """Returns the response to the request of a curl command."""
    program, *arguments = shlex.split(command)
    assert program == "curl"
    path = next(word for word in arguments if word.startswith("localhost:8000")).removeprefix("localhost:8000")
    body = arguments[arguments.index("-d") + 1].encode()
    headers = dict([arguments[arguments.index("-H") + 1].split(": ")])
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as response:
        return json.load(response)


@pytest.fixture
def reader(
    tmp_path: Path,
    call_job: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Reader:
    """A reader of the page in a folder with copies of the files that the page names.

    The measurements are left out: they are two fifths of the documentation, and answer no query.
    """
    shutil.copytree(REPOSITORY / "examples/own_data", tmp_path / "examples/own_data")
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("measurements", "results"))
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, call_job, capsys)


def read_until_served(reader: Reader, chapter: str, compares: bool) -> tuple[list[Block], dict[str, Any]]:
    """Reads a chapter up to its request to the server; returns its other blocks, and the response."""
    rest = [block for block in blocks(chapter) if compares or block.language != "text"]
    while not rest[0].text.startswith("riptide serve-search"):
        reader.read(rest.pop(0))
    [serve] = commands(rest.pop(0))
    [request] = commands(rest.pop(0))
    with served(serve) as url:
        return rest, answer(request, url)


def first_hit(response: dict[str, Any]) -> dict[str, Any]:
    """Returns the first hit of a response."""
    return response["results"][0]["hits"][0]


def test_a_table_is_imported_searched_with_a_filter_measured_and_served(reader: Reader) -> None:
    [shown], response = read_until_served(reader, "A table of packages", compares=True)
    hit = first_hit(response)
    assert re.findall(r'"id":"(\S+?)"', shown.text) == [hit["id"]]
    assert hit["metadata"]["typed"] is True
    bm25, dense, hybrid = reader.quality("nDCG@10")
    assert dense > hybrid > bm25 > 0.3


def test_a_folder_of_documents_is_split_searched_by_document_measured_and_served(reader: Reader) -> None:
    """What the searches print changes with the documentation, so it is not compared with the page."""
    [shown], response = read_until_served(reader, "A folder of long documents", compares=False)
    hit = first_hit(response)
    assert re.findall(r'"document":"(\S+?)"', shown.text) == [hit["document"]]
    assert hit["id"].startswith(f"{hit['document']}#")
    assert hit["start"] < hit["end"]
    bm25, dense, hybrid = reader.quality("nDCG@10")
    assert min(dense, hybrid) > 0.6
    assert bm25 > 0.4
    assert len(reader.evaluations[-1]["per_query"]) == 3
