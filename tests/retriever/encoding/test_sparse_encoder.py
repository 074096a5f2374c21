"""SPLADE's vectors against a slow float64 reference and sentence-transformers' SparseEncoder; bad folders; prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder as Peer
from tiny import add_masked_head
from transformers import AutoModelForMaskedLM

from riptide.base.errors import InputError
from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.saving import save_encoder
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.encoding.sparse_model import keep_largest
from riptide.retriever.encoding.sparse_vectors import SparseVectors, from_dense
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptRows
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of, load_prompt

Tiny = Callable[..., Path]
PLAIN = EncoderOptions(pooling="splade", dtype="float32", passage_length=40, query_length=20)
EXACT = EncoderOptions(dtype="float32")


def weights_of(logits: torch.Tensor) -> np.ndarray:
    """Returns the weights of a text without padding, word by word, float64 [vocabulary]; logits: [1, n, vocabulary]."""
    tokens = logits[0].double().tolist()
    return np.array([max(np.log1p(max(0.0, token[word])) for token in tokens) for word in range(len(tokens[0]))])


def slow(folder: Path, encoder: SparseEncoder, texts: list[str], prompt: torch.Tensor | None = None) -> np.ndarray:
    """Returns float64 [texts, vocabulary], each text computed alone in float64, without padding."""
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    extra: dict[str, Any] = {}
    if prompt is not None:
        enable_prompts(model.base_model)
        extra = {"prompt": PromptRows(prompt.double()[:, :, None])}
    tokens, found = encoder.tokenize(texts, side="passage"), []
    for start, length in zip(tokens.starts, tokens.lengths, strict=True):
        ids = torch.from_numpy(tokens.ids[start : start + length].astype(np.int64))[None]
        with torch.no_grad():
            states = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).last_hidden_state
            head = model.cls if hasattr(model, "cls") else model.lm_head
            found.append(weights_of(head(states)))
    return np.stack(found)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_vectors_are_those_of_the_equation(tiny: Tiny, texts: list[str], kind: str) -> None:
    """Batches are padded; special tokens count, padding does not."""
    folder = add_masked_head(tiny(kind))
    encoder = SparseEncoder(str(folder), PLAIN)
    expected = slow(folder, encoder, texts)
    actual = encoder.encode(texts, side="passage")
    assert (actual.width, actual.indices.dtype, actual.values.dtype) == (encoder.dim, np.int32, np.float32)
    assert 0 < np.count_nonzero(expected) < expected.size
    np.testing.assert_allclose(actual.dense(), expected, atol=1e-4)
    np.testing.assert_array_equal(actual.counts, (expected > 0).sum(1))
    dense = Encoder(str(folder), PLAIN)
    assert (dense.dim, dense.similarity) == (encoder.dim, "dot")
    np.testing.assert_array_equal(dense.encode(texts, side="passage"), actual.dense())
    assert encoder.numerics.endswith(f"float32 eager torch-{torch.__version__}")


def older_layout(folder: Path) -> None:
    """Changes a folder of sentence-transformers 6 to the files of published models."""
    package = "sentence_transformers.sparse_encoder.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{package}.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30, "do_lower_case": False}))
    splade = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(splade))


@pytest.mark.parametrize(("layout", "most"), [("saved", None), ("saved", 5), ("older", None)])
def test_published_folders_open(tiny: Tiny, texts: list[str], tmp_path: Path, layout: str, most: int | None) -> None:
    peer = Peer(str(add_masked_head(tiny("bert"))), device="cpu", max_active_dims=most)
    peer.save_pretrained(str(tmp_path / "peer"))
    if layout == "older":
        older_layout(tmp_path / "peer")
        peer = Peer(str(tmp_path / "peer"), device="cpu", local_files_only=True)
    texts = [*texts[:8], texts[-1]]
    encoder = SparseEncoder(str(tmp_path / "peer"), EXACT)
    actual = encoder.encode(texts)
    expected = peer.encode(texts, convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(actual.dense(), expected, atol=1e-5)
    assert most is None or actual.counts.max() == most
    if layout == "older":
        assert encoder.tokenize(texts, side="query").lengths.max() == 30
    assert encoder.config["pooling"] == "splade"


@pytest.mark.parametrize("most", [None, 6])
def test_ours_open_in_sentence_transformers(tiny: Tiny, texts: list[str], tmp_path: Path, most: int | None) -> None:
    folder = add_masked_head(tiny("bert"))
    options = EncoderOptions(
        pooling="splade",
        dtype="float32",
        query_length=24,
        passage_length=24,
        query_prefix="query: ",
        query_terms=most,
        passage_terms=most,
    )
    recipe = read_recipe(folder, options)
    save_encoder(tmp_path / "ours", recipe, open_pooled(recipe, torch.float32).model_to_save)
    peer = Peer(str(tmp_path / "ours"), device="cpu", local_files_only=True)
    ours, before = SparseEncoder(str(tmp_path / "ours"), EXACT), SparseEncoder(str(folder), options)
    assert ours.config["query_terms"] == before.config["query_terms"] == most
    for side, encode in (("query", peer.encode_query), ("passage", peer.encode_document)):
        expected = encode(texts, convert_to_sparse_tensor=False).numpy()
        for encoder in (ours, before):
            np.testing.assert_allclose(encoder.encode(texts, side=side).dense(), expected, atol=1e-5)


def test_pruning_keeps_the_largest_weights_of_each_side(tiny: Tiny, texts: list[str]) -> None:
    folder = str(add_masked_head(tiny("bert")))
    options = EncoderOptions(pooling="splade", dtype="float32", query_terms=3, passage_terms=9)
    everything = SparseEncoder(folder, EncoderOptions(pooling="splade", dtype="float32"))
    pruned = SparseEncoder(folder, options)
    assert pruned.fingerprint != everything.fingerprint
    for side, count in (("query", 3), ("passage", 9)):
        expected = everything.encode(texts, side=side).dense()  # type: ignore[arg-type]
        for row in expected:
            row[np.argsort(-row, kind="stable")[count:]] = 0
        np.testing.assert_array_equal(pruned.encode(texts, side=side).dense(), expected)  # type: ignore[arg-type]


def test_of_equal_weights_the_first_words_are_kept() -> None:
    weights = torch.tensor([[2.0, 1, 3, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0]])
    expected = torch.tensor([[2.0, 1, 3, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0]])
    torch.testing.assert_close(keep_largest(weights, 4), expected, atol=0, rtol=0)
    assert keep_largest(weights, 6) is weights


def test_pruning_keeps_numbers_that_are_not_finite() -> None:
    nan = float("nan")
    weights = torch.tensor([[nan, nan, nan], [1, nan, 3], [float("inf"), 1, 2]])
    assert (~torch.isfinite(keep_largest(weights, 2))).any(1).all()


def test_sparse_vectors_hold_what_dense_ones_do() -> None:
    draw = np.random.default_rng(0)
    matrix = (draw.random((7, 11)) * (draw.random((7, 11)) < 0.3)).astype(np.float32)
    matrix[[0, 3, 6]] = 0
    sparse = from_dense(matrix)
    np.testing.assert_array_equal(sparse.dense(), matrix)
    rows = np.array([5, 0, 2, 2, 6])
    np.testing.assert_array_equal(sparse.take(rows).dense(), matrix[rows])
    assert len(sparse.take(rows[:0])) == len(from_dense(matrix[:0])) == 0
    assert isinstance(sparse, SparseVectors)


def test_deep_prompts_work_over_it(tiny: Tiny, texts: list[str], tmp_path: Path) -> None:
    """Texts of several tasks in one batch; the saved form keeps the options."""
    folder = add_masked_head(tiny("bert"))
    options = EncoderOptions(pooling="splade", dtype="float32", passage_length=40, query_length=40)
    encoder = SparseEncoder(str(folder), options, tasks={})
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(2, 2, 4, length, 8, generator=draw) for length in (3, 5)]
    for name, matrix in zip("ab", matrices, strict=True):
        TaskPrompt(backbone_of(encoder.config), options, matrix, matrix).save(tmp_path)
        encoder.put_task(name, load_prompt(tmp_path))
    texts = texts[:9]
    tasks = [["a", "b", None][number % 3] for number in range(9)]
    mixed = encoder.encode(texts, side="passage", task=tasks).dense()
    prompts = {"a": matrices[0], "b": matrices[1], None: None}
    expected = np.concatenate(
        [slow(folder, encoder, [text], prompts[task]) for text, task in zip(texts, tasks, strict=True)]
    )
    np.testing.assert_allclose(mixed, expected, atol=1e-4)
    assert np.abs(mixed - encoder.encode(texts, side="passage").dense()).max() > 0.1
    assert encoder.tasks == ("a", "b")


def refusal(folder: Path, options: EncoderOptions = EXACT) -> str:
    with pytest.raises(InputError) as raised:
        SparseEncoder(str(folder), options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", "needs a masked-language-model head, and the weights lack it (cls.predictions."),
        ("qwen3", "needs a masked-language-model head, and a qwen3 has none"),
        ("t5", "needs a masked-language-model head, and a t5 has none"),
    ],
)
def test_a_backbone_without_a_head_is_refused(tiny: Tiny, kind: str, message: str) -> None:
    assert message in refusal(tiny(kind), EncoderOptions(pooling="splade"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": True}, "weights of words are not scaled to length 1"),
        ({"dimension": 8}, "have no leading dimensions"),
        ({"compile": "always"}, "parameter compile always: expected auto or never with parameter pooling splade"),
        ({"pooling": "mean"}, "makes dense vectors (pooling mean); expected a SPLADE model"),
        ({"pooling": "mean", "query_terms": 4}, "parameter query_terms 4: is for parameter pooling splade"),
        ({"passage_terms": 0}, "parameter passage_terms 0: expected at least 1"),
    ],
)
def test_options_without_a_meaning_are_refused(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    folder = add_masked_head(tiny("bert"))
    with pytest.raises(InputError) as raised:
        SparseEncoder(str(folder), EncoderOptions(**{"pooling": "splade", **options}))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "sum"}, "pooling_strategy=sum is not supported"),
        ("1_SpladePooling/config.json", {"activation_function": "log1p_relu"}, "activation_function=log1p_relu is not"),
        ("1_SpladePooling/config.json", {"pooling_strategy": 3}, "pooling_strategy: expected a string, got 3"),
        ("1_SpladePooling/config.json", {"embedding_dimension": 9}, "embedding_dimension is 9, and the model has"),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task=text-generation is"),
        ("sentence_bert_config.json", {"modality_config": {"text": {"method": "x"}}}, "is not supported"),
        ("config_sentence_transformers.json", {"max_active_dims": -1}, "max_active_dims: expected an integer of at"),
    ],
)
def test_damaged_folders_are_refused(tiny: Tiny, tmp_path: Path, file: str, change: dict, message: str) -> None:
    Peer(str(add_masked_head(tiny("bert"))), device="cpu").save_pretrained(str(tmp_path / "peer"))
    path = tmp_path / "peer" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    line = refusal(tmp_path / "peer")
    assert message in line
    assert file in line


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "Pooling", "SpladePooling"], "then SpladePooling, got Transformer, Pooling, SpladePooling"),
        (["MLMTransformer"], "expected a Transformer and a Pooling module, got 1"),
        (["MLMTransformer", "Pooling"], "then SpladePooling, got MLMTransformer, Pooling"),
        (["Router", "SpladePooling"], "is not supported (Transformer, Pooling"),
    ],
)
def test_other_modules_are_refused(tiny: Tiny, kinds: list[str], message: str) -> None:
    folder = add_masked_head(tiny("bert"))
    modules = [
        {"path": "" if not place else kind, "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert message in refusal(folder)


def test_weights_that_are_cut_off_are_refused(tiny: Tiny) -> None:
    folder = add_masked_head(tiny("bert"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: cannot be loaded" in refusal(folder, EncoderOptions(pooling="splade"))


@pytest.mark.parametrize("terms", [None, 4])
def test_vectors_that_are_not_finite_are_refused(tiny: Tiny, terms: int | None) -> None:
    """Pruning keeps NaN: a vector of zeros would find nothing, without a message."""
    encoder = SparseEncoder(str(add_masked_head(tiny("bert"))), replace(PLAIN, query_terms=terms))
    with torch.no_grad():
        encoder.dense._eager.backbone.embeddings.word_embeddings.weight[5] = float("nan")
    with pytest.raises(InputError, match=r"the vector of text \d of 2 is not finite: try parameter dtype float32"):
        encoder.encode(["the river", "bank"])
