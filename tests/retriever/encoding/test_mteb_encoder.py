"""mteb's own evaluation with an Encoder, on local tasks, against the encoder's vectors, exact search and metrics."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from decoder_folders import INSTRUCTION, save_qwen3_embedding
from mteb_tasks import read_lines, read_qrels, retrieval_task, sts_task
from scipy.stats import spearmanr
from synthesisers import random_synthesis
from tiny import save_bert, write_corpus

import riptide
from riptide.base.errors import InputError
from riptide.indexing.exact import exact_search
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.encoding.mteb_encoder import MtebEncoder
from riptide.retriever.options import Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of

OPTIONS = EncoderOptions(dtype="float32", compile="never", query_prefix="w1 w2 ", passage_prefix="w3 ", query_length=24)
PASSAGES, QUERIES = 60, 20


class Recorder(MtebEncoder):
    """Keeps the vectors that mteb receives, and the types of their texts, in the order of its calls."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.vectors: list[np.ndarray] = []
        self.prompt_types: set[str | None] = set()

    def encode(self, *arguments: Any, **options: Any) -> np.ndarray:
        self.prompt_types.add(options.get("prompt_type"))
        self.vectors.append(super().encode(*arguments, **options))
        return self.vectors[-1]


@pytest.fixture(autouse=True)
def _own_mteb_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing mteb makes its cache folder."""
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "mteb"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("mteb") / "raw", PASSAGES, queries=QUERIES, words=12)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_bert(tmp_path_factory.mktemp("mteb") / "tiny", spread=0.2))


def scores_of(model: Any, task: Any, *, cache: Any = None) -> Mapping[str, Any]:
    """Returns the scores of mteb's evaluation; the cache is a ResultCache."""
    import mteb

    result = mteb.evaluate(model, task, cache=cache, co2_tracker=False, show_progress_bar=False)
    scores: Mapping[str, Any] = result.task_results[0].scores["test"][0]
    return scores


def texts_of(folder: Path, kind: str) -> list[str]:
    """Returns the texts of queries, or of passages with their titles."""
    rows = read_lines(folder / f"{kind}.jsonl")
    return [f"{row['title']} {row['text']}" if "title" in row else row["text"] for row in rows]


def prompt_of(encoder: Encoder, *, seed: int, query: int | None = 3, passage: int | None = 5) -> TaskPrompt:
    """Returns a random prompt for BERT of 2 layers with 4 heads of 8."""
    generator = torch.Generator().manual_seed(seed)
    sides = [None if n is None else torch.randn(2, 2, 4, n, 8, generator=generator) for n in (query, passage)]
    return TaskPrompt(backbone_of(encoder.config), encoder.options, *sides)


def expected_ndcg(folder: Path, queries: np.ndarray, passages: np.ndarray) -> float:
    """Returns the mean nDCG@10 of the exact top 10, by ir-measures."""
    query_ids, passage_ids = ([row["_id"] for row in read_lines(folder / f"{k}.jsonl")] for k in ("queries", "corpus"))
    hits = exact_search(queries, [(0, passages)], 10)
    run = {"query_id": np.repeat(query_ids, 10), "id": np.array(passage_ids)[hits.rows.ravel()]}
    judged = [(q, d, score) for q, row in read_qrels(folder / "qrels/test.tsv").items() for d, score in row.items()]
    qrels = dict(zip(("query_id", "corpus_id", "score"), zip(*judged, strict=True), strict=True))
    values = metrics_per_query(pa.table(qrels), pa.table({**run, "score": hits.scores.ravel()}), ["nDCG@10"])
    return float(values["nDCG@10"].mean())


