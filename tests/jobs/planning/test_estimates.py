"""Estimates of --plan against the files and the requests of the jobs, and against products by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_s3 import FaultyS3, faulty_s3
from samples import make_passages, write_beir

from riptide.indexing.store import remote
from riptide.jobs.common.plans import planned_job
from riptide.jobs.common.steps import make_step
from riptide.jobs.planning.estimate import Estimate
from riptide.jobs.planning.machine import CLUSTERS, read_cluster
from riptide.jobs.planning.planned_job import Facts
from riptide.jobs.planning.planner import ESTIMATES, Planner
from riptide.jobs.planning.requests import NO_REQUESTS, Requests
from riptide.jobs.planning.sizes import Sizes

Done = Callable[..., str]


def written_bytes(plan: str) -> int:
    """Returns the bytes of files that a plan says are written."""
    match = re.search(r"^files .* \(([\d,]+) bytes\)$", plan, re.M)
    assert match is not None, plan
    return int(match[1].replace(",", ""))


def part_bytes(folder: Path) -> int:
    """Returns the bytes of the parts of an artifact, without records and manifests."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.suffix != ".json")


def test_bytes_and_rows_of_vectors_and_of_a_flat_index_are_exact(world: Any, done: Done) -> None:
    encode = ("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "other")
    plan = done(*encode, "--plan")
    assert re.search(r"^work     240 passages in 4 parts; [\d,]+ tokens, ", plan, re.M)
    done(*encode)
    assert part_bytes(world.store / "embeddings/other") == written_bytes(plan)
    index = ("build_index", "--store", world.store, "--embeddings", "other", "--shards", 3)
    plan = done(*index, "--plan")
    assert re.search(r"^work     240 vectors in 4 parts$", plan, re.M)
    done(*index)
    assert part_bytes(world.store / "index/other") == written_bytes(plan)


def test_the_tokens_of_a_small_corpus_are_counted(world: Any, done: Done) -> None:
    encode = ("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "other")
    match = re.search(r"; ([\d,]+) tokens, ", done(*encode, "--plan"))
    assert match is not None
    speed = re.search(r"then ([\d,]+) passages/s, ([\d,]+) tokens/s", done(*encode))
    assert speed is not None
    passages, tokens = (int(each.replace(",", "")) for each in speed.groups())
    assert int(match[1].replace(",", "")) == pytest.approx(240 * tokens / passages, rel=0.02)


def test_committed_parts_are_deducted(world: Any, done: Done) -> None:
    encode = ("encode_corpus", "--store", world.store, "--encoder", world.model)
    done(*encode, "--name", "other")
    folder = world.store / "embeddings/other/g0000"
    for name in ("manifest", "part-00001", "part-00003"):
        (folder / f"{name}.json").unlink()
    assert re.search(r"^work     120 passages in 2 parts; ", done(*encode, "--name", "other", "--plan"), re.M)
    assert done(*encode, "--name", "enc", "--dtype", "float32", "--compile", "never", "--plan").startswith("nothing to")


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    with faulty_s3(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        yield proxy


@pytest.mark.parametrize("part_size", [20, 60])
def test_requests_are_those_of_the_job(
    proxy: FaultyS3,
    bucket: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    done: Done,
    part_size: int,
) -> None:
    store = ("--store", f"{bucket}/s")
    done("import_corpus", *store, "--source", write_beir(tmp_path / "raw", make_passages(60)), "--part-size", part_size)
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / "empty-cache"))  # as on a new node, so that parts are fetched
    encode = ("encode_corpus", *store, "--encoder", model, "--name", "enc", "--allow-unknown-tokens")
    match = re.search(r"^requests ([\d,]+) writes, ([\d,]+) reads", done(*encode, "--plan"), re.M)
    assert match is not None
    monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / "another-cache"))
    monkeypatch.setattr(remote, "PROBED", set())  # as in a new process
    proxy.requests = 0
    done(*encode)
    renewals, others = divmod(proxy.requests - sum(map(int, match.groups())), 3)  # of the draft, after 20 s each
    assert others == 0
    assert 0 <= renewals < 10


