"""The cost of each input that a user, a file or a client controls is linear in its size, and bounded per MiB.

In the long form each pattern grows until it takes 100 ms, memory is measured too, and RIPTIDE_WRITE_COSTS names a file
for the table of docs/measurements/reliability.md.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from input_registry import FORMAT_NAMES, INPUTS, MODELS
from linear_cost import MAX_GROWTH, NOISE_MIB, Cost, Input, measure, reference_s
from local_cluster import LONG

from riptide.base import yaml_files
from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.serve import protocol

REPOSITORY = Path(__file__).parents[2]
SHORT_PATTERNS = 2  # patterns of each input, the worst known ones, and a random one
# Calls that parse what others wrote.
PARSERS = {"json.loads", "orjson.loads", "yaml.load", "read_yaml", "from_json", "parse_json", "Lines", "csv.reader"}
PARSERS |= {"read_small_text", "read_object", "read_document", "json_objects", "pq.ParquetFile", "regex.compile"}
PARSERS |= {"safe_open", "model_validate_json", "re.compile"}
# Modules with such calls that no input of the registry reaches, with what they read.
TRUSTED = {
    "what the store holds, which an import or a job has written and which is compared with its SHA-256": [
        *("indexing.corpus.categories", "indexing.queries.category_relevance", "indexing.corpus.corpus"),
        *("indexing.corpus.importing", "indexing.queries.judged_pairs", "indexing.corpus.later_filters"),
        "indexing.embeddings.drift",
        *(
            "indexing.queries.provenance",
            "indexing.queries.queries",
            "indexing.measures.pages",
            "indexing.mining.candidates",
        ),
        *(
            "indexing.search.retrieval",
            "indexing.search.runs",
            "indexing.sparse.csr_file",
            "indexing.store.live_release",
        ),
        *(
            "indexing.store.sealed_json",
            "indexing.topics.topic_model_file",
            "jobs.import_queries",
            "jobs.training.sweep",
        ),
        *("retriever.training.loop", "serve.release.artifacts", "indexing.store.conflicts", "indexing.corpus.syncing"),
        *("indexing.erasure.erasing", "indexing.erasure.part_changes", "indexing.erasure.progress"),
        "indexing.erasure.receipts",
        "jobs.judging.judging_files",
    ],
    "messages between processes of riptide, and of Ray and Lucene": [
        *("indexing.training.messages", "indexing.training.monitor", "indexing.lucene.lucene", "jobs.common.session"),
        "indexing.lucene.lucene_terms",
        *("riptide.telemetry.submission", "serve.client"),
    ],
    "settings of models and prompts, through the functions of retriever.model.json_fields": [
        *("retriever.encoding.pair_encoding", "retriever.interchange.backbone", "retriever.interchange.dptdr"),
        *("retriever.interchange.prefix_tuning", "retriever.systems.condenser"),
    ],
    "names of files, errors of a service, help texts and files of the package": [
        *(
            "indexing.maintenance.verification",
            "indexing.storage.remote",
            "indexing.storage.s3",
        ),
        *(
            "indexing.storage.object_store",
            "jobs.api.parameters",
            "jobs.planning.backbone_sizes",
            "jobs.planning.calibration",
        ),
        *("jobs.planning.machine", "jobs.reproduction.raw_data", "jobs.reproduction.table", "jobs.evaluation.searches"),
        *("jobs.training.run_options", "serve.release.planning", "jobs.experiments.experiment"),
        *("jobs.experiments.measuring", "riptide.process.temporary_folders"),
    ],
}


@pytest.fixture(autouse=True)
def _no_limit_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifts the limit of columns, which hides how the cost of more of them grows."""
    monkeypatch.setattr(limits, "MAX_COLUMNS", 1 << 20)


@functools.cache
def reference() -> float:
    return reference_s()


@pytest.mark.parametrize("name", INPUTS)
def test_the_cost_of_an_input_is_linear(name: str, tmp_path: Path) -> None:
    tested: Input = INPUTS[name]
    patterns = list(tested.all_patterns().items())
    failures = []
    for pattern, make in patterns if LONG else [*patterns[:SHORT_PATTERNS], patterns[-1]]:
        cost = measure(tested, make, tmp_path, seconds=0.1 if LONG else 0.006, runs=5 if LONG else 3, with_memory=LONG)
        mib = cost.size / (1 << 20)
        is_held = cost.growth <= MAX_GROWTH and (not LONG or _is_bounded(tested, cost))
        if not is_held:
            failures.append((pattern, cost))
        if LONG and (file := os.environ.get("RIPTIDE_WRITE_COSTS")):
            with open(file, "a", encoding="utf-8") as rows:
                figures = f"{cost.size}\t{cost.seconds_per_mib * 1e3:.0f}\t{cost.mib:.1f}\t{cost.mib / mib:.1f}"
                rows.write(f"{name}\t{pattern}\t{figures}\t{cost.growth:.2f}\t{cost.memory_growth:.2f}\t{is_held}\n")
    assert failures == []


def _is_bounded(tested: Input, cost: Cost) -> bool:
    """Returns whether memory grows linearly, and time and memory per MiB are within the bounds of the input."""
    is_cheap = cost.seconds_per_mib <= tested.max_cost * reference()
    fits = cost.mib <= tested.max_mib * cost.size / (1 << 20) + NOISE_MIB
    return cost.memory_growth <= MAX_GROWTH and is_cheap and fits


def test_a_yaml_file_of_many_values_is_refused_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_files, "MAX_VALUES", 100)
    file = tmp_path / "a.yaml"
    file.write_text("- a\n" * 200 + "]", encoding="utf-8")  # a later error
    with pytest.raises(InputError, match="line 100: more than 100 values"):
        yaml_files.read_yaml(str(file), "expected YAML")


def parsing_modules() -> Iterator[str]:
    """Yields the modules that call one of PARSERS."""
    for top in ("indexing", "retriever", "serve", "jobs", "riptide/base", "riptide/process", "riptide/telemetry"):
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
            if any(ast.unparse(call) in PARSERS or ast.unparse(call).split(".")[-1] in PARSERS for call in calls):
                yield ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)


def test_each_parser_format_and_request_has_an_input() -> None:
    assert set(INPUTS) >= FORMAT_NAMES
    requests = {name for name in vars(protocol) if name.endswith("Request")}
    assert requests == {model.__name__ for model in MODELS.values()}
    reached = {module for tested in INPUTS.values() for module in tested.modules}
    trusted = {module for names in TRUSTED.values() for module in names}
    modules = {module.removeprefix("riptide.") if ".base." in module else module for module in parsing_modules()}
    assert (sorted(modules - reached - trusted), sorted(trusted - modules)) == ([], [])