@pytest.mark.parametrize(("title", "normalize"), [("space", True), ("none", False)])
def test_retrieval_equals_exact_search_on_the_same_vectors(
    corpus: Path, backbone: str, title: Any, normalize: bool
) -> None:
    """Titles are composed once and as the options say, each side has its prefix, and nDCG@10 is that of riptide."""
    options = EncoderOptions(**{**vars(OPTIONS), "title": title, "normalize": normalize})
    encoder = Encoder(backbone, options)
    model = Recorder(encoder)
    scores = scores_of(model, retrieval_task(corpus))

    texts = [row["text"] for row in read_lines(corpus / "corpus.jsonl")]
    passages = encoder.encode(texts_of(corpus, "corpus") if title == "space" else texts, side="passage")
    queries = encoder.encode(texts_of(corpus, "queries"), side="query")
    assert [vectors.tobytes() for vectors in model.vectors] == [queries.tobytes(), passages.tobytes()]
    assert queries.dtype == model.vectors[0].dtype == np.float32
    expected = expected_ndcg(corpus, queries, passages)
    assert 0.05 < expected < 0.95
    assert scores["ndcg_at_10"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The `get_sentence_embedding_dimension` method:FutureWarning")  # of mteb
def test_retrieval_equals_that_of_sentence_transformers(corpus: Path, backbone: str) -> None:
    """mteb's own wrapper of a SentenceTransformer takes its concatenation of title and text, and cosines."""
    from sentence_transformers import SentenceTransformer

    plain = Encoder(backbone, EncoderOptions(dtype="float32", compile="never", normalize=True))
    peer = scores_of(SentenceTransformer(backbone, device="cpu"), retrieval_task(corpus))
    scores = scores_of(MtebEncoder(plain), retrieval_task(corpus))
    names = ("ndcg_at_10", "map_at_100", "mrr_at_10", "recall_at_20")
    assert {name: scores[name] for name in names} == {name: pytest.approx(peer[name], abs=1e-5) for name in names}


def test_a_deep_prompt_for_all_tasks_and_by_name_of_the_task(corpus: Path, backbone: str) -> None:
    encoder = Encoder(backbone, OPTIONS, tasks={})
    prompt = prompt_of(encoder, seed=0)
    served = Encoder(backbone, OPTIONS, tasks={"one": prompt, "other": prompt_of(encoder, seed=1)})

    def expected(task: str | None) -> tuple[np.ndarray, np.ndarray]:
        queries = served.encode(texts_of(corpus, "queries"), side="query", task=task)
        return queries, served.encode(texts_of(corpus, "corpus"), side="passage", task=task)

    model = Recorder(encoder, task=prompt)
    scores = scores_of(model, retrieval_task(corpus))
    assert [vectors.tobytes() for vectors in model.vectors] == [vectors.tobytes() for vectors in expected("one")]
    assert scores["ndcg_at_10"] == pytest.approx(expected_ndcg(corpus, *expected("one")), abs=1e-5)

    by_name = Recorder(encoder, task={"First": prompt, "Second": prompt_of(encoder, seed=1)})
    for name, task in (("First", "one"), ("Second", "other"), ("Third", None)):
        by_name.vectors.clear()
        scores_of(by_name, retrieval_task(corpus, name=name))
        assert [vectors.tobytes() for vectors in by_name.vectors] == [vectors.tobytes() for vectors in expected(task)]
    assert len(encoder.tasks) == 2  # the same prompt is there once


PAIRS = [(f"w{i} w{i + 1} w{3 * i}", f"w{i} w{i + 2} w{5 * i}", float(i * 7 % 5)) for i in range(1, 12)]


def test_a_prompt_that_is_computed_from_each_query(backbone: str) -> None:
    """Passages have no prompt; a query without a word that the backbone knows is named."""
    encoder = Encoder(backbone, replace(OPTIONS, query_prefix=""), tasks={})
    prompt = TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, synthesis=random_synthesis())
    model, texts = MtebEncoder(encoder, task=prompt), ["w5 w7 w9", "w11 w12"]
    encoder.put_task("same", prompt)
    metadata: dict[str, Any] = {"hf_split": "test", "hf_subset": "", "task_metadata": SimpleNamespace(name="any")}

    def encode(texts: list[str], prompt_type: str | None) -> np.ndarray:
        return model.encode([{"text": texts}], prompt_type=prompt_type, **metadata)

    for prompt_type in ("query", None):
        np.testing.assert_array_equal(encode(texts, prompt_type), encoder.encode(texts, task="same"))
    np.testing.assert_array_equal(encode(texts, "document"), encoder.encode(texts, side="passage"))
    assert model.mteb_model_meta.revision != MtebEncoder(encoder).mteb_model_meta.revision
    with pytest.raises(InputError, match=r"^text 1 of 2 has no word that the backbone knows"):
        encode([texts[0], "unknown"], "query")


