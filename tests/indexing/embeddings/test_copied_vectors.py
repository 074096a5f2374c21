"""Vectors of deleted passages are copied to later passages with the same text; only the other ones are encoded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runners import InlineRunner
from small_stores import extend_corpus
from tiny import add_masked_head, save_bert

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings import dense_embeddings
from riptide.indexing.embeddings.corpus_encoding import EncodeCorpusWork, numerics_of
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import find_encoder_spec
from riptide.indexing.embeddings.vector_kind import PartTexts
from riptide.indexing.sparse import csr_file
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.storage.cache import CorruptError, NodeCache
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import run_work
from riptide.indexing.work.worker_tasks import WorkerResources
from riptide.retriever.options import EncoderOptions

DENSE = EncoderOptions(dtype="float32", compile="never")
KINDS: dict[str, tuple[type[Embeddings] | type[SparseEmbeddings], EncoderOptions]] = {
    "dense": (Embeddings, DENSE),
    "sparse": (SparseEmbeddings, EncoderOptions(dtype="float32", pooling="splade")),
}
FIRST = [["w1 w2", "w3 w4 w5", "w6", "w1 w2"], ["w7 w8 w9", "w10", ""]]
# The rows 7 and 8 have the texts of the deleted rows 4 and 1, and row 10 that of row 0.
SECOND = [["w7 w8 w9", "w3 w4 w5", "w11"], ["w1 w2", "w6 w6", "", "w10"], ["w12", "w13"]]
DELETED = [0, 1, 3, 4, 6]
COPIED = {7: 4, 8: 1, 10: 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny masked language model, which makes vectors of both kinds."""
    return str(add_masked_head(save_bert(tmp_path_factory.mktemp("model"), spread=0.2)))


def make_work(
    store: Store, model: str, kind: str, *, limit: int | None = None, title: str = "space"
) -> EncodeCorpusWork:
    reader, options = KINDS[kind]
    spec = find_encoder_spec(store, model, None, EncoderOptions(**{**options.to_dict(), "title": title}))
    model_type = reader.kind.batched_model_type(spec.settings("passage"))
    numerics = numerics_of(InlineRunner(), spec.options, model_type, WorkerResources(), 1)
    return EncodeCorpusWork(store, spec, reader, "e", resources=WorkerResources(), numerics=numerics, limit=limit)


def encode(work: EncodeCorpusWork, store: Store, runner: InlineRunner | None = None) -> int:
    """Encodes the pending parts, and returns the number of passages that were encoded instead of copied."""
    done: list[Any] = []
    run_work(store, work, runner or InlineRunner(), observe=lambda unit, result: done.append(result))
    return sum(result.rows - result.copied for result in done)


def dense_vectors(vectors: Any) -> np.ndarray:
    return np.asarray(vectors if isinstance(vectors, np.ndarray) else vectors.dense())


