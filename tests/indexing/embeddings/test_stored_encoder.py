"""Embeddings open the encoder that made them: its options, the prompt of its task, and the encoder of each side."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_bert

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import DENSE, Embeddings
from riptide.indexing.embeddings.drift import canaries_of, measure_drift
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of

OPTIONS = EncoderOptions(dtype="float32", compile="never", query_prefix="w1 ", normalize=True, query_length=9)
TEXTS = [f"w{number} w{number + 1}" for number in range(9)]


def commit(store: Store, kind: str, name: str, folder: Path, backbone: str) -> None:
    with store.create(kind, name, config={"backbone": describe(backbone, OPTIONS)}) as draft:
        draft.add_notes(backbone=backbone, options=asdict(OPTIONS))
        commit_files(draft, folder)


@pytest.fixture
def built(tmp_path: Path, call_job: Callable[..., int]) -> tuple[Store, str, TaskPrompt]:
    """A store with a prompt, models with one and with two encoders, and embeddings of each: NAME and its encoder."""
    path, backbone = tmp_path / "store", str(save_bert(tmp_path / "backbone", spread=0.2))
    lines = "".join(f'{{"_id": "p{n}", "title": "w{n}", "text": "w{n + 1} w{n + 2}"}}\n' for n in range(12))
    (tmp_path / "corpus.jsonl").write_text(lines)
    assert call_job("import_corpus", "--store", path, "--source", tmp_path / "corpus.jsonl") == 0
    store = Store(str(path))
    matrices = torch.randn(2, 2, 2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    prompt = TaskPrompt(backbone_of(Encoder(backbone, OPTIONS).config), OPTIONS, *matrices)
    (tmp_path / "prompt").mkdir()
    prompt.save(tmp_path / "prompt")
    save_bert(tmp_path / "both" / "query", spread=0.2, seed=1)
    save_bert(tmp_path / "both" / "passage", spread=0.2, seed=2)
    shutil.copytree(tmp_path / "both" / "query", tmp_path / "queries" / "query")
    commit(store, "prompts", "soft", tmp_path / "prompt", backbone)
    for name, folder in (("one", Path(backbone)), ("queries", tmp_path / "queries"), ("both", tmp_path / "both")):
        commit(store, "models", name, folder, backbone)
    settings = ("--dtype", "float32", "--compile", "never")
    prefix = ("--query-prefix", "w1 ", "--normalize", "true", "--query-length", "9")
    for name in ("soft", "both"):
        assert call_job("encode_corpus", "--store", path, "--task", name, *settings) == 0
    for name, encoder in (("plain", backbone), ("model", "models/one")):
        job = ("encode_corpus", "--store", path, "--encoder", encoder, "--name", name, *settings, *prefix)
        assert call_job(*job) == 0
    return store, backbone, prompt


def test_the_encoder_of_embeddings_makes_their_vectors_and_those_of_queries(
    built: tuple[Store, str, TaskPrompt], tmp_path: Path
) -> None:
    store, backbone, prompt = built
    plain = Encoder(backbone, OPTIONS, tasks={"soft": prompt})
    query, passage = (Encoder(str(tmp_path / "both" / side), OPTIONS) for side in ("query", "passage"))
    corpus = Corpus.open(store)
    passages = corpus.passages(range(12))
    cases: dict[str, tuple[Encoder, Encoder, str | None]] = {
        "plain": (plain, plain, None),
        "model": (plain, plain, None),
        "soft": (plain, plain, "soft"),
        "both": (query, passage, None),
    }
    for name, (of_queries, of_passages, task) in cases.items():
        embeddings = Embeddings.open(store, name, corpus)
        encoder = embeddings.encoder(device="cpu")
        np.testing.assert_array_equal(encoder.encode(TEXTS), of_queries.encode(TEXTS, task=task))
        texts = encoder.compose([each.title for each in passages], [each.text for each in passages])
        vectors = encoder.encode(texts, side="passage")
        np.testing.assert_array_equal(vectors, of_passages.encode(texts, side="passage", task=task))
        np.testing.assert_array_equal(vectors.astype(np.float16), embeddings.take(np.arange(12)))
        assert (encoder.encoder_of("query") is encoder.encoder_of("passage")) == (name != "both")
        assert encoder.similarity == "cosine"
        canaries = canaries_of(embeddings, corpus)
        assert (len(canaries), measure_drift(canaries, of_passages, DENSE, task).similarity > 0.9999) == (8, True)
        moved = query if name == "both" else passage
        assert measure_drift(canaries, moved, DENSE).is_refused
        assert measure_drift(canaries, of_passages, DENSE).is_refused == (name == "soft"), "without its prompt"


def test_queries_are_encoded_for_another_task(built: tuple[Store, str, TaskPrompt], tmp_path: Path) -> None:
    """models/queries was trained over the backbone of the embeddings, and encodes queries alone."""
    store, _, _ = built
    embeddings = Embeddings.open(store, "plain", Corpus.open(store))
    expected = Encoder(str(tmp_path / "both" / "query"), OPTIONS).encode(TEXTS)
    np.testing.assert_array_equal(embeddings.encoder(task="queries").encode(TEXTS), expected)
    with pytest.raises(InputError, match="task both is not the one that made embeddings/plain"):
        embeddings.encoder(task="both")
    with pytest.raises(InputError, match="has no such prompt and no such model"):
        embeddings.encoder(task="none")


def test_an_encoder_that_changed_is_refused(built: tuple[Store, str, TaskPrompt]) -> None:
    store, backbone, _ = built
    embeddings: Any = Embeddings.open(store, "plain", Corpus.open(store))
    shutil.rmtree(backbone)
    save_bert(Path(backbone), spread=0.2, seed=7)
    with pytest.raises(InputError, match=r"encoder .* is not the one that made embeddings/plain \(weights differ"):
        embeddings.encoder()
    with pytest.raises(InputError, match="open them with `open`, which knows the store"):
        Embeddings("plain", embeddings.generations).encoder()
