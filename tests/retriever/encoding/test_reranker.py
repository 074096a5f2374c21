"""The re-ranker gives the probabilities of transformers and sentence-transformers, which depend on the pair only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from tiny import CLASSIFIER_VOCABULARY, save_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from riptide.base.errors import InputError
from riptide.retriever.encoding.pair_encoding import PairTokenizer
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions, describe_reranker
from riptide.retriever.forward.numerics import expected_numerics

INT8_WIDTHS = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}
FLOAT32 = RerankerOptions(dtype="float32")
WORDS = [f"w{number}" for number in range(CLASSIFIER_VOCABULARY)]
KINDS = ["bert", "roberta", "electra", "distilbert", "qwen3"]


def change_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture
def pairs() -> tuple[list[str], list[str]]:
    """Pairs of many lengths in no order: some are truncated, in some the query is longer, some are empty."""
    draw = np.random.default_rng(3)
    sizes = [(int(draw.integers(1, 12)), int(draw.integers(1, 70))) for _ in range(60)]
    sizes += [(60, 3), (50, 50), (0, 5), (4, 0), (0, 0), (1, 1)]
    made = [[" ".join(draw.choice(WORDS, size=side)) for side in size] for size in sizes]
    return [query for query, _ in made], [passage for _, passage in made]


def one_by_one(folder: Path, queries: list[str], passages: list[str], label: int | None) -> np.ndarray:
    """Returns the reference scores: each pair alone through transformers, float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for query, passage in zip(queries, passages, strict=True):
        inputs = tokenizer([query], [passage], truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        scores.append(torch.sigmoid(logits[0]) if label is None else torch.softmax(logits, 0)[label])
    return np.array(scores, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [1, 2])
def test_equals_a_loop_of_single_pairs(tmp_path: Path, pairs, kind: str, labels: int) -> None:
    folder = save_classifier(tmp_path / "ce", kind, labels)
    reranker = Reranker(str(folder), FLOAT32)
    found = reranker.score(*pairs)
    expected = one_by_one(folder, *pairs, label=None if labels == 1 else 1)
    assert (found.dtype, found.shape) == (np.float32, (66,))
    assert expected.std() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert reranker.config["probability"] == ("sigmoid" if labels == 1 else "softmax[1]")


def test_equals_the_cross_encoder_of_sentence_transformers(tmp_path: Path, pairs) -> None:
    for labels in (1, 2):
        folder = save_classifier(tmp_path / f"ce{labels}", labels=labels)
        peer = CrossEncoder(str(folder), device="cpu")
        expected = peer.predict(list(zip(*pairs, strict=True)), apply_softmax=labels == 2)
        expected = expected if labels == 1 else expected[:, 1]
        np.testing.assert_allclose(Reranker(str(folder), FLOAT32).score(*pairs), expected, atol=1e-5, rtol=0)
        peer.save_pretrained(str(tmp_path / f"saved{labels}"))
        saved = Reranker(str(tmp_path / f"saved{labels}"), FLOAT32)
        np.testing.assert_allclose(saved.score(*pairs), expected, atol=1e-5, rtol=0)


def test_the_chosen_label_of_several(tmp_path: Path, pairs) -> None:
    folder = save_classifier(tmp_path / "ce", labels=3)
    with pytest.raises(InputError, match=r"3 labels \(0 LABEL_0, 1 LABEL_1, 2 LABEL_2\).*positive_label"):
        Reranker(str(folder), FLOAT32)
    reranker = Reranker(str(folder), RerankerOptions(dtype="float32", positive_label=2))
    np.testing.assert_allclose(reranker.score(*pairs), one_by_one(folder, *pairs, label=2), atol=1e-5, rtol=0)
    assert reranker.config["probability"] == "softmax[2]"
    with pytest.raises(InputError, match="has 3 label"):
        Reranker(str(folder), RerankerOptions(positive_label=3))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_mates_and_order_change_nothing(tmp_path: Path, pairs, kind: str) -> None:
    reranker = Reranker(str(save_classifier(tmp_path / "ce", kind)), FLOAT32)
    queries, passages = map(np.array, pairs)
    together = reranker.score(list(queries), list(passages))
    alone = [reranker.score([query], [passage])[0] for query, passage in zip(*pairs, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    shuffled = np.random.default_rng(0).permutation(len(queries))
    found = reranker.score(list(queries[shuffled]), list(passages[shuffled]))
    np.testing.assert_allclose(found, together[shuffled], atol=1e-5, rtol=0)


def test_the_same_list_gives_the_same_bytes(tmp_path: Path, pairs) -> None:
    folder = str(save_classifier(tmp_path / "ce"))
    for dtype in ("float32", "bfloat16"):
        options = RerankerOptions(dtype=dtype)  # type: ignore[arg-type]
        first, second = Reranker(folder, options, threads=1), Reranker(folder, options, threads=2)
        assert first.score(*pairs).tobytes() == first.score(*pairs).tobytes() == second.score(*pairs).tobytes()


def test_bfloat16_is_near(tmp_path: Path, pairs) -> None:
    folder = str(save_classifier(tmp_path / "ce"))
    found = Reranker(folder, RerankerOptions(dtype="bfloat16"))
    assert "bfloat16 packed" in found.numerics
    np.testing.assert_allclose(found.score(*pairs), Reranker(folder, FLOAT32).score(*pairs), atol=0.05)


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path: Path, pairs) -> None:
    folder = str(save_classifier(tmp_path / "ce"))
    found = Reranker(folder, RerankerOptions(dtype="float32", compile="always"))
    assert "compiled" in found.numerics
    np.testing.assert_allclose(found.score(*pairs), Reranker(folder, FLOAT32).score(*pairs), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_numerics_are_told_beforehand(tmp_path: Path, kind: str) -> None:
    folder = str(save_classifier(tmp_path / "ce", kind))
    for options in (FLOAT32, RerankerOptions()):
        assert Reranker(folder, options, device="cpu").numerics == expected_numerics(options, "cpu", kind)


def test_int8_is_near_and_independent_of_threads(tmp_path: Path, pairs) -> None:
    folder = str(save_classifier(tmp_path / "ce", **INT8_WIDTHS))
    options = RerankerOptions(dtype="int8")
    one, two = Reranker(folder, options, threads=1), Reranker(folder, options, threads=2)
    assert one.numerics == expected_numerics(options, None, "bert")
    assert " int8 packed " in one.numerics
    found = one.score(*pairs)
    assert found.tobytes() == two.score(*pairs).tobytes()
    np.testing.assert_allclose(found, Reranker(folder, FLOAT32).score(*pairs), atol=0.02)
    alone = [one.score([query], [passage])[0] for query, passage in zip(*pairs, strict=True)]
    np.testing.assert_allclose(found, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("distilbert", {}, "model_type distilbert: int8 is for bert, camembert, electra, roberta, xlm-roberta"),
        ("bert", {"compile": "always"}, "int8 is not compiled: leave out"),
        ("bert", {}, "hidden_size 32: int8 needs a multiple of 64"),
    ],
)
def test_int8_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict, message: str
) -> None:
    folder = str(save_classifier(tmp_path / "ce", kind))
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", None)
    with pytest.raises(InputError, match=message):
        Reranker(folder, RerankerOptions(dtype="int8", **options))


def test_a_decoder_of_the_bert_family_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = change_config(save_classifier(tmp_path / "ce"), is_decoder=True)
    reason = (
        "is_decoder is true, so that tokens do not attend to later ones, and bert encoders attend to all: set it to "
    )
    with pytest.raises(InputError) as raised:
        describe_reranker(folder)
    assert str(raised.value) == f"{folder}/config.json: {reason}false"


def test_description_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_classifier(tmp_path / "ce")
    reranker = Reranker(str(folder), FLOAT32)
    other = save_classifier(tmp_path / "other", seed=1)
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", None)
    assert describe_reranker(str(folder), FLOAT32) == reranker.config
    assert reranker.config["max_length"] == 48
    assert describe_reranker(str(folder), RerankerOptions(max_length=20))["max_length"] == 20
    differing = {key for key, value in describe_reranker(str(other), FLOAT32).items() if value != reranker.config[key]}
    assert differing == {"weights"}
    assert describe_reranker(shutil.copytree(folder, tmp_path / "copy"), FLOAT32) == reranker.config


def test_max_length_cuts_the_longer_text(tmp_path: Path) -> None:
    tokenizer = PairTokenizer(save_classifier(tmp_path / "ce"), 13)
    tokens, types = tokenizer(["w0 w1 w2"], [" ".join(WORDS)])
    assert tokens.ids.tolist() == [2, 4, 5, 6, 3, 4, 5, 6, 7, 8, 9, 10, 3]
    assert types.ids.tolist() == [0] * 5 + [1] * 8


def test_titles(tmp_path: Path) -> None:
    folder = str(save_classifier(tmp_path / "ce"))
    expected = {"space": "t x", "newline": "t\nx", "sep": "t [SEP] x", "none": "x"}
    for title, text in expected.items():
        reranker = Reranker(folder, RerankerOptions(title=title))  # type: ignore[arg-type]
        assert reranker.compose(["t", ""], ["x", "y"]) == [text, "y"]


def test_nothing_to_score(tmp_path: Path) -> None:
    found = Reranker(str(save_classifier(tmp_path / "ce")), FLOAT32).score([], [])
    assert (found.shape, found.dtype) == ((0,), np.float32)


def test_bad_pairs_are_named(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "ce")
    reranker = Reranker(str(folder), FLOAT32)
    with pytest.raises(InputError, match="2 queries and 1 passages"):
        reranker.score(["a", "b"], ["c"])
    with pytest.raises(InputError, match="pair 1 of 2"):
        reranker.score(["w1", "w2"], ["w3", "\ud800"])
    with pytest.raises(InputError, match="pair 0 of 1"):
        reranker.score(["w1"], [None])  # type: ignore[list-item]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_its_pair(tmp_path: Path, value: float) -> None:
    """The embedding of one word is not finite: the error names the pair that contains it, in any batch."""
    folder = save_classifier(tmp_path / "ce")
    model = BertForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[4 + 7] = value
    model.save_pretrained(folder)
    reranker = Reranker(str(folder), FLOAT32)
    assert np.isfinite(reranker.score(["w1"], ["w2"])).all()
    with pytest.raises(InputError, match=r"the score of pair 2 \(and of 0 more of 4\) is not finite"):
        reranker.score(["w1", "w2", "w3", "w4 w5"], ["w2", "w2 w3", "w1 w7", "w1 w2 w3"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is no cross-encoder"),
        ({"architectures": None}, "no architecture is no cross-encoder"),
        ({"model_type": "nonsense"}, "nonsense"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    folder = change_config(save_classifier(tmp_path / "ce"), **changes)
    for attempt in (Reranker, describe_reranker):
        with pytest.raises(InputError, match=message) as raised:
            attempt(str(folder))  # type: ignore[operator]
        assert "\n" not in str(raised.value)


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "ce")
    BertForSequenceClassification.from_pretrained(folder).bert.save_pretrained(folder)
    change_config(folder, architectures=["BertForSequenceClassification"])
    with pytest.raises(InputError, match=r"the weights lack classifier\.bias, classifier\.weight"):
        Reranker(str(folder))


def test_several_modules_are_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "ce")
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_LogitScore"}]))
    with pytest.raises(InputError, match="several modules"):
        describe_reranker(str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 49}, "parameter max_length 49: more than the 48 positions"),
        ({"max_length": 4}, "parameter max_length 4: leaves no room beside 3 special tokens"),
        ({"max_length": 0}, "parameter max_length 0: expected at least 1"),
        ({"positive_label": -1}, "parameter positive_label -1: expected at least 0"),
        ({"positive_label": 1}, "has 1 label"),
        ({"title": "tab"}, "parameter title 'tab': expected one of space, newline, sep, none"),
        ({"dtype": "float16"}, "parameter dtype 'float16'"),
        ({"compile": "maybe"}, "parameter compile 'maybe'"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict, message: str) -> None:
    folder = str(save_classifier(tmp_path / "ce"))
    with pytest.raises(InputError, match=message):
        Reranker(folder, RerankerOptions(**options))


def test_unknown_model() -> None:
    with pytest.raises(InputError, match="no such folder"):
        Reranker("./nowhere")
