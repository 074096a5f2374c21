"""What a developer adds is one new file and its entry in a registry: each addition works in a copy of the checkout.

The additions are written into the copy as a developer writes them, all together, and one process runs the jobs and the
HTTP server of the copy. docs/architecture.md lists the number of files of each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FOLDERS = ("indexing", "jobs", "retriever", "riptide", "serve")

METRIC = """
import json

import numpy as np

from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.measures.metadata_metric import MetadataMetric, cutoff_of


class LineAccuracy(MetadataMetric):
    form = "Line@K"
    summary = "whether one of the first K hits has the number of the line of the query"
    metadata_name = "line"

    def read(self, queries, ids):
        metadata = dict(zip(queries.table["id"].to_pylist(), queries.table["metadata"].to_pylist(), strict=True))
        return {id: f"p{json.loads(metadata[id])['line']}" for id in ids}

    def values(self, run, metadata, corpus, names):
        hits = ranked_hits(run, metadata)
        return {
            name: np.array([float(passage in hits[id][: cutoff_of(name)]) for id, passage in metadata.items()])
            for name in names
        }


LINE_ACCURACY = LineAccuracy()
"""
ROUTE = '''
    @json_routes.post("/v1/lengths", response_model=LengthsResponse)
    @access("admin", max_bytes=64)
    async def lengths(request: LengthsRequest, http: Request) -> Response:
        """Returns the number of characters of each text."""
        return json_response({"lengths": [len(text) for text in request.texts]})
'''
MODELS = """

class LengthsRequest(StrictModel):
    texts: list[Text]


class LengthsResponse(StrictModel):
    lengths: list[int]