def test_time_and_price_are_products() -> None:
    machine = read_cluster("a100x8")
    assert machine.price is not None
    rates = machine.throughput
    estimate = Estimate(
        "passages", 900, 9, units=9, start_s=10, forward_flops=9e15, requests=Requests(1_000_000, 2_000_000)
    )
    # Eight GPUs take two rounds for nine units of 10^15 operations.
    seconds = 10 + 2e15 / (rates.forward_tflops.value * 1e12)
    assert estimate.seconds(machine) == pytest.approx(seconds)
    requests = machine.price.per_million_writes + 2 * machine.price.per_million_reads
    assert estimate.price(machine) == pytest.approx(seconds / 3600 * machine.price.per_hour + requests)
    assert Estimate("vectors", 0, 0, units=0).seconds(machine) == 0


def test_a_plan_for_expected_sizes_reads_no_store(done: Done, tmp_path: Path) -> None:
    """Wikipedia's passages with RoBERTa-large: the operations are 2 per weight and token, and those of attention."""
    command = ("encode_corpus", "--store", "s3://nowhere/wikipedia", "--encoder", "FacebookAI/roberta-large")
    sizes = ("--expect", "passages", 21015324, "passage_tokens", 140)
    plan = done(*command, "--passage-length", 256, "--name", "r", "--plan", "--cluster", "a100x8", *sizes)
    flops = 21015324 * 140 * 2 * (302e6 + 2 * 24 * 1024 * 140)
    assert f"21,015,324 passages in 2,157 parts; 2,942,145,360 tokens, {flops / 1e18:.1f} EFLOP" in plan
    assert f"({2157 * 128 + 21015324 * 2048:,} bytes)" in plan
    price = re.search(r"^price    about ([\d.]+) USD", plan, re.M)
    assert price is not None
    assert float(price[1]) == pytest.approx(flops / 8 / 62e12 / 3600 * 14.75, rel=0.1)


def test_each_estimate_follows_the_earlier_steps_of_its_chain() -> None:
    steps = [
        make_step("f", "encode_corpus", {"encoder": "google-bert/bert-base-uncased", "name": "b"}, "s"),
        make_step("f", "build_index", {"embeddings": "b"}, "s"),
        make_step("f", "build_bm25", {}, "s"),
        make_step("f", "mine_negatives", {"sources": ["bm25", "exact:b"], "name": "n"}, "s"),
        make_step(
            "f",
            "train_retriever",
            {"task": "t", "backbone": "google-bert/bert-base-uncased", "negatives": "n", "train": "all"},
            "s",
        ),
        make_step("f", "encode_corpus", {"task": "t", "name": "t"}, "s"),
        make_step("f", "search", {"source": "exact:t", "name": "r"}, "s"),
    ]
    facts = Facts(Sizes({"passages": 1e6, "queries": 5e4}))
    planner = Planner("h100x8", facts=facts)
    estimates = [planner.estimate(planned_job(step.job, step.options)) for step in steps]
    assert None not in estimates
    assert planner.total("s").startswith("estimate ")
    encodings = [estimate for estimate, step in zip(estimates, steps, strict=True) if step.job == "encode_corpus"]
    assert encodings[0] == encodings[1]  # of a task: the passages are as many, and its backbone is the same
    assert {step.job for step in steps} <= ESTIMATES.keys()


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_clusters_have_a_price_and_a_source_of_each_rate(file: Path) -> None:
    machine = read_cluster(file.stem)
    assert machine.price is not None
    assert all(rate.source for _, rate in machine.throughput)


def test_warnings_name_what_will_hurt() -> None:
    cpu, gpu = read_cluster("cpu32"), read_cluster("a100x8")
    large = Estimate("passages", 10**9, 200_000, units=8, memory_bytes=10**12, written_bytes=10**15, forward_flops=1e21)
    match = "\n".join(large.warnings(cpu, is_remote=False))
    for problem in (
        "of memory, and a node has",
        "of disk, and has",
        "without a GPU",
        "200,000 parts take long",
        "lost worker",
    ):
        assert problem in match
    few = Estimate("passages", 100, 3, units=3, tokens=1e4, gpu_memory_bytes=10**11)
    match = "\n".join(few.warnings(gpu, is_remote=False))
    assert "3 units of work for 8 devices" in match
    assert "on a GPU, and a GPU has" in match
    assert Estimate("passages", 100, 100, units=100, requests=NO_REQUESTS).warnings(gpu, is_remote=True) == []
