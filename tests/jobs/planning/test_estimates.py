"""Estimates of --plan against the files and the requests of the jobs, and against products by hand."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from faulty_s3 import FaultyS3, faulty_s3
from samples import make_passages, write_beir

from riptide.indexing.storage import remote
from riptide.jobs.commands.steps import make_step
from riptide.jobs.common.plans import planned_jobs
from riptide.jobs.planning.estimate import Estimate
from riptide.jobs.planning.machine import CLUSTERS, read_cluster
from riptide.jobs.planning.models import Models, TextBatch
from riptide.jobs.planning.planned_job import Facts
from riptide.jobs.planning.planner import Planner
from riptide.jobs.planning.requests import NO_REQUESTS, Requests
from riptide.jobs.planning.sizes import CorpusSize, Sizes
from riptide.process.memory import format_bytes

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


def test_a_server_maps_the_files_of_its_release(world: Any, done: Done, tmp_path: Path) -> None:
    plan = done("serve_search", "--store", world.store, "--plan", "--cluster", "cpu32")
    size = sum(part_bytes(world.store / key) for key in ("corpus", "embeddings/enc", "index/idx"))
    assert f"\nfiles    reads {format_bytes(size)}\n" in plan
    assert f" for a process, and {format_bytes(size)} of mapped files; disk " in plan
    assert re.search(r"^work     240 passages, served until the job is ended\n", plan, re.M)
    assert re.search(r"^start    about \d+ s on 32 cores: ", plan, re.M)
    assert re.search(r"^price    about 7.40 USD an hour \(", plan, re.M)
    sizes = ("--expect", "passages", 21_015_324, "dimensions", 1024)
    server = ("serve_search", "--store", "s3://nowhere/wikipedia", "--plan", "--cluster", "a100x8", *sizes)
    expected = done(*server, "--bm25", "bm25")
    assert "passages, served" in expected
    assert "unknown" in done(*server, "--embeddings", "e", "--index", "e")  # the encoder
    ranges = [done(*server, "--bm25", "bm25", "--row-ranges", number) for number in (1, 4)]
    mapped = [re.search(r"and ([0-9.]+) GB of mapped files", text) for text in (expected, *ranges)]
    whole, one, four = (float(each[1]) for each in mapped if each)
    text = 21_015_324 * 650 / 1e9
    assert whole == one == pytest.approx(1.16 * text, rel=0.01)
    assert four == pytest.approx(0.41 * text, rel=0.01)  # all of BM25, and a quarter of the passages


def test_the_searches_of_an_evaluation_count_until_their_runs_exist(world: Any, done: Done) -> None:
    evaluate = ("evaluate", "--store", world.store, "--source", "exact:enc", "index:idx", "--plan")
    tokens = [re.search(r"^work     about 30 queries in \d parts?; ([\d,]+) tokens", done(*evaluate), re.M)]
    done("search", "--store", world.store, "--mode", "exact")
    tokens.append(re.search(r"^work     about 30 queries in \d parts?; ([\d,]+) tokens", done(*evaluate), re.M))
    both, one = (int(each[1].replace(",", "")) for each in tokens if each)
    assert both == 2 * one
    done("search", "--store", world.store, "--mode", "dense")
    assert re.search(r"^work     about 30 queries$", done(*evaluate), re.M)


def test_queries_are_counted_in_the_files_of_an_import(world: Any, done: Done, tmp_path: Path) -> None:
    """So the later steps of a chain have an estimate before anything is imported."""
    queries = ("import_queries", "--store", world.store, "--source", world.source, "--queries", "other")
    plan = done(*queries, "--plan")
    assert re.search(r"^work     40 queries in 3 parts$", plan, re.M)
    steps = [
        {"import_corpus": {"source": str(world.source), "part_size": 60}},
        {"build_bm25": None},
        {"mine_negatives": {"sources": ["bm25"], "name": "n"}},
        {"search": {"mode": "bm25", "name": "r"}},
        {"evaluate": {"run": ["r"]}},
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"store": str(tmp_path / "new"), "steps": steps}))
    plan = done("pipeline", "--config", recipe, "--plan")
    work = re.findall(r"^work     (.*)$", plan, re.M)
    assert [text.split(" in ")[0] for text in work] == [
        "240 passages",
        "about 240 passages",
        "about 10 queries",
        "about 30 queries",
        "about 30 queries",
    ]
    assert "unknown" not in plan


def test_a_fit_of_topics_takes_one_thread() -> None:
    def seconds(machine: str, **options: Any) -> float:
        planner = Planner(machine, facts=Facts(Sizes({"passages": 1e5})))
        estimate = planner.estimate(planned_jobs("fit_topics", make_step("f", "fit_topics", options, "s").options))
        assert estimate is not None
        return estimate.serial_s

    assert seconds("cpu32") == seconds("a100x8") > 0
    assert seconds("cpu32", iterations=200) == pytest.approx(2 * seconds("cpu32"))
    assert seconds("cpu32", sample=25_000) == pytest.approx(seconds("cpu32") / 2)


def test_tokens_of_a_training_count_the_padding_of_its_batches(world: Any) -> None:
    model = Models().find(str(world.store), str(world.model))
    assert model is not None
    texts = [("", "river " * words) for words in (8, 8, 28)]
    lengths = [model.mean_tokens([text]) for text in texts]
    assert len({*lengths}) == 2
    assert model.mean_tokens(texts) == pytest.approx(sum(lengths) / 3)
    # Columns are multiples of 16, and a batch of many texts has a long one.
    short, long = (16 * math.ceil(length / 16) for length in lengths[1:])
    assert short < long
    assert model.mean_tokens(texts[:2], batch=TextBatch(4, "cpu")) == short
    assert model.mean_tokens(texts, batch=TextBatch(16, "cuda")) == long


def test_names_of_options_do_not_change_the_estimate_of_a_training() -> None:
    def estimates(job: str, cluster: str = "h100x8", **options: Any) -> list[Estimate | None]:
        settings = {"task": "t", "backbone": "google-bert/bert-base-uncased", "steps": 8, "negatives": "none"}
        step = make_step("f", job, settings | options, "s3://nowhere/s")
        sizes = Sizes({"passages": 1e6, "queries": 5e4})
        planner = Planner(cluster, facts=Facts(sizes, Models(reads_stores=False)))
        return [planner.estimate(planned_jobs(step.job, step.options))]

    assert estimates("tune_prompts", method="finetune") == estimates("train_retriever", train="all")
    [one], [four] = estimates("tune_prompts"), estimates("tune_prompts", sweep=["seed=0,1", "lr=1e-3,1e-2"], **DEV)
    assert one is not None
    assert four is not None
    assert (four.rows, four.training_flops) == (4 * one.rows, 4 * one.training_flops)
    machine = read_cluster("h100x8")
    assert four.seconds(machine) == pytest.approx(4 * one.seconds(machine))
    # A second forward pass, which large batches need, adds 2 to the 4 operations of a weight and token.
    [twice], [large] = estimates("tune_prompts", grad_cache="on"), estimates("tune_prompts", batch=4096)
    assert twice is not None
    assert large is not None
    assert twice.training_flops == pytest.approx(1.5 * one.training_flops)
    assert large.training_flops / large.rows == pytest.approx(1.5 * one.training_flops / one.rows)
    # A worker with a GPU runs larger batches once, whether its options name the number of GPUs or not.
    factors = []
    for cluster, gpus in (("h100x8", None), ("h100x8", 1), ("h100x8", 0), ("cpu32", None)):
        [between] = estimates("tune_prompts", batch=BETWEEN, gpus=gpus, cluster=cluster)
        assert between is not None
        factors.append(between.training_flops / between.rows / one.training_flops * one.rows)
    assert factors == pytest.approx([1, 1, 1.5, 1.5])
    [short] = estimates("tune_prompts", max_minutes=1e-6)
    assert short is not None
    assert short.work_seconds(machine) == pytest.approx(6e-5)
    assert "about at most " in "\n".join(short.lines(machine, is_remote=True))


BETWEEN = 640  # queries of a batch that a worker on a GPU runs once, and one on a CPU twice
DEV = {"dev_split": "dev", "evaluate_every": 4}


def test_plans_of_many_parts_read_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = CorpusSize([10] * 100_000, [1] * 100_000).first_rows(999_985)
    assert (limited.rows, len(limited.part_rows), limited.part_rows[-1]) == (999_985, 99_999, 5)
    opened: list[object] = []
    table = pa.table({"title": ["a"], "text": ["b"]})
    monkeypatch.setattr("riptide.jobs.planning.sizes.open_table", lambda part: opened.append(part) or table)
    for parts in (1, 8, 9, 15, 100_000):
        opened.clear()
        many: Any = range(parts)  # in place of the parts
        assert len(CorpusSize([10] * parts, [1] * parts, parts=many).sample_texts()) == len(opened) <= 8


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


@pytest.mark.parametrize(
    ("factory", "cpu_s"),
    [
        ("Flat", 3.6),
        ("IVF128,PQ48x4fs", 9.0),
        ("IVF512,PQ48x4fs", 8.0),
        ("IVF1024,PQ48x4fs", 8.9),
        ("IVF512,PQ96x4fs", 9.0),
        ("HNSW32", 3.3),
    ],
)
def test_an_index_is_planned_within_a_factor_of_its_measured_cpu_time(factory: str, cpu_s: float) -> None:
    """The CPU seconds are those of one core in docs/measurements/plans.md; the plan has the rates of cpu32."""
    planner = Planner("cpu32", facts=Facts(Sizes({"passages": 20_958, "dimensions": 384})))
    step = make_step("f", "build_index", {"embeddings": "e", "factory": factory}, "s")
    estimate = planner.estimate(planned_jobs("build_index", step.options))
    assert estimate is not None
    machine = read_cluster("cpu32").model_copy(update={"nodes": 1, "cores": 1})
    assert cpu_s / 1.5 < estimate.seconds(machine) < 1.5 * cpu_s


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


def test_the_plans_of_the_documentation_are_those_that_are_printed(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    root = CLUSTERS.parents[1]
    monkeypatch.chdir(root)
    page = (root / "docs" / "plans.md").read_text(encoding="utf-8")
    shown = re.findall(r"```bash\n(riptide [^`]*)```\n+```text\n([^`]*)```", page)
    assert len(shown) == 3
    for command, plan in shown:
        _, job, *arguments = shlex.split(command.replace("\\\n", ""))
        assert done(job.replace("-", "_"), *arguments) == plan


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
        make_step("f", "evaluate", {"source": ["bm25", "index:b"]}, "s"),
        make_step("f", "fit_topics", {}, "s"),
    ]
    facts = Facts(Sizes({"passages": 1e6, "queries": 5e4}))
    planner = Planner("h100x8", facts=facts)
    estimates = [planner.plan(planned_jobs(step.job, step.options)) for step in steps]
    assert None not in estimates
    [total] = planner.total()
    assert total.startswith("estimate ")
    encodings = [estimate for estimate, step in zip(estimates, steps, strict=True) if step.job == "encode_corpus"]
    assert encodings[0] == encodings[1]  # of a task: the passages are as many, and its backbone is the same


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_clusters_have_a_price_and_a_source_of_each_rate(file: Path) -> None:
    machine = read_cluster(file.stem)
    assert machine.price is not None
    assert machine.price.source
    assert "# yours to edit" in file.read_text(encoding="utf-8")
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
