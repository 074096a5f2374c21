"""The store of the API is read with methods; what is missing is named together with the method that makes it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import make_passages, save_tiny_bert

import riptide
from riptide import InputError, Store


def test_a_corpus_is_read_by_id_and_in_order(shared: Store) -> None:
    corpus, expected = shared.corpus(), make_passages(240)
    assert len(corpus) == 240
    passage = corpus["p17"]
    assert (passage.row, passage.id, passage.title) == (17, "p17", expected[17]["title"])
    assert passage.text == expected[17]["text"]
    assert passage.metadata == {"year": 1917, "tags": ["a", "b"]}
    assert [each.id for each in corpus] == [each["_id"] for each in expected]
    assert ("p17" in corpus, "none" in corpus, 17 in corpus) == (True, False, False)
    read = corpus.open_passage_reader()
    rows = np.array([200, 3, 61, 3])
    assert read(rows) == corpus.passages(rows)


def test_a_store_in_s3_is_made_searched_and_measured_as_a_local_one(
    store: Store, bucket: str, make_store: Callable[[str], Store]
) -> None:
    in_s3 = make_store(f"{bucket}/store")
    texts = store.queries().split("test").texts
    for mode in ("bm25", "dense", "hybrid"):
        assert in_s3.search(mode)(texts, k=5) == store.search(mode)(texts, k=5)
    measured, expected = (each.evaluate(["bm25", "hybrid"], metrics=["nDCG@10"]).to_pandas() for each in (in_s3, store))
    assert measured.equals(expected)
    assert in_s3.corpus()["p3"] == store.corpus()["p3"]


def test_deleted_passages_are_not_in_a_corpus(store: Store, tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("p3\np99\n")
    store.import_corpus(delete=tmp_path / "gone")
    corpus = store.corpus()
    assert (len(corpus), corpus.num_rows, "p3" in corpus) == (238, 240, False)
    assert [each.id for each in corpus] == [f"p{number}" for number in range(240) if number not in (3, 99)]
    with pytest.raises(KeyError) as error:
        corpus["p3"]
    assert str(error.value) == f"{store.url}/corpus: the passage 'p3' is deleted"


def test_a_missing_passage_is_an_input_error_and_a_key_error(shared: Store) -> None:
    corpus = shared.corpus()
    line = f"{shared.url}/corpus: no passage has the id 'x'; it has 240 passages, such as 'p0'"
    for kind in (KeyError, InputError):
        with pytest.raises(kind) as error:
            corpus["x"]
        assert str(error.value) == line
    with pytest.raises(
        InputError, match=r"a passage has a text as its id, got 3: corpus\.passages\(\[ROW\]\) reads rows"
    ):
        corpus[3]  # type: ignore[index]


def test_a_corpus_of_nothing_is_true_and_empty(tmp_path: Path) -> None:
    from riptide.indexing.corpus.corpus import Corpus

    corpus = Corpus([])
    assert (bool(corpus), len(corpus), list(corpus), "a" in corpus) == (True, 0, [], False)
    with pytest.raises(InputError, match="the corpus: no passage has the id 'a'; it has 0 passages"):
        corpus["a"]


def test_queries_and_embeddings_are_opened_by_name_or_alone(shared: Store) -> None:
    assert shared.queries().split("test") == shared.queries("mine").split("test")
    assert len(shared.queries().split("test").texts) == 30
    embeddings = shared.embeddings()
    assert (embeddings.name, embeddings.num_rows) == ("enc", 240)
    encoder = shared.embeddings("enc").encoder(device="cpu")
    passages = shared.corpus().passages(range(240))
    texts = encoder.compose([each.title for each in passages], [each.text for each in passages])
    vectors = encoder.encode(texts, side="passage")
    np.testing.assert_allclose(vectors, embeddings.take(np.arange(240)).astype(np.float32), atol=2e-3)
    assert (vectors.shape, encoder.dim, repr(encoder)) == (
        (240, 32),
        32,
        f"StoredEncoder({embeddings.encoder_name!r}, dim=32)",
    )
    with pytest.raises(InputError, match=r"texts 'a text': expected a list of texts, got one text; write \[text\]"):
        encoder.encode("a text")


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("corpus", (), "there is no store here; store.import_corpus makes one"),
        ("queries", (), "there is no store here; store.import_corpus makes one"),
        ("embeddings", (), "there is no store here; store.import_corpus makes one"),
        ("search", ("bm25",), "there is no store here; store.import_corpus makes one"),
        ("evaluate", ("bm25",), "there is no store here; store.import_corpus makes one"),
        ("search_queries", ("bm25",), "there is no store here; store.import_corpus makes one"),
    ],
)
def test_nothing_is_read_from_an_empty_folder(tmp_path: Path, method: str, arguments: tuple, message: str) -> None:
    store = Store(tmp_path / "none")
    with pytest.raises(InputError) as error:
        getattr(store, method)(*arguments)
    assert str(error.value) == f"{tmp_path / 'none'}: {message}"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("queries", r"queries/x: there is no such artifact \(complete queries: mine\); store\.import_"),
        (
            "embeddings",
            r"embeddings/x: there is no such artifact \(complete embeddings: enc\); store\.encode_corpus makes",
        ),
    ],
)
def test_a_missing_name_is_refused_with_the_method_that_makes_it(shared: Store, method: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        getattr(shared, method)("x")


def test_several_artifacts_of_a_kind_need_a_name(store: Store) -> None:
    store.encode_corpus(store.embeddings().encoder_name, name="other", dtype="float32", compile="never")
    with pytest.raises(InputError, match="has several embeddings: enc, other; say which with name="):
        store.embeddings()
    store.import_queries([{"id": "1", "text": "w1", "relevant": "p1"}], name="more")
    with pytest.raises(InputError, match=r"has several queries: .*; say which with name="):
        store.queries()


def test_a_store_of_the_api_loads_neither_torch_nor_ray(shared: Store) -> None:
    """Also when it reads its corpus and searches by BM25."""
    program = f"""
