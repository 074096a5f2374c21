"""The whole way on a cluster of three nodes, through `ray job submit` with a token: what one machine gives.

The nodes are processes of this machine with addresses of their own; their stores are a folder and an S3 server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_cluster import REPOSITORY, LocalCluster, local_cluster, run, start, submit
from tiny import save_bert, write_corpus

from indexing.runs import read_run
from indexing.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

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
            yield "search", "--store", store, "--mode", mode, "--k", 50, "--name", mode, "--run", results / f"{mode}.trec"
        yield "evaluate", "--store", store, "--run", *RUNS, "--json", results / "evaluation.json"
        yield "verify", "--store", store


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Way:
    root = tmp_path_factory.mktemp("cluster")
    source = write_corpus(root / "raw", 1_200, questions=QUERIES)
    made = Way(root, source, save_bert(root / "model"), root / "alone" / "store")
    for step in made.steps(str(made.store), root / "alone"):
        run(*step)
    return made


@pytest.fixture(scope="module")
def cluster(s3_server: str) -> Iterator[LocalCluster]:
    """Every node was started with what reaches S3: credentials are each node's own."""
    with local_cluster(workers=2, **{name: value for name, value in os.environ.items() if name.startswith("AWS_")}) as made:
        yield made


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_the_whole_way_gives_what_one_machine_gives(
    way: Way, cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    store = str(tmp_path / "store") if kind == "local" else f"{request.getfixturevalue('bucket')}/cluster"
    for name, *arguments in way.steps(store, tmp_path):
        status, said = submit(cluster, REPOSITORY, str(name), *arguments)
        assert status == 0, said
        assert not re.search(r"\(raylet\)|\.cc:\d+", said), said

    alone, there = Store(str(way.store)), Store(store)
    assert there.keys() == alone.keys()
    for key in alone.keys():
        ours, theirs = (each.open(*key.split("/", 1)) for each in (there, alone))
        assert ours.parts == theirs.parts, key  # every name, number of rows, and sha256
        assert ours.fingerprint == theirs.fingerprint, key
    for mode in RUNS:
        assert (tmp_path / f"{mode}.trec").read_bytes() == (way.root / "alone" / f"{mode}.trec").read_bytes()
        [block] = read_run(there.open("runs", mode))
        assert len(set(block["query_id"].to_pylist())) == QUERIES
    figures = [json.loads((folder / "evaluation.json").read_text()) for folder in (tmp_path, way.root / "alone")]
    assert figures[0]["per_query"] == figures[1]["per_query"]
    assert figures[0]["mean"]["exact"]["R@100"] > 0.5  # a question is the start of the passage that answers it