@pytest.mark.parametrize("kind", KINDS)
def test_passages_with_the_text_of_a_deleted_one_get_its_vector(
    tmp_path: Path, model: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"))
    extend_corpus(tmp_path, FIRST)
    assert encode(make_work(store, model, kind), store) == 7
    extend_corpus(tmp_path, SECOND, DELETED)
    work = make_work(store, model, kind)
    assert work.max_copied_vectors() == len(DELETED)
    mapped: list[Path] = []
    read = csr_file.read_vectors
    monkeypatch.setattr(csr_file, "read_vectors", lambda path, *args: mapped.append(path) or read(path, *args))
    assert encode(work, store) == 9 - len(COPIED)
    assert len(mapped) == (2 if kind == "sparse" else 0), "an old part is checked once for all new parts"
    reader: EmbeddingsReader = KINDS[kind][0].open(store, "e", corpus := Corpus.open(store))
    rows, sources = (np.array(list(each)) for each in (COPIED, COPIED.values()))
    np.testing.assert_array_equal(dense_vectors(reader.take(rows)), dense_vectors(reader.take(sources)))
    fresh = reader.encoder().encode([passage.text for passage in corpus.passages(np.arange(7, 16))], side="passage")
    vectors = dense_vectors(reader.take(np.arange(7, 16)))
    np.testing.assert_allclose(vectors, dense_vectors(fresh), atol=2e-3)
    assert len(np.unique(vectors[[0, 1, 2, 3, 4, 6, 7, 8]], axis=0)) == 8, "the order of the texts shows in the vectors"
    parts = store.generations("embeddings", "e")[1].numbered_parts("part")
    assert [part.facts["cuts"]["texts"] for part in parts] == [3, 4, 2], "copied passages count as texts too"


def test_a_damaged_vector_is_not_copied(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"))
    extend_corpus(tmp_path, FIRST)
    encode(make_work(store, model, "dense"), store)
    extend_corpus(tmp_path, SECOND, DELETED)
    [path] = (tmp_path / "store/embeddings/e/g0000").glob("part-00001-*.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(dense_embeddings, "RANGE_SHARE", 1.0)
    monkeypatch.setattr(NodeCache, "has_file", lambda *args: False)  # as of a remote store
    with pytest.raises(CorruptError, match="g0000/part-00001"):
        encode(make_work(store, model, "dense"), store)


@pytest.mark.parametrize(
    ("encoded", "copied", "message"),
    [
        (1e5, 1.0, r"u/f: the vector of passage 12 does not fit float16 \(largest 1e\+05\); normalise it"),
        (1.0, np.inf, "u/f: the vector of passage 11, copied from a deleted passage with its text, is not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_vectors_that_are_not_finite_are_refused(tmp_path: Path, encoded: float, copied: float, message: str) -> None:
    new, old = np.ones((2, 4), np.float32), np.ones((2, 4), np.float16)
    new[1], old[0] = encoded, copied
    encoder = SimpleNamespace(dim=4, forward=lambda tokens: new)
    part = SimpleNamespace(artifact=SimpleNamespace(url="u"), part=SimpleNamespace(file="f"), first_row=10)
    with ThreadPoolExecutor(1) as thread:
        values: Any = (encoder, None, np.array([0, 2]), {}, part, thread, np.array([1, 3]), old)
        texts = PartTexts(*values)
        with pytest.raises(InputError, match=message):
            Embeddings.kind.write(texts, tmp_path / "f.npy")


def test_a_killed_encoding_copies_the_same_vectors(tmp_path: Path, model: str) -> None:
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        extend_corpus(folder, FIRST)
        store = Store(str(folder / "store"))
        encode(make_work(store, model, "dense"), store)
        extend_corpus(folder, SECOND, DELETED)
    killed, whole = (Store(str(folder / "store")) for folder in folders)
    for number in range(2):
        runner = InlineRunner(fail_after=number, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            encode(make_work(killed, model, "dense"), killed, runner)
        assert (folders[0] / "store/embeddings/e/g0001/copies.json").exists(), "the same vectors for every attempt"
    for store in (killed, whole):
        encode(make_work(store, model, "dense"), store)
    manifests = [(folder / "store/embeddings/e/g0001/manifest.json").read_bytes() for folder in folders]
    assert manifests[0] == manifests[1]


def test_copies_respect_the_limit_and_the_titles(tmp_path: Path, model: str) -> None:
    store = Store(str(tmp_path / "store"))
    extend_corpus(tmp_path, FIRST, titles=True)
    encode(make_work(store, model, "dense", limit=9), store)
    extend_corpus(tmp_path, [["w7 w8 w9", "w6 w4 w5", "w1 w2"], ["w1 w2"]], DELETED, titles=True)
    counts = [
        make_work(store, model, "dense", limit=limit, title=title).copies.find(1).shape[1]
        for limit, title in ((9, "space"), (10, "space"), (10, "none"))
    ]
    assert counts == [1, 2, 3], "rows beyond the limit get no vectors; without titles, row 8 has the text of row 1"


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_sync_encodes_changed_passages_alone(
    place: str,
    tmp_path: Path,
    model: str,
    call_job: Callable[..., int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = str(tmp_path / "store") if place == "local" else f"{request.getfixturevalue('bucket')}/store"
    texts = [" ".join(f"w{10 * number + word}" for word in range(8)) for number in range(12)]

    def run(store: str, documents: dict[str, str], *more: str) -> str:
        lines = [f'{{"_id": "{id}", "title": "", "text": "{text}"}}\n' for id, text in documents.items()]
        (tmp_path / "corpus.jsonl").write_text("".join(lines))
        source = ("--source", tmp_path / "corpus.jsonl", "--split-words", 3, "--part-size", 5)
        assert call_job("import_corpus", "--store", store, *source, *more) == 0
        monkeypatch.setenv("RIPTIDE_CACHE", str(tmp_path / f"cache-{len(more)}"))
        command = ("encode_corpus", "--store", store, "--encoder", model, "--name", "e", "--dtype", "float32")
        capsys.readouterr()
        if more:
            assert call_job(*command, "--compile", "never", "--plan") == 0
        assert call_job(*command, "--compile", "never") == 0
        return capsys.readouterr().out

    documents = {f"d{number}": text for number, text in enumerate(texts)}
    assert "copie" not in run(url, documents)
    moved = {f"{'moved-' * (number % 3 == 0)}{id}": text for number, (id, text) in enumerate(documents.items())}
    moved["d1"] = moved["d1"].replace("w17", "w500")
    out = run(url, dict(sorted(moved.items())), "--sync")
    assert "copies   at most 15 vectors of deleted passages, to passages with the same text" in out
    assert "  14 vectors were copied from deleted passages with the same text" in out
    if place == "s3":
        return
    fresh = str(tmp_path / "fresh")
    run(fresh, moved)
    vectors_by_id = []
    for each in (url, fresh):
        embeddings = Embeddings.open(Store(each), "e", corpus := Corpus.open(Store(each)))
        rows = np.setdiff1d(np.arange(corpus.num_rows), corpus.deleted)
        vectors_by_id.append(dict(zip(corpus.ids(rows).tolist(), embeddings.take(rows).tolist(), strict=True)))
    assert vectors_by_id[0].keys() == vectors_by_id[1].keys()
    np.testing.assert_allclose(
        [vectors_by_id[0][id] for id in vectors_by_id[1]], list(vectors_by_id[1].values()), atol=2e-3
    )
