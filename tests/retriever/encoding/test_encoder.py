"""The encoder's vectors equal those of sentence-transformers, and depend on nothing but the texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe, find_model_folder

FLOAT32 = EncoderOptions(dtype="float32", compile="never")
Tiny = Callable[..., Path]


def options(**changes: object) -> EncoderOptions:
    return EncoderOptions(**{"dtype": "float32", "compile": "never"} | changes)  # type: ignore[arg-type]


def build(folder: Path, out: Path, pooling: str, *modules: torch.nn.Module, **settings: object) -> SentenceTransformer:
    """A sentence-transformers model around a tiny backbone, saved to `out` and opened again."""
    transformer = Transformer(str(folder), max_seq_length=settings.pop("max_seq_length", None))
    model = SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling), *modules],
        device="cpu",
        **settings,
    )
    model.save(str(out))
    return SentenceTransformer(str(out), device="cpu")


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_minilm_equals_sentence_transformers(name: str, texts: list[str]) -> None:
    encoder = Encoder(name, FLOAT32)
    expected = SentenceTransformer(str(find_model_folder(name)), device="cpu").encode(texts)
    found = encoder.encode(texts, side="passage")
    assert (encoder.dim, encoder.similarity, found.dtype) == (384, "cosine", np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "cls"), ("bert", "mean"), ("roberta", "mean"), ("t5", "mean"), ("qwen3", "lasttoken")],
)
def test_equals_sentence_transformers(
    tiny: Tiny, tmp_path: Path, texts: list[str], kind: str, pooling: str, side: str
) -> None:
    backbone = tiny(kind, padding_side=side)
    peer = build(backbone, tmp_path / "st", pooling, max_seq_length=30)
    found = Encoder(str(tmp_path / "st"), FLOAT32).encode(texts)
    # One text at a time, so that nothing hangs on how the peer pads.
    expected = np.concatenate([peer.encode([text]) for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_dense_normalize_and_prompts(tiny: Tiny, tmp_path: Path, texts: list[str]) -> None:
    torch.manual_seed(1)
    modules = [
        Dense(32, 24, activation_function=torch.nn.Tanh()),
        Dense(24, 16, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    peer = build(
        tiny("bert"), tmp_path / "st", "mean", *modules, prompts={"query": "query : ", "document": "passage : "}
    )
    encoder = Encoder(str(tmp_path / "st"), FLOAT32)
    assert (encoder.dim, encoder.similarity) == (16, "cosine")
    np.testing.assert_allclose(encoder.encode(texts), peer.encode_query(texts), atol=1e-5)
    np.testing.assert_allclose(encoder.encode(texts, side="passage"), peer.encode_document(texts), atol=1e-5)
    assert not np.allclose(encoder.encode(texts), encoder.encode(texts, side="passage"), atol=1e-2)
    other = Encoder(str(tmp_path / "st"), options(query_prefix="", passage_prefix="instruct "))
    np.testing.assert_allclose(other.encode(texts), peer.encode(texts), atol=1e-5)
    np.testing.assert_allclose(other.encode(texts, side="passage"), peer.encode(texts, prompt="instruct "), atol=1e-5)


def test_lower_case_setting(tiny: Tiny, tmp_path: Path) -> None:
    transformer = Transformer(str(tiny("bert")), do_lower_case=True)
    SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu").save(str(tmp_path / "st"))
    settings = tmp_path / "st" / "sentence_bert_config.json"
    settings.write_text('{"max_seq_length": 30, "do_lower_case": true}')
    upper, lower = Encoder(str(tmp_path / "st"), FLOAT32).encode(["The RIVER Bank", "the river bank"])
    np.testing.assert_array_equal(upper, lower)


def test_old_pooling_keys(tiny: Tiny, tmp_path: Path, texts: list[str]) -> None:
    peer = build(tiny("bert"), tmp_path / "st", "cls")
    (tmp_path / "st" / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    np.testing.assert_allclose(Encoder(str(tmp_path / "st"), FLOAT32).encode(texts), peer.encode(texts), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5", "qwen3"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_batch_mates_and_order_change_nothing(tiny: Tiny, texts: list[str], kind: str, side: str, pooling: str) -> None:
    if (kind, pooling) == ("qwen3", "cls"):
        with pytest.raises(InputError, match="the first token of a Qwen3Model sees no other"):
            Encoder(str(tiny(kind)), options(padding_side=side, pooling=pooling))
        return
    encoder = Encoder(str(tiny(kind)), options(padding_side=side, pooling=pooling))
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=1e-5)
    shuffled = np.random.default_rng(0).permutation(len(texts))
    np.testing.assert_allclose(encoder.encode([texts[i] for i in shuffled]), together[shuffled], atol=1e-5, rtol=1e-5)


def test_pooling_by_hand(tiny: Tiny) -> None:
    """Against the backbone's own output, one text at a time."""
    from transformers import AutoModel

    folder = tiny("bert")
    for pooling in ("cls", "mean", "last"):
        encoder = Encoder(str(folder), options(pooling=pooling))
        ids = encoder.tokenize(["the river bank"], side="query").ids
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(folder)(input_ids=torch.tensor(ids[None].astype(np.int64)))[0][0]
        expected = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling]
        np.testing.assert_allclose(encoder.encode(["the river bank"])[0], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_do_not_depend_on_threads(tiny: Tiny, texts: list[str], dtype: str) -> None:
    names = [str(tiny("bert")), "all-MiniLM-L6-v2"]
    for name in names:
        one, two = (Encoder(name, options(dtype=dtype), threads=threads).encode(texts) for threads in (1, 2))
        assert one.tobytes() == two.tobytes()


def test_odd_texts_and_none(tiny: Tiny) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32)
    assert encoder.encode([]).shape == (0, 32)
    odd = ["", "\0", "a" * 1_000_000, "bank " * 200_000, "‮\ufeff\U0010ffff"]
    vectors = encoder.encode(odd)
    assert vectors.shape == (5, 32)
    assert np.isfinite(vectors).all()
    with pytest.raises(InputError, match="text 1 of 2"):
        encoder.encode(["fine", "lone \ud800 surrogate"])
    bare = Encoder(str(tiny("bert", name="bare", special=False)), FLOAT32)
    assert np.isfinite(bare.encode(["", "bank"])).all()


