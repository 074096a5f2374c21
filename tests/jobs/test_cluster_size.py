"""The line about the size of a cluster to which more nodes may come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs import encode_corpus
from jobs.session import HEAD, describe_size

import pytest
from job_outcome import Outcome

Node = dict[str, Any]


def node(cores: int, *, head: bool = False, alive: bool = True) -> Node:
    resources = {"memory": 1e9, **({"CPU": float(cores)} if cores else {}), **({HEAD: 1.0} if head else {})}
    return {"Alive": alive, "Resources": resources}


def test_a_head_without_cores_and_no_other_node(documented: Callable[..., None]) -> None:
    line = describe_size([node(0, head=True), node(8, alive=False)], "--max-workers N")
    assert line == (
        "this cluster has 0 CPUs now, as its nodes have not started: give --max-workers N, which requests them from an "
        "autoscaler"
    )
    documented(
        "Clusters", "encode_corpus without --max-workers, on a head without CPUs and without other nodes", line, 0
    )


def test_a_head_without_cores_and_other_nodes() -> None:
    line = describe_size([node(0, head=True), node(4), node(8)], "--max-workers N")
    assert line is not None
    assert "takes its size from the 12 CPUs of 2 nodes that are there now: give --max-workers N" in line


@pytest.mark.parametrize("nodes", [[node(2, head=True)], [node(2, head=True), node(4)], [node(4)], []])
def test_other_clusters_are_taken_as_they_are(nodes: list[Node]) -> None:
    assert describe_size(nodes, "--max-workers N") is None


@pytest.mark.cluster
def test_an_encoding_says_so_unless_its_size_is_given(
    local_ray: None, world, job: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it looks at the other options of its size, of which one is wrong here, so that nothing is encoded."""
    monkeypatch.setattr(encode_corpus, "describe_size", lambda nodes, option: f"{len(nodes)} node: give {option}")
    wrong = ("--store", world.store, "--encoder", world.model, "--name", "x", "--cpus", 0)
    assert job("encode_corpus", *wrong).out == "1 node: give --max-workers N\n"
    assert job("encode_corpus", *wrong, "--max-workers", 1).out == ""