"""
OPTION = '''
    capitals: bool = False
    """Print the ids in capitals."""
'''
# An addition -> its files: the text of a new file, or what an existing file has instead of some of its text.
ADDITIONS: Mapping[str, Mapping[str, str | list[tuple[str, str]]]] = {
    "a corpus format": {
        "indexing/formats/toy.py": (TESTS / "toy_format.py").read_text(),
        "indexing/formats/registry.py": [
            ("\n\n#", "\nfrom riptide.indexing.formats.toy import TOY\n\n#"),
            (", DOCUMENTS]", ", DOCUMENTS, TOY]"),
        ],
    },
    "a kind of hit source": {
        "indexing/hit_sources/fixed.py": (TESTS / "fixed_hits.py").read_text(),
        "indexing/hit_sources/registry.py": [
            (
                "\nfrom riptide.indexing.hit_sources.index_source ",
                "\nfrom riptide.indexing.hit_sources.fixed import FixedKind"
                "\nfrom riptide.indexing.hit_sources.index_source ",
            ),
            (", BM25,", ", BM25, FixedKind(),"),
        ],
    },
    "a kind of vector": {
        "indexing/hit_sources/several.py": (TESTS / "several_vectors.py").read_text(),
        "indexing/hit_sources/registry.py": [
            (
                "\nfrom riptide.indexing.hit_sources.splade ",
                "\nfrom riptide.indexing.hit_sources.several import SeveralSourceKind"
                "\nfrom riptide.indexing.hit_sources.splade ",
            ),
            (", SPLADE]", ", SPLADE, SeveralSourceKind()]"),
        ],
    },
    "a metric": {
        "indexing/measures/lines.py": METRIC,
        "jobs/evaluation/measures.py": [
            (
                "\nfrom riptide.indexing.measures.many_",
                "\nfrom riptide.indexing.measures.lines import LINE_ACCURACY\nfrom riptide.indexing.measures.many_",
            ),
            (", PAGE_R_PRECISION]", ", PAGE_R_PRECISION, LINE_ACCURACY]"),
        ],
    },
    "a route": {
        "serve/app.py": [
            ("    ReleaseRequest,\n", "    LengthsRequest,\n    LengthsResponse,\n    ReleaseRequest,\n"),
            (
                "\n    return json_routes\n\n\ndef release_routes",
                f"{ROUTE}\n    return json_routes\n\n\ndef release_routes",
            ),
        ],
        "serve/protocol.py": [("\n\nclass SearchRequest", f"{MODELS}\n\nclass SearchRequest")],
    },
    "an option of a job": {
        "jobs/import_queries.py": [
            ('of a table."""\n\n\ndef main', f'of a table."""{OPTION}\n\ndef main'),
            (
                "    print_queries(store, source, queries)\n",
                "    print_queries(store, source, queries)\n    if options.capitals:\n"
                '        say(" ".join(queries.table["id"].to_pylist()).upper())\n',
            ),
        ],
    },
}
PROGRAM = '''
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

from riptide.jobs.commands.cli import options_class_of, run

folder, model = Path(sys.argv[1]), sys.argv[2]
at = ("--store", folder / "store")


def call(job, *arguments):
    """Runs a job, and returns what it printed."""
    module, printed = importlib.import_module(f"riptide.jobs.{job}"), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run(module.main, options_class_of(module.main), [str(argument) for argument in arguments])
    return printed.getvalue()


answers = {"place": str(Path(importlib.import_module("riptide.serve.app").__file__).resolve())}
answers["a corpus format"] = call("import_corpus", *at, "--source", folder / "paints", "--format", "toy")
answers["an option of a job"] = call(
    "import_queries", *at, "--source", folder / "paints/queries.toy", "--queries", "more", "--capitals"
)
call("encode_corpus", *at, "--encoder", model, "--pooling", "several", "--name", "many", "--compile", "never")
call("build_index", *at)
answers["a kind of vector"] = call("search", *at, "--source", "several:many", "--query", "blue")

from riptide.indexing.hit_sources.fixed import save_fixed
from riptide.indexing.store.store import Store

store = Store(str(folder / "store"))
save_fixed(store, "best", [1, 0])
answers["a kind of hit source"] = call("search", *at, "--source", "fixed:best", "--query", "blue")
dev = ("--queries", "paints", "--split", "dev", "--source", "fixed:best")
call("evaluate", *at, *dev, "--metrics", "Line@1", "Line@2", "--json", folder / "e.json")
answers["a metric"] = json.loads((folder / "e.json").read_text())["mean"]
answers["help"] = call("evaluate", "--help") + call("encode_corpus", "--help") + call("import_corpus", "--help")

import riptide
from fastapi.testclient import TestClient
from riptide.serve.app import build_app
from riptide.serve.http.guard import Tokens, token_digest
from riptide.serve.one_process import open_local
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service_options import ServiceOptions

riptide.Store(folder / "store").import_queries(folder / "paints/queries.toy", name="others", capitals=True)
tokens = Tokens(user=frozenset([token_digest("u" * 16)]), admin=frozenset([token_digest("a" * 16)]))
app = build_app(ReleaseChanges(open_local(store, ServiceOptions(threads=1), device="cpu")), tokens)
client = TestClient(app, base_url="http://127.0.0.1")
answers["a route"] = [
    [answer.status_code, answer.json()]
    for texts, token in ((["ab", "c"], "a"), (["ab"], "u"), (["x" * 64], "a"))
    for answer in [client.post("/v1/lengths", json={"texts": texts}, headers={"authorization": f"Bearer {token * 16}"})]
]
Path(folder / "answers.json").write_text(json.dumps(answers))
'''


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, Any]:
    """What the jobs and the server of a checkout with all additions answer, by addition."""
    folder = tmp_path_factory.mktemp("additions")
    checkout = folder / "checkout"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    for files in ADDITIONS.values():
        for name, change in files.items():
            file = checkout / name
            assert isinstance(change, list) == file.exists()
            text = change if isinstance(change, str) else file.read_text()
            for old, new in change if isinstance(change, list) else ():
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            file.write_text(text)
    (folder / "paints/qrels").mkdir(parents=True)
    (folder / "paints/corpus.toy").write_text("p1: Blue paint\np2: Red paint\n")
    (folder / "paints/queries.toy").write_text("q1: something blue\nq2: any paint\n")
    (folder / "paints/qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tp1\t1\nq2\tp2\t2\n")
    command = [sys.executable, "-c", PROGRAM, str(folder), model]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "400"}
    process = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    assert answers["place"] == str(checkout / "serve/app.py")
    return answers


def test_additions_work_in_the_jobs_and_in_the_server(answers: dict[str, Any]) -> None:
    assert "2 passages" in answers["a corpus format"]
    assert "p1" in answers["a kind of vector"]
    first, second = (answers["a kind of hit source"].index(id) for id in ("p2", "p1"))
    assert first < second
    assert [*answers["a metric"].values()] == [{"Line@1": 0.5, "Line@2": 1.0}]
    assert answers["an option of a job"].endswith("Q1 Q2\n")
    assert [status for status, _ in answers["a route"]] == [200, 403, 413]
    assert answers["a route"][0][1] == {"lengths": [2, 1]}
    help_text = " ".join(answers["help"].split())
    assert "Line@K: whether one of the first K hits has the number" in help_text
    assert "{cls,mean,last,splade,several}" in help_text
    assert "documents,toy}" in help_text


@pytest.mark.parametrize("addition", ADDITIONS)
def test_the_map_of_the_code_has_the_number_of_files(addition: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    [now] = re.findall(rf"^\| {addition} \| \d+ \| (\d+) \| `tests/jobs/test_additions.py` \|$", page, re.MULTILINE)
    assert int(now) == len(ADDITIONS[addition]) <= 2
