"""The whole way on a cluster of three nodes, through `ray job submit` with a token: what one machine gives.

The nodes are processes of this machine with addresses of their own; their store is on an S3 server, and with
RIPTIDE_TESTS=all a folder too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_cluster import (
    LONG,
    PATIENCE,
    RAY_NOTE,
    REPOSITORY,
    LocalCluster,
    clean_environment,
    local_cluster,
    run,
    start,
    submit,
)
from tiny import save_bert, write_corpus

from riptide.indexing.search.runs import read_run
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nodes, pytest.mark.slow]

QUERIES = 40
RUNS = ("dense", "exact")


@dataclass(frozen=True)
class Way:
    """Corpus, model, and a store in which one machine has gone the whole way."""

    root: Path
    source: Path
    model: Path
    store: Path

    def steps(self, store: str, results: Path) -> Iterator[tuple[object, ...]]:
        """Import to verify: the arguments of each job."""
        yield "import_corpus", "--store", store, "--source", self.source, "--part-size", 200
        yield "encode_corpus", "--store", store, "--encoder", self.model, "--name", "tiny", "--compile", "never"
        yield "build_index", "--store", store, "--factory", "IVF16,SQ8", "--shards", 4, "--recall", "0.2"
        for mode in RUNS:
            trec = results / f"{mode}.trec"
            yield "search", "--store", store, "--mode", mode, "--k", 50, "--name", mode, "--run", trec
        yield "evaluate", "--store", store, "--run", *RUNS, "--json", results / "evaluation.json"
        yield "verify", "--store", store


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Way:
    root = tmp_path_factory.mktemp("cluster")
    source = write_corpus(root / "raw", 1_200, queries=QUERIES)
    made = Way(root, source, save_bert(root / "model"), root / "alone" / "store")
    for step in made.steps(str(made.store), root / "alone"):
        assert call_job(*step) == 0
    return made


@pytest.fixture(scope="module")
def cluster(s3_server: str) -> Iterator[LocalCluster]:
    """Every node was started with what reaches S3: credentials are each node's own."""
    reach = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with local_cluster(workers=2, **reach) as made:
        yield made


def test_a_submission_needs_the_token_and_sends_the_code_alone(way: Way, cluster: LocalCluster) -> None:
    job = ("verify", "--store", way.store)
    status, said = submit(cluster, REPOSITORY, *job, token=False)
    assert status != 0
    assert "401" in said or "nauthenticated" in said or "authentication token" in said, said
    status, said = submit(cluster, REPOSITORY, *job)
    assert status == 0, said
    assert "artifacts are as they were committed" in said
    [package] = cluster.folder.glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/")
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    print(f"--working-dir . unpacks to {size / 1e6:.1f} MB")
    assert size < 15e6
    assert not {".git", ".venv", "data", "tests", "docs"} & {path.name for path in package.iterdir()}