def test_a_symmetric_task_has_one_side(backbone: str) -> None:
    """Spearman's correlation of the cosines, all texts as queries; and a task of unlike pairs, which has two sides."""
    encoder = Encoder(backbone, OPTIONS)
    assert encoder.similarity == "dot"
    firsts, seconds = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]
    sides: tuple[tuple[dict[str, Any], dict[str, str], tuple[Side, Side]], ...] = (
        ({}, {}, ("query", "query")),
        ({"symmetric_side": "passage"}, {}, ("passage", "passage")),
        ({}, {"input1_prompt_type": "document", "input2_prompt_type": "query"}, ("passage", "query")),
    )
    for options, prompt_types, (one, other) in sides:
        model = Recorder(encoder, **options)
        scores = scores_of(model, sts_task(PAIRS, **prompt_types))
        vectors = encoder.encode(firsts, side=one), encoder.encode(seconds, side=other)
        assert [found.tobytes() for found in model.vectors] == [expected.tobytes() for expected in vectors]
        first, second = (array.astype(np.float64) for array in vectors)
        products = (first * second).sum(axis=1)
        cosines = products / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        truth = [pair[2] for pair in PAIRS]
        assert scores["cosine_spearman"] == pytest.approx(spearmanr(cosines, truth).statistic, abs=1e-5)
        assert scores["spearman"] == pytest.approx(spearmanr(products, truth).statistic, abs=1e-5)


KINDS = {
    "BitextMiningTask": {None},
    "ClassificationTask": {None},
    "MultilingualClusteringFastTask": {None},
    "PairClassificationTask": {None},
    "SummarizationTask": {None},
    "RerankingTask": {"query", "document"},
    "InstructionRetrieval": {"query", "document"},
    "RetrievalDialogTask": {"query", "document"},
}


@pytest.mark.filterwarnings("ignore")  # of mteb, NumPy and scikit-learn, about scores without spread
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_task_runs(backbone: str, kind: str) -> None:
    """mteb's own small tasks; for the kinds that MtebEncoder calls symmetric, mteb names no side.

    The words of their texts are unknown to this vocabulary, so that their scores say nothing.
    """
    from mteb.mocks import mock_tasks

    model = Recorder(Encoder(backbone, OPTIONS))
    task = getattr(mock_tasks, f"Mock{kind}")()
    assert "main_score" in scores_of(model, task)
    assert model.prompt_types == KINDS[kind]


def test_stored_results_of_prompts_are_kept_apart(corpus: Path, backbone: str, tmp_path: Path) -> None:
    from mteb import ResultCache

    encoder, task = Encoder(backbone, OPTIONS, tasks={}), retrieval_task(corpus)
    models = [MtebEncoder(encoder), *(MtebEncoder(encoder, task=prompt_of(encoder, seed=seed)) for seed in (0, 1))]
    expected = [scores_of(model, task)["ndcg_at_10"] for model in models]
    assert len(set(expected)) == 3
    for _ in range(2):
        stored = [scores_of(model, task, cache=ResultCache(tmp_path / "results")) for model in models]
        assert [scores["ndcg_at_10"] for scores in stored] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_similarities(backbone: str, normalize: bool) -> None:
    model = MtebEncoder(Encoder(backbone, EncoderOptions(**{**vars(OPTIONS), "normalize": normalize})))
    one, other = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    expected = one @ other.T / (lengths if normalize else 1)
    np.testing.assert_allclose(model.similarity(one, other), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(one, other), np.diagonal(expected), rtol=1e-4, atol=1e-5)


