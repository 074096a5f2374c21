"""Why a name is taken, in one line, without fingerprints."""

from __future__ import annotations

from typing import Any

import pytest

from riptide.base.wording import LIBRARY
from riptide.indexing.store.conflicts import find_conflict


def document(config: dict[str, Any], **inputs: str) -> dict[str, Any]:
    """Returns the document of a draft; inputs: role=KEY@FINGERPRINT."""
    made = {
        role: dict(zip(("artifact", "fingerprint"), value.split("@"), strict=True)) for role, value in inputs.items()
    }
    return {"format": 2, "kind": "runs", "inputs": made, "config": config, "by_content": False}


def describe_conflict(pinned: dict[str, Any], requested: dict[str, Any]) -> str:
    """Returns a conflict as messages show it."""
    conflict = find_conflict(pinned, requested)
    return LIBRARY.render(f"{conflict.differences}; give {conflict.remedies}")


@pytest.mark.parametrize(
    ("pinned", "requested", "expected"),
    [
        (
            document({"k": 100, "split": "dev"}),
            document({"k": 50, "split": "dev"}),
            "parameter k 100, now 50; give parameter k 100, or another name (parameter name)",
        ),
        (
            document({"k": 100, "limit": None}),
            document({"k": 50, "limit": 3}),
            "parameter k 100, now 50, parameter limit unset, now 3; give the same options, or another name "
            "(parameter name)",
        ),
        (
            document({"search_parameters": {"nprobe": 8}}),
            document({"search_parameters": {"nprobe": 4}}),
            "parameter nprobe 8, now 4; give parameter nprobe 8, or another name (parameter name)",
        ),
        (
            document({"encoder": {"weights": "a" * 64, "passage_length": 128}}),
            document({"encoder": {"weights": "b" * 64, "passage_length": 256}}),
            "another encoder.weights, encoder.passage_length 128, now 256; give the same options, or another name "
            "(parameter name)",
        ),
        (
            document({"k": 1}, corpus="corpus/g0000@aa", queries="queries/q@bb"),
            document({"k": 1}, corpus="corpus/g0001@cc", queries="queries/q@dd"),
            "it was made from corpus/g0000, now corpus/g0001, it was made from another queries/q than the present one; "
            "give another name (parameter name)",
        ),
        (
            document({"numerics": "cpu avx512"}),
            document({"numerics": "cpu amx"}),
            'numerics "cpu avx512", now "cpu amx"; give the same options, or another name (parameter name)',
        ),
        (
            document({}, corpus="corpus/g0000@aa"),
            document({}, corpus="corpus/g0000@aa", reranker="models/ce@bb"),
            "it was made from no reranker, now models/ce; give another name (parameter name)",
        ),
        (
            document({"k": 1}, queries="/old/queries/q@aa", corpus="corpus/g0000@bb"),
            document({"k": 1}, queries="/new/queries/q@aa", corpus="corpus/g0000@bb"),
            "its input /old/queries/q is now /new/queries/q, with the same content; give the same inputs, or another "
            "name (parameter name)",
        ),
    ],
)
def test_a_conflict_names_what_differs_and_what_to_give(
    pinned: dict[str, Any], requested: dict[str, Any], expected: str
) -> None:
    assert describe_conflict(pinned, requested) == expected


A, B = "a" * 64, "b" * 64


def with_model(document: dict[str, Any], setting: str, parameter: str, name: str) -> dict[str, Any]:
    """Returns a document that names the model of a setting."""
    return {**document, "models": {setting: [parameter, name]}}