def test_eos_is_appended_once_and_within_the_length(tiny: Tiny) -> None:
    folder = str(tiny("qwen3", special=False))
    plain = Encoder(folder, options(pooling="last", query_length=6))
    ending = Encoder(folder, options(pooling="last", query_length=6, append_eos=True))
    for text in ("river bank", "bank " * 30):
        ids = ending.tokenize([text], side="query").ids.tolist()
        assert ids[-1] == 4
        assert ids.count(4) == 1
        assert len(ids) <= 6
        assert ids[:-1] == plain.tokenize([text], side="query").ids.tolist()[: len(ids) - 1]


def test_title_policies(tiny: Tiny) -> None:
    folder = str(tiny("bert"))
    expected = {"space": "T x", "newline": "T\nx", "sep": "T [SEP] x", "none": "x"}
    for title, passage in expected.items():
        encoder = Encoder(folder, options(title=title))
        assert encoder.compose(["T", ""], ["x", "y"]) == [passage, "y"]
        assert encoder.config["title"] == title
    with pytest.raises(ValueError, match="zip"):
        encoder.__class__(folder, FLOAT32).compose(["T"], ["x", "y"])


def test_dimension_truncates_then_normalises(tiny: Tiny, texts: list[str]) -> None:
    folder = str(tiny("bert"))
    full = Encoder(folder, FLOAT32).encode(texts)[:, :8]
    encoder = Encoder(folder, options(dimension=8))
    assert (encoder.dim, encoder.similarity) == (8, "cosine")
    np.testing.assert_allclose(encoder.encode(texts), full / np.linalg.norm(full, axis=1, keepdims=True), atol=1e-6)
    with pytest.raises(InputError, match="parameter dimension 33"):
        Encoder(folder, options(dimension=33))


def test_normalize_option(tiny: Tiny, texts: list[str]) -> None:
    folder = str(tiny("bert"))
    plain, scaled = Encoder(folder, FLOAT32), Encoder(folder, options(normalize=True))
    assert (plain.similarity, scaled.similarity) == ("dot", "cosine")
    expected = plain.encode(texts)
    np.testing.assert_allclose(
        scaled.encode(texts), expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6
    )


def test_lengths(tiny: Tiny) -> None:
    folder = str(tiny("bert"))
    encoder = Encoder(folder, options(query_length=5, passage_length=61))
    assert encoder.tokenize(["bank " * 90], side="query").lengths.tolist() == [5]
    assert encoder.tokenize(["bank " * 90], side="passage").lengths.tolist() == [61]
    with pytest.raises(InputError, match="62: more than the 61 positions"):
        Encoder(folder, options(passage_length=62))
    with pytest.raises(InputError, match="no room"):
        Encoder(folder, options(query_length=2))
    # RoBERTa numbers positions from the padding token's on: 42 of them leave room for 41 tokens.
    roberta = str(tiny("roberta"))
    assert Encoder(roberta, FLOAT32).encode(["bank " * 90]).shape == (1, 32)
    with pytest.raises(InputError, match="42: more than the 41 positions"):
        Encoder(roberta, options(query_length=42))


def test_overflow_is_an_error_that_names_the_text(tiny: Tiny) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny("bert")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5 + WORD_RIVER] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    encoder = Encoder(str(folder), FLOAT32)
    assert np.isfinite(encoder.encode(["bank", "water"])).all()
    with pytest.raises(InputError, match="text 2 "):
        encoder.encode(["bank", "water", "the river"])


WORD_RIVER = 3


def test_task_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InputError, match="task 'nq'"):
        Encoder(str(tiny("bert")), FLOAT32).encode(["a"], task="nq")  # type: ignore[arg-type]


def test_describe_has_the_encoders_fingerprint(tiny: Tiny) -> None:
    from riptide.retriever.model.recipe import fingerprint_of

    folder = tiny("bert")
    for chosen in (FLOAT32, options(pooling="cls", title="sep", query_prefix="query : ", passage_length=20)):
        assert describe(str(folder), chosen) == Encoder(str(folder), chosen).config
    fingerprints = {
        fingerprint_of(describe(str(folder), chosen))
        for chosen in (
            FLOAT32,
            options(pooling="cls"),
            options(title="none"),
            options(query_prefix="a"),
            options(passage_length=9),
            options(dimension=4),
            options(normalize=True),
            options(append_eos=True),
            options(dtype="bfloat16"),
        )
    }
    assert len(fingerprints) == 9
    assert str(folder) not in str(describe(str(folder), FLOAT32))


def test_changed_weights_change_the_fingerprint(tiny: Tiny) -> None:
    first, again, other = tiny("bert"), tiny("bert", name="again"), tiny("bert", name="other", seed=1)
    prints = [Encoder(str(folder), FLOAT32).fingerprint for folder in (first, again, other)]
    assert prints[0] == prints[1] != prints[2]