def test_instructions_of_tasks(corpus: Path, tmp_path: Path) -> None:
    """The instruction of mteb's task replaces that of Qwen3-Embedding's prefix, for queries without a deep prompt."""
    folder = str(save_qwen3_embedding(tmp_path / "qwen3"))
    plain = EncoderOptions(dtype="float32", compile="never")
    encoder = Encoder(folder, plain)
    queries, passages = texts_of(corpus, "queries"), texts_of(corpus, "corpus")
    default = "Retrieve text based on user query."  # of AbsTaskRetrieval
    for number, (prompt, expected) in enumerate([(None, default), ({"query": "Find w1"}, "Find w1"), ("Go", "Go")]):
        model = Recorder(encoder)
        scores_of(model, retrieval_task(corpus, name=f"Instructed{number}", prompt=prompt))
        options = EncoderOptions(**{**vars(plain), "query_prefix": f"Instruct: {expected}\nQuery:"})
        vectors = Encoder(folder, options).encode(queries, side="query"), encoder.encode(passages, side="passage")
        assert [found.tobytes() for found in model.vectors] == [expected.tobytes() for expected in vectors]
    assert encoder.config["query_prefix"] == INSTRUCTION
    model = Recorder(encoder, instructions=False)
    scores_of(model, retrieval_task(corpus, name="Instructed0"))
    assert model.vectors[0].tobytes() == encoder.encode(queries, side="query").tobytes()

    tuned = Encoder(folder, plain, tasks={})
    matrix = torch.randn(2, 2, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    model = Recorder(tuned, task=TaskPrompt(backbone_of(tuned.config), plain, matrix, None))
    scores_of(model, retrieval_task(corpus, name="Instructed0"))
    assert model.vectors[0].tobytes() == tuned.encode(queries, side="query", task=tuned.tasks[0]).tobytes()


def test_metadata_and_a_revision_per_setting(backbone: str, tmp_path: Path) -> None:
    """mteb stores results by name and revision, so all that changes vectors changes the revision."""
    from mteb.models.model_meta import ModelMeta
    from mteb.models.models_protocols import EncoderProtocol

    encoder = Encoder(backbone, OPTIONS, tasks={})
    model = MtebEncoder(encoder)
    assert isinstance(model, EncoderProtocol)
    meta = model.mteb_model_meta
    assert isinstance(meta, ModelMeta)
    assert (meta.name, meta.revision, meta.embed_dim) == ("riptide/tiny", encoder.fingerprint, 32)
    assert (meta.max_tokens, meta.similarity_fn_name, meta.framework) == (64, "dot", ["PyTorch"])
    assert meta.use_instructions
    assert MtebEncoder(encoder, name="some/model").mteb_model_meta.name == "some/model"

    passage_encoder = Encoder(str(save_bert(tmp_path / "passage", seed=1)), OPTIONS)
    prompt = prompt_of(encoder, seed=0)
    settings: list[dict[str, Any]] = [
        {},
        {"task": prompt},
        {"task": prompt_of(encoder, seed=1)},
        {"task": prompt_of(encoder, seed=0, passage=None)},
        {"task": {"STS12": prompt}},
        {"symmetric_side": "passage"},
        {"instructions": False},
        {"passage_encoder": passage_encoder},
    ]
    revisions = [MtebEncoder(encoder, **options).mteb_model_meta.revision for options in settings]
    assert len(set(revisions)) == len(settings)
    assert MtebEncoder(encoder, task=prompt_of(encoder, seed=0)).mteb_model_meta.revision == revisions[1]


def test_an_encoder_of_each_side(corpus: Path, backbone: str, tmp_path: Path) -> None:
    one, other = Encoder(backbone, OPTIONS), Encoder(str(save_bert(tmp_path / "passage", seed=1)), OPTIONS)
    model = Recorder(one, passage_encoder=other)
    scores_of(model, retrieval_task(corpus))
    assert model.vectors[0].tobytes() == one.encode(texts_of(corpus, "queries"), side="query").tobytes()
    assert model.vectors[1].tobytes() == other.encode(texts_of(corpus, "corpus"), side="passage").tobytes()

    small = Encoder(str(save_bert(tmp_path / "small", hidden=16)), OPTIONS)
    with pytest.raises(InputError, match=r"passage_encoder: .*16 dimensions \(dot\) .* 32 \(dot\): expected the same"):
        MtebEncoder(one, passage_encoder=small)


def test_bad_input_is_one_line(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(backbone, OPTIONS)
    with pytest.raises(InputError, match="symmetric_side 'both': expected one of query, passage"):
        MtebEncoder(encoder, symmetric_side="both")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"open it with parameter tasks \{\}"):
        MtebEncoder(encoder, task=prompt_of(encoder, seed=0))
    with pytest.raises(InputError, match="precision 'int8': MtebEncoder makes float32 vectors; leave it out"):
        MtebEncoder(encoder).encode([], task_metadata=None, hf_split="", hf_subset="", precision="int8")
    assert riptide.MtebEncoder is MtebEncoder
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(
        InputError, match=r"MtebEncoder needs the package mteb, which is not installed: pip install 'riptide\[mteb\]'$"
    ):
        riptide.MtebEncoder(encoder)
