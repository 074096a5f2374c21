"""Sparse embeddings: the encoder's vectors, resumed to the same bytes, grown with the corpus; readers of the others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import files_of, make_passages, write_beir

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.drift import canaries_of, measure_drift
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.sparse import sparse_embeddings as sparse
from riptide.indexing.sparse.sparse_embeddings import SPARSE, SparseEmbeddings
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.options import EncoderOptions

Done = Callable[..., str]


def opened(path: Path) -> SparseEmbeddings:
    store = Store(str(path))
    return SparseEmbeddings.open(store, "sparse", Corpus.open(store))


def test_vectors_are_those_of_the_encoder(world, masked: Path, encode, done: Done) -> None:
    assert "writes   240 sparse vectors, 8 bytes a word, at most 20 of a passage" in done(
        *encode("--passage-terms", 20, "--plan")
    )
    out = done(*encode("--passage-terms", 20))
    assert "embeddings/sparse/g0000: 240 sparse vectors over 297 words, " in out
    made = opened(world.store)
    options = EncoderOptions(pooling="splade", dtype="float32", passage_terms=20)
    encoder = SparseEncoder(str(masked), options, threads=2)
    for part in made.parts:
        rows = world.passages[part.first_row : part.end]
        texts = encoder.compose([row["title"] for row in rows], [row["text"] for row in rows])
        np.testing.assert_array_equal(made.vectors(part).dense(), encoder.encode(texts, side="passage").dense())
        assert made.vectors(part).counts.max() == 20
    everything = np.concatenate([made.vectors(part).dense() for part in made.parts])
    rows = np.array([200, 3, 61, 61, 0, 239])
    np.testing.assert_array_equal(made.take(rows).dense(), everything[rows])
    pieces = list(made.read_range(50, 130))
    assert [(first, len(vectors)) for first, vectors in pieces] == [(50, 10), (60, 60), (120, 10)]
    np.testing.assert_array_equal(np.concatenate([vectors.dense() for _, vectors in pieces]), everything[50:130])
    assert (made.dim, made.similarity, made.encoder_options["passage_terms"]) == (297, "dot", 20)
    assert made.config["encoder"] == encoder.config
    assert made.config["numerics"] == encoder.numerics
    assert not [finding for finding in verify(Store(str(world.store))) if finding.problem]
    canaries = canaries_of(made, Corpus.open(Store(str(world.store))))
    assert (measure_drift(canaries, encoder.dense, SPARSE).similarity > 0.9999, len(canaries)) == (True, 8)


def test_vectors_of_too_many_words_are_warned_of(world, encode, done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after the first part, and not for vectors that are cut."""
    monkeypatch.setattr(sparse, "MAX_WORDS", 50)
    lines = [line for line in done(*encode()).splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    [words] = re.findall(r"the first part have (\d+) words on average, \d+\.\d kB in all", lines[0])
    embeddings = opened(world.store)
    counts = embeddings.vectors(embeddings.parts[0]).counts
    assert abs(int(words) - counts.mean()) < 5
    assert "give --passage-terms N under another --name" in lines[0]
    assert "warning" not in done(*encode("--name", "cut", "--passage-terms", 40))


def test_an_interrupted_encoding_is_resumed_to_the_same_bytes(world, encode, done: Done, interrupt) -> None:
    done(*encode())
    before = files_of(world.store)
    shutil.rmtree(world.store / "embeddings/sparse")
    interrupt(2, *encode())
    assert re.search(r"240 passages \((60|120|180) kept\)", done(*encode()))  # two parts are in progress at a time
    assert files_of(world.store) == before


def test_a_grown_corpus_gets_the_bytes_of_new_parts_only(world, encode, done: Done, tmp_path: Path) -> None:
    done(*encode())
    before = files_of(world.store / "embeddings/sparse")
    source = write_beir(tmp_path / "more", make_passages(24, seed=11, prefix="n"))
    done("import_corpus", "--store", world.store, "--source", source, "--append")
    with pytest.raises(InputError, match="embeddings/sparse covers 240 of the corpus' 264 passages"):
        opened(world.store)
    assert "264 passages (240 kept)" in done(*encode())
    after = files_of(world.store / "embeddings/sparse")
    assert before.items() <= after.items()
    assert len(opened(world.store).generations) == 2
    assert opened(world.store).num_rows == 264


def test_readers_of_one_kind_refuse_the_other(
    world, encode, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    done(*encode())
    store = Store(str(world.store))
    corpus = Corpus.open(store)
    with pytest.raises(InputError, match="embeddings/enc: holds dense vectors, expected sparse ones: encode the"):
        SparseEmbeddings.open(store, "enc", corpus)
    with pytest.raises(InputError, match="embeddings/sparse: holds sparse vectors, expected dense ones: give"):
        Embeddings.open(store, "sparse", corpus)
    line = refused("search", "--store", world.store, "--mode", "exact", "--embeddings", "sparse")
    assert "embeddings/sparse: holds sparse vectors, expected dense ones" in line
    documented("Searching", "exact search in sparse embeddings", line, 1)
    line = refused(*encode("--name", "enc"))
    assert "was made otherwise: --encoder " in line