import sys, riptide
store = riptide.Store({shared.url!r})
assert "p3" in store.corpus()
assert store.search("bm25")("bama")[0].rank == 1
print([name for name in ("torch", "ray", "faiss", "transformers") if name in sys.modules])
"""
    root = Path(riptide.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_store_shows_the_names_of_the_api_alone(shared: Store) -> None:
    names = dir(shared)
    assert {"import_corpus", "copy_to", "search", "evaluate", "remove", "names", "url"} <= set(names)
    assert {"storage", "pinned_config", "files_to_remove", "_run_job"}.isdisjoint(names)
    assert [name for name in names if not getattr(type(shared), name, shared).__doc__] == []


def test_a_store_is_copied_and_takes_a_model(shared: Store, model: str, tmp_path: Path, capfd: Any) -> None:
    """Nothing is printed; a copy that is repeated copies nothing."""
    target = Store(tmp_path / "target")
    assert shared.copy_to(tmp_path / "target", "index/idx") == [
        "corpus/g0000",
        "embeddings/enc/g0000",
        "index/idx/g0000",
    ]
    assert shared.copy_to(str(tmp_path / "target"), "index/idx", verify=True) == []
    assert target.corpus()["p3"] == shared.corpus()["p3"]
    stored = target.import_model(Path(model), name="tiny")
    assert (stored.key, target.import_model(model, name="tiny").fingerprint) == ("models/tiny", stored.fingerprint)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(InputError, match=r"to=.*: it is the store itself"):
        shared.copy_to(shared.url)
    with pytest.raises(InputError, match=r"models/tiny was made otherwise: .*store\.remove\('models/tiny'\)"):
        target.import_model(save_tiny_bert(tmp_path / "other", seed=1), name="tiny")


def test_what_a_store_returns_shows_what_it_is(shared: Store) -> None:
    assert repr(shared.corpus()) == "Corpus(240 passages)"
    assert repr(shared.queries()) == "Queries('mine', splits=['test'])"
    assert repr(shared.embeddings()) == "Embeddings('enc', 240 vectors of 32)"
    assert repr(shared.build_bm25()) == "Bm25('bm25', 240 passages)"
    index = shared.build_index("enc", name="idx", factory="IVF4,PQ8x4fs", shards=3)
    assert repr(index) == "Index('idx', 'IVF4,PQ8x4fs', 240 vectors)"
    assert repr(index.generations[0]) == "Artifact('index/idx/g0000')"