@pytest.mark.parametrize("kind", ["s3", "local"] if LONG else ["s3"])
def test_the_whole_way_gives_what_one_machine_gives(
    way: Way,
    cluster: LocalCluster,
    tmp_path: Path,
    call_job: Callable[..., int],
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    store = str(tmp_path / "store") if kind == "local" else f"{request.getfixturevalue('bucket')}/cluster"
    for name, *arguments in way.steps(store, tmp_path):
        if name in ("evaluate", "verify"):  # these have no work for a cluster
            assert call_job(name, *arguments) == 0
            continue
        status, said = submit(cluster, REPOSITORY, str(name), *arguments)
        assert status == 0, said
        lines = "".join(line for line in said.splitlines(keepends=True) if RAY_NOTE not in line)
        assert not re.search(r"\(raylet\)|\.cc:\d+", lines), said

    alone, there = artifacts(str(way.store)), artifacts(store)
    assert there.keys() == alone.keys()
    for key, artifact in alone.items():
        assert there[key].parts == artifact.parts, key  # every name, number of rows, and sha256
        assert there[key].fingerprint == artifact.fingerprint, key
    for mode in RUNS:
        assert (tmp_path / f"{mode}.trec").read_bytes() == (way.root / "alone" / f"{mode}.trec").read_bytes()
        [block] = read_run(there[f"runs/{mode}"])
        assert len(set(block["query_id"].to_pylist())) == QUERIES
    figures = [json.loads((folder / "evaluation.json").read_text()) for folder in (tmp_path, way.root / "alone")]
    assert figures[0]["per_query"] == figures[1]["per_query"]
    assert figures[0]["mean"]["exact"]["R@100"] > 0.1  # by chance it would be 0.04: questions are pieces of passages


def test_the_commands_of_the_page_run_as_they_are_written(way: Way, cluster: LocalCluster, tmp_path: Path) -> None:
    """Its first two blocks in a shell, without the lines that start and stop a cluster, in the places of the test."""
    page = (REPOSITORY / "docs/cluster.md").read_text()
    block = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[:2])
    lines = [line for line in block.splitlines() if not re.match(r"ray (get-auth-token|start|stop)\b", line)]
    assert len(block.splitlines()) == len(lines) + 3
    script = "\n".join(lines)
    store = tmp_path / "store"
    shutil.copytree(way.store / "corpus", store / "corpus")
    for text, own in {
        "http://127.0.0.1:8265": cluster.dashboard,
        "$PWD/data/squad": str(store),
        "sentence-transformers/all-MiniLM-L6-v2": str(way.model),
        "ray job submit": f"{sys.executable} -m ray.scripts.scripts job submit",
        "-- python": f"-- {sys.executable}",
    }.items():
        assert script.count(text) == 1, text
        script = script.replace(text, own)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text(cluster.token)
    environment = clean_environment({"HOME": str(tmp_path)})
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert Store(str(store)).keys("embeddings") == ["embeddings/minilm/g0000"]


def artifacts(store: str) -> dict[str, Artifact]:
    """Key -> artifact of all that is complete in a store."""
    opened = Store(store)
    return {key: opened.open(*key.split("/", 1)) for key in opened.keys("")}


def test_a_folder_that_one_node_does_not_see_is_refused(way: Way, cluster: LocalCluster, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(way.store / "corpus", store / "corpus")
    before = sorted(store.rglob("*"))
    blind = cluster.add(hide=store)  # a mount that only this node has, as root may
    try:
        job = start("encode_corpus", "--store", store, "--encoder", way.model, environment=cluster.environment)
        line = job.refused()
    finally:
        cluster.count_lost(blind)
    assert f"node {blind.address} does not see the store {store}: put it on a file system that all nodes" in line
    assert [path for path in sorted(store.rglob("*")) if path.name != ".tmp"] == before


@pytest.mark.long
def test_nodes_of_another_numerics_class_are_excluded(
    way: Way, cluster: LocalCluster, tmp_path: Path, call_job: Callable[..., int]
) -> None:
    """The first worker decides the class: either the odd node is excluded, or the three others are."""
    store = tmp_path / "store"
    assert call_job("import_corpus", "--store", store, "--source", way.source, "--part-size", 10) == 0
    large = save_bert(tmp_path / "large", hidden=512, layers=24)  # work until the last of the four nodes has got some
    odd = cluster.add(ATEN_CPU_CAPABILITY="default")  # without the vector instructions that the others have
    others = {node.address for node in cluster.nodes} - {odd.address}
    try:
        out = run(
            "encode_corpus",
            "--store",
            store,
            "--encoder",
            large,
            "--name",
            "large",
            "--compile",
            "never",
            "--dtype",
            "float32",
            "--min-workers",
            4,
            "--max-workers",
            4,
            environment=cluster.environment,
        )
    finally:
        cluster.count_lost(odd)
    pattern = r"node (\S+) is excluded, .*: \S+ is of the numerics class `([^`]+)`, this worker's is `([^`]+)`: one"
    lines = re.findall(pattern, out)
    assert {address for address, *_ in lines} in ({odd.address}, others)
    [(pinned, other)] = {(pinned, other) for _, pinned, other in lines}
    assert ("default" in pinned, "default" in other) == (len(lines) == 3, len(lines) == 1)
    assert Store(str(store)).open("embeddings", "large/g0000").config["numerics"] == pinned
