"""`search --filter` with random filters in text and JSON, against a loop over the metadata of the passages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_filters import TYPES, as_text, matches, random_filter, random_metadata
from samples import write_beir

NUM_PASSAGES = 60
NUM_FILTERS = 50


@pytest.fixture(scope="module")
def metadata() -> dict[str, dict[str, Any]]:
    """Metadata of all kinds by the id of their passage: missing, null, lists, texts with quotes, times."""
    draw = random.Random(7)
    return {f"p{number}": random_metadata(draw) for number in range(NUM_PASSAGES)}


@pytest.fixture(scope="module")
def store(metadata: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, model: str, call_job) -> Path:
    """A store whose passages all hold the word of the query, so that each passage that may be a hit is one."""
    folder = tmp_path_factory.mktemp("random-filters")
    passages = [{"_id": id, "title": "", "text": "bafa", "metadata": fields} for id, fields in metadata.items()]
    at = ("--store", folder / "store")
    filters = [word for pair in TYPES.items() for word in pair]
    source = write_beir(folder / "source", passages)
    assert call_job("import_corpus", *at, "--source", source, "--part-size", 25, "--filters", *filters) == 0
    assert call_job("build_bm25", *at, "--shards", 2) == 0
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc") == 0
    return folder / "store"


def test_random_filters_on_the_command_line_match_as_a_plain_loop(
    store: Path, metadata: dict[str, dict[str, Any]], done: Callable[..., str]
) -> None:
    draw, num_texts, num_partial = random.Random(8), 0, 0
    for number in range(NUM_FILTERS):
        document = random_filter(draw)
        text = as_text(draw, document)
        expected = {id for id, fields in metadata.items() if matches(document, fields)}
        mode, form = ("exact", "bm25")[number % 2], text if text and number % 3 else json.dumps(document)
        command = ("search", "--store", store, "--mode", mode, "--query", "bafa", "--k", NUM_PASSAGES)
        out = done(*command, "--filter", form)
        assert {word for word in out.split() if word in metadata} == expected, form
        assert f"filter   {len(expected)} passages match" in out, form
        num_texts += form == text
        num_partial += 0 < len(expected) < NUM_PASSAGES
    assert num_texts > NUM_FILTERS // 4  # a good part of the filters are texts, and most match some passages
    assert num_partial > NUM_FILTERS // 2