MODELS = [
    (
        with_model(document({"encoder": {"weights": [A], "dim": 4}}), "encoder", "encoder", "minilm"),
        with_model(document({"encoder": {"weights": [B], "dim": 8}}), "encoder", "encoder", "my e5"),
        "parameter encoder minilm, now 'my e5'; give parameter encoder minilm",
    ),
    (
        with_model(document({"encoder": {"prompt": A}}, prompt="prompts/t@1"), "encoder", "task", "t"),
        with_model(document({"encoder": {"weights": [A]}}), "encoder", "encoder", "e5"),
        "parameter task t, now parameter encoder e5; give parameter task t",
    ),
    (
        with_model(document({"k": 1, "backbone": {"weights": [A]}}), "backbone", "backbone", "bert"),
        with_model(document({"k": 2, "backbone": {"weights": [B]}}), "backbone", "backbone", "t5"),
        "parameter backbone bert, now t5, parameter k 1, now 2; give parameter backbone bert parameter k 1",
    ),
    (
        with_model(document({"encoder": {"weights": [A], "backbone": A}}), "encoder", "encoder", "minilm"),
        with_model(document({"encoder": {"weights": [B], "backbone": B}}), "encoder", "encoder", "minilm"),
        "parameter encoder minilm has changed since (other weights, other config.json); give the former files of "
        "minilm",
    ),
    (
        with_model(document({"k": 1, "encoder": {"weights": [A]}}), "encoder", "encoder", "minilm"),
        with_model(document({"k": 2, "encoder": {"weights": [B]}}), "encoder", "encoder", "minilm"),
        "parameter encoder minilm has changed since (other weights), parameter k 1, now 2; give the same options",
    ),
    (
        with_model(document({"encoder": {"prompt": A}}, prompt="prompts/t@1"), "encoder", "task", "t"),
        with_model(document({"encoder": {"prompt": B}}, prompt="prompts/t@2"), "encoder", "task", "t"),
        "it was made from another prompts/t than the present one; give the same options",
    ),
    (
        with_model(document({"side": "both", "converted": {"prompt": A}}), "converted", "source", "p"),
        with_model(document({"side": "query", "converted": {"prompt": B}}), "converted", "source", "p"),
        "parameter side both, now query; give parameter side both",
    ),
    (
        document({}, corpus="corpus/g0000@1"),
        with_model(
            document({"reranker": {"weights": [A]}}, corpus="corpus/g0000@1", reranker="models/ce@2"),
            *("reranker", "rerank", "models/ce"),
        ),
        "parameter rerank unset, now parameter rerank models/ce; give the same options",
    ),
    (
        with_model(document({"reranker": {"weights": [A], "dtype": "auto"}}), "reranker", "rerank", "ce"),
        document({}),
        "parameter rerank ce, now unset; give parameter rerank ce",
    ),
    (
        document({"encoder": {"weights": [A]}}),
        with_model(document({"encoder": {"weights": [B]}}), "encoder", "encoder", "minilm"),
        "another model than parameter encoder minilm; give the same options",
    ),
    (
        with_model(
            document({"runs": [{"lr": 1}], "configs": [{"backbone": {"weights": [A]}}]}), *["backbone"] * 2, "x"
        ),
        with_model(
            document({"runs": [{"lr": 1}], "configs": [{"backbone": {"weights": [B]}}]}), *["backbone"] * 2, "y"
        ),
        "parameter backbone x, now y; give parameter backbone x",
    ),
]


@pytest.mark.parametrize(("pinned", "requested", "expected"), MODELS)
def test_models_are_named_and_not_described_by_hashes(pinned: dict, requested: dict, expected: str) -> None:
    assert describe_conflict(pinned, requested) == f"{expected}, or another name (parameter name)"


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("runs", "give parameter k 1, or another name (parameter name)"),
        ("candidates", "give parameter k 1, or another name (parameter candidates)"),
        ("prompts", "give parameter k 1, or another name (parameter task)"),
        ("models", "give parameter k 1, or another name"),
        ("corpus", "give parameter k 1, or another store"),
    ],
)
def test_the_option_for_another_name_is_that_of_the_kinds_job(kind: str, remedy: str) -> None:
    pinned, requested = ({**document({"k": value}), "kind": kind} for value in (1, 2))
    assert describe_conflict(pinned, requested) == f"parameter k 1, now 2; {remedy}"


@pytest.mark.parametrize(
    ("pinned", "requested", "expected"),
    [
        ({"drop_self": False}, {"drop_self": True}, "parameter drop_self false, now true; give the same options"),
        ({"lucene": "9"}, {"lucene": "10"}, "lucene 9, now 10; give the same options"),
        (
            {"search_parameters": {}, "source": "bm25"},
            {"search_parameters": {"fusion_depth": 1000}, "source": "bm25+bm25:b"},
            "parameter source bm25, now bm25+bm25:b, search_parameters.fusion_depth unset, now 1000; give the same "
            "options",
        ),
        (
            {"source": [{"file": "a.jsonl", "bytes": 1200, "samples": "e2"}]},
            {"source": [{"file": "b.jsonl", "bytes": 1300, "samples": "4f"}]},
            'source ["a.jsonl of 1,200 bytes"], now ["b.jsonl of 1,300 bytes"]; give the same options',
        ),
        (
            {"source": [{"file": "a.jsonl", "bytes": 1200, "samples": "e2"}]},
            {"source": [{"file": "a.jsonl", "bytes": 1200, "samples": "4f"}]},
            "another source; give the same options",
        ),
        (
            {"loop": {"lr": 0.1}},
            {"loop": {"lr": 0.1, "optimizer": "adafactor"}},
            "loop.optimizer adamw, now adafactor; give the same options",
        ),
    ],
)
def test_no_option_is_named_that_a_job_does_not_have(pinned: dict, requested: dict, expected: str) -> None:
    assert (
        describe_conflict(document(pinned), document(requested)).removesuffix(", or another name (parameter name)")
        == expected
    )


def test_many_differences_are_counted() -> None:
    pinned, requested = (document({f"o{n}": value for n in range(9)}) for value in (1, 2))
    assert " and 3 more; give the same options" not in describe_conflict(pinned, requested)
    assert "parameter o5 1, now 2 and 3 more; give" in describe_conflict(pinned, requested)
