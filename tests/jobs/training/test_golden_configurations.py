"""The stored configuration of every training stays what it is, so that existing runs resume and are found.

Each case is planned (`--plan`) on a small store, and the configuration that would be stored is compared with
`golden_configurations.json` (`RIPTIDE_WRITE_GOLDEN=1` writes it). A change there gives every such artifact another
fingerprint: a run of the version before could not resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from mined import mine
from samples import WORDS, make_passages, make_queries, write_beir, write_queries
from stored_topics import model_of_words, store_topics
from tiny import add_masked_head, save_encoder

from riptide.indexing.store.store import Store
from riptide.indexing.work import work
from riptide.jobs.training import run_options

FILE = Path(__file__).parent / "golden_configurations.json"
RECIPES = Path(__file__).parents[3] / "jobs" / "recipes"
EXACT = ("--dtype", "float32", "--compile", "never")
LENGTH = 512
TRAINING_JOBS = ("train_retriever", "tune_prompts", "train_reranker", "pretrain_rip")

PROMPTS = "train_retriever --train prompts"
LORA = "train_retriever --train lora"
ALL = "train_retriever --train all"
QUERY = f"{PROMPTS} --sides query --embeddings enc"
SYNTHESISED = f"{QUERY} --prompt synthesised"
PER_TASK = f"{QUERY} --prompt per-task --also-train queries=more"
TOPICS = f"{PROMPTS} --prompt topics"
CATEGORIES = "--negatives none --positives categories"
SPLADE = "--backbone masked --pooling splade"
RERANKER = "train_reranker"
RIP = "pretrain_rip"
CASES = (
    PROMPTS,
    f"{PROMPTS} --negatives none",
    f"{PROMPTS} --sides untied --prompt matrix --length 7 --prompt-dropout 0.2 --position-offset "
    "--query-length 30 --passage-length 40",
    f"{PROMPTS} --prompt mlp --lr 0.01 --warm-up 0.2 --weight-decay 0.1 --clip 2 --seed 5 --epochs 3",
    f"{PROMPTS} --init start --length 4 --steps 9 --grad-cache on --checkpoint-every 3 --checkpoint-minutes 0",
    f"{PROMPTS} --optimizer adafactor --dtype bfloat16 --cpus 1 --workers 2 --checkpointing",
    f"{PROMPTS} --dev-split dev --dev-limit 4 --dev-passages 9 --evaluate-every 2 --patience 3",
    f"{PROMPTS} --dev-split dev --dev-limit 4 --dev-passages 9+hard:3",
    f"{PROMPTS} --query-prefix q: --passage-prefix p: --title sep --query-length 20 --passage-length 30 --dimension 16",
    f"{PROMPTS} --pooling mean --normalize True --append-eos --padding-side left --temperature 0.1",
    f"{PROMPTS} --learn-temperature --loss symmetric",
    f"{PROMPTS} --learn-temperature --temperature 0.2 --temperature-lr 0.01 --loss symmetric-sum",
    f"{PROMPTS} --loss kl --contrastive-weight 0.3 --negatives-per-query 2",
    f"{PROMPTS} --loss margin-mse --draw-positive first --draw-negatives windows",
    f"{PROMPTS} --negatives-from own --negatives-per-query 3 --draw-positive weighted --batch 8",
    f"{PROMPTS} --refresh-epochs 2 --refresh-depth 7 --limit 6",
    f"{PROMPTS} --also-train queries=more,weight=2,task=t,size=3 queries=tiny,negatives=hand --task-size 5",
    f"{PROMPTS} --also-train queries=more --batches one-task --negatives none",
    f"{PROMPTS} --sweep lr=1e-2,3e-2 seed=0,1 --dev-split dev",
    f"{PROMPTS} --sweep prompt=matrix,mlp length=3 normalize=true,false --dev-split dev",
    QUERY,
    f"{QUERY} --prompt mlp --prompt-dropout 0",
    SYNTHESISED,
    f"{SYNTHESISED} --length 5 --basic-prompts 3 --prompt-hidden 6 --prompt-bottleneck 4 --prompt-temperature 2 "
    "--mix after --attention uniform --prompt-dropout 0.1",
    f"{SYNTHESISED} --also-train queries=more --negatives-from own --negatives-per-query 2",
    f"{SYNTHESISED} --also-train queries=more --divergence-weight 0.4 --no-alignment",
    f"{SYNTHESISED} --also-train queries=more --no-uniformity",
    f"{SYNTHESISED} --divergence-weight 0.2",
    f"{SYNTHESISED} --init computed",
    f"{SYNTHESISED} --sweep basic_prompts=2,3 prompt_temperature=1.5 --dev-split dev",
    PER_TASK,
    f"{PER_TASK} --length 5 --prompt-bottleneck 4 --lr 0.002",
    TOPICS,
    f"{TOPICS} --topics hand --length 6 --prompt-hidden 5 --query-topics judged --wordless-queries prior",
    f"{TOPICS} {CATEGORIES}",
    f"{TOPICS} {CATEGORIES} --topic-sample 2 --topic-margin 0.3 --category-weight 0.2 --categories-field categories",
    f"{TOPICS} {CATEGORIES} --no-topic-loss",
    f"{TOPICS} {CATEGORIES} --category-weight 0",
    f"{PROMPTS} {CATEGORIES}",
    f"{PROMPTS} {CATEGORIES} --category-weight 0.3 --categories-field kinds --sides untied",
    LORA,
    f"{LORA} --lora-rank 4 --lora-alpha 8 --lora-dropout 0.1 --lora-targets query key",
    f"{LORA} --sides untied --lora-targets all-linear {CATEGORIES}",
    f"{LORA} --sides query --embeddings enc --optimizer adafactor",
    f"{LORA} --sweep lora_rank=2,4 --dev-split dev",
    ALL,
    f"{ALL} --sides untied --negatives-per-query 2",
    f"{ALL} --sides query --embeddings enc --no-dropout",
    f"{ALL} --projection 24 --no-dropout --optimizer adafactor --zero 0",
    f"{ALL} --sides untied --prompt synthesised --length 5 --prompt-hidden 6",
    f"{ALL} --prompt topics --length 5",
    f"{ALL} --zero 3 --offload --workers 2 --gpus 1 --min-workers 1",
    f"{ALL} {CATEGORIES}",
    f"{ALL} {SPLADE}",
    f"{ALL} {SPLADE} --loss margin-mse --query-length 40",
    f"{ALL} {SPLADE} --flops-queries 0.2 --flops-passages 0.1 --flops-warm-up 0.5 --warm-up 0.3",
    f"{PROMPTS} {SPLADE} --sides untied",
    "tune_prompts",
    "tune_prompts --untied --parametrisation mlp",
    "tune_prompts --side query --embeddings enc --length 3",
    "tune_prompts --method finetune --side both",
    "tune_prompts --method lora",
    RERANKER,
    f"{RERANKER} --loss listwise --negatives-per-query 2 --max-length 48 --title sep --batch 8 --epochs 2 --seed 3",
    f"{RERANKER} --optimizer adafactor --dtype float32 --cpus 1 --limit 5 --steps 4",
    f"{RERANKER} --lr 1e-3 --dev-split dev --dev-negatives hand --dev-passages 5 --dev-limit 3 --patience 2 --zero 1",
    RIP,
    f"{RIP} --batch 8 --epochs 2 --lr 1e-3 --warm-up 0.2 --weight-decay 0.1 --mlm-probability 0.3 --max-length 40",
    f"{RIP} --objective condenser --head-layers 1 --skip-from 1 --no-late-loss --steps 4",
    f"{RIP} --objective cocondenser --min-words 3",
    f"{RIP} --objective mlm --mask word --seed 2 --grad-cache off --optimizer adafactor",
    f"{RIP} --objective pairs --pooling mean --temperature 0.1",
    f"{RIP} --objective pairs --unit sentence",
    f"{RIP} --train prompts --prompt-length 5 --language de --unit span --limit 20",
    f"{RIP} --train prompts --dev-split dev --queries tiny --dev-limit 2 --dev-passages 8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Path:
    """A folder with the models `encoder` and `masked`, and a `store` of everything that a training can read."""
    root = tmp_path_factory.mktemp("golden")
    tokenizer = {"words": WORDS, "lowercase": True, "padding_side": None, "limit": LENGTH}
    for name in ("encoder", "masked"):
        save_encoder(root / name, config={"max_position_embeddings": LENGTH}, **tokenizer)
    add_masked_head(root / "masked", spread=0.2)
    passages = make_passages(60)
    for number, passage in enumerate(passages):
        passage["metadata"] = {"categories": ["abc"[number % 3]], "kinds": ["de"[number % 2]]}
        passage["text"] += ". " + " ".join(WORDS[number : number + 12]) + "."
    queries, judged = make_queries(passages, 30)
    source = write_beir(root / "tiny", passages, queries, {"train": judged[:20], "dev": judged[20:]})
    few = [{"_id": f"m{number}", "text": passages[number]["text"]} for number in range(6)]
    more = write_queries(root / "more", few, {"train": [(f"m{number}", f"p{number}", 1) for number in range(6)]})

    def job(name: str, *arguments: object) -> None:
        assert call_job(name, "--store", root / "store", *arguments) == 0, name

    job("import_corpus", "--source", source, "--part-size", 30)
    job("import_queries", "--source", more)
    job("build_bm25")
    job("encode_corpus", "--encoder", root / "encoder", "--name", "enc", *EXACT)
    store = Store(str(root / "store"))
    store_topics(store, model_of_words(WORDS, 3), np.arange(60, dtype=np.int64) % 3)
    plain = mine(store, "plain", query_set="tiny")
    lists = [len(rows) for rows in table_of(plain)["negatives"].to_pylist()]
    scores = {
        "probability": pa.array([[0.25] * count for count in lists], pa.list_(pa.float32())),
        "positive_probability": pa.array([[0.5]] * len(lists), pa.list_(pa.float32())),
    }
    mine(store, "hand", rows=scores, query_set="tiny")
    short = ("--backbone", root / "encoder", "--queries", "tiny", "--negatives", "hand", "--length", 4, "--steps", 1)
    train = ("train_retriever", "--train", "prompts", *short, "--dtype", "float32", "--cpus", 1)
    job(*train, "--task", "start")
    sizes = ("--basic-prompts", 2, "--prompt-hidden", 3, "--prompt-bottleneck", 2)
    job(*train, "--task", "computed", "--sides", "query", "--prompt", "synthesised", *sizes)
    return root


def table_of(negatives: Any) -> pa.Table:
    """Returns the rows of mined negatives."""
    import pyarrow.parquet as pq

    return pa.concat_tables(pq.read_table(negatives.local_path(part)) for part in negatives.numbered_parts("part"))


@pytest.fixture
def configuration(
    folder: Path, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """configuration(job, *arguments) plans a training and returns what it would store."""
    documents: list[tuple[str, Any, Any]] = []
    original = work.begun_document

    def record(kind: str, inputs: Mapping[str, Any], config: Mapping[str, Any], by_content: bool) -> Any:
        documents.append((kind, inputs, config))
        return original(kind, inputs, config, by_content)

    monkeypatch.setattr(work, "begun_document", record)
    monkeypatch.setattr(run_options, "cores_of_process", lambda: 2)

    def plan(job: str, *arguments: str) -> dict[str, Any]:
        documents.clear()
        done(job, "--store", folder / "store", *arguments, "--plan")
        kind, inputs, config = documents[0]
        text = json.dumps(config).replace(str(folder), "FOLDER")
        return {"kind": kind, "inputs": sorted(inputs), "config": without_digests(json.loads(text))}

    return plan


def without_digests(config: Any) -> Any:
    """Returns a configuration without the digests of files, which depend on the versions of libraries."""
    if isinstance(config, dict):
        return {key: without_digests(value) for key, value in config.items()}
    if isinstance(config, list):
        return [without_digests(value) for value in config]
    is_digest = isinstance(config, str) and len(config) == 64 and set(config) <= set("0123456789abcdef")
    return "DIGEST" if is_digest else config


def check(name: str, actual: dict[str, Any]) -> None:
    """Compares a configuration with the golden one, or writes it."""
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("RIPTIDE_WRITE_GOLDEN"):
        golden[name] = actual
        lines = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(golden.items()))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert actual == golden[name]


def test_a_worker_has_by_default_two_cores_or_one_on_a_machine_with_one_core_without_ray(
    folder: Path, configuration: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--backbone", folder / "encoder", "--name", "new")
    monkeypatch.setattr(run_options, "find_cluster", lambda *, private: "a private Ray" if private else None)
    cases = ((1, (), 1), (64, (), 2), (1, ("--cpus", "64"), 64), (1, ("--workers", "2"), 2), (1, ("--ray",), 2))
    for cores, more, cpus in cases:
        monkeypatch.setattr(run_options, "cores_of_process", lambda cores=cores: cores)
        assert configuration("pretrain_rip", *words, *more)["config"]["cpus"] == cpus


@pytest.mark.parametrize("case", CASES)
def test_the_stored_configuration_of_options(
    case: str, folder: Path, configuration: Callable[..., dict[str, Any]]
) -> None:
    job, *words = case.split()
    defaults = {"--backbone": "encoder"}
    if job != RIP:
        defaults |= {"--queries": "tiny", "--negatives": "hand"}
    if job in ("train_retriever", "tune_prompts"):
        defaults |= {"--task": "new"}
    for option, value in defaults.items():
        if option not in words:
            words += [option, value]
    at = words.index("--backbone") + 1
    words[at] = str(folder / words[at])
    check(case, configuration(job, *words))


def recipe_steps() -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (name, job, options) of each training in a recipe."""
    steps = []
    for path in sorted(RECIPES.glob("*.yaml")):
        for step in yaml.safe_load(path.read_text(encoding="utf-8")).get("steps", []):
            [(job, options)] = step.items()
            if job in TRAINING_JOBS:
                steps.append((f"{path.stem} {job} {options.get('task') or options['name']}", job, options))
    return steps


@pytest.mark.parametrize(("name", "step", "options"), recipe_steps())
def test_the_stored_configuration_of_a_recipe(
    name: str, step: str, options: dict[str, Any], folder: Path, tmp_path: Path, configuration: Callable[..., Any]
) -> None:
    """Artifacts that a recipe names are those of the small store; everything else is as in the recipe."""
    options = {**options, "backbone": str(folder / ("masked" if options.get("pooling") == "splade" else "encoder"))}
    if step != RIP:
        options |= {"queries": "tiny", "negatives": "none" if options["negatives"] == "none" else "hand"}
    names = {"split": "train", "dev_split": "dev", "dev_negatives": "hand", "topics": "hand"}
    options |= {key: value for key, value in names.items() if key in options}
    if options.get("also_train"):
        options["also_train"] = ["queries=tiny,negatives=hand"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(options))
    check(name, configuration(step, "--config", str(tmp_path / "recipe.yaml")))


def test_the_stored_configuration_of_the_topics_of_a_recipe(configuration: Callable[..., dict[str, Any]]) -> None:
    path = RECIPES / "topics-arxiv.yaml"
    check(path.stem, configuration("fit_topics", "--config", str(path), "--min-passages", "1"))
