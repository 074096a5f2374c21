"""Training files for other programs, read by the readers of those programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import VOCABULARY, save_bert

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.exact import Hits
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.mining import exports, sampling
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining.exports import ExportResult, export_sentence_transformers, export_tevatron
from riptide.indexing.mining.sampling import NegativeOptions
from riptide.indexing.store.store import Store

PASSAGES = 40
QUESTIONS = {f"q{number}": f'w{number} "what"\n\u2028é 語?' for number in range(6)}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Passages of words that the tiny model knows; every third one has no title."""
    titles = ["" if row % 3 == 0 else f"w{row} title" for row in range(PASSAGES)]
    texts = [f'w{row} w{(7 * row) % VOCABULARY}\n"é" \\ 語' for row in range(PASSAGES)]
    store = Store(str(tmp_path / "store"))
    with store.create("corpus", "g0000", config={"limit": None}) as draft:
        for part, (start, end) in enumerate(((0, 25), (25, PASSAGES))):
            ids = [f"doc-{row}" for row in range(start, end)]
            table = pa.table([ids, titles[start:end], texts[start:end], [""] * len(ids)], schema=CORPUS_SCHEMA)
            draft.commit(f"part-{part:05d}", ".arrow", lambda path, t=table: write_table(t, path), rows=len(ids))
    return Corpus.open(store)


@pytest.fixture
def tables() -> list[pa.Table]:
    """Two parts: q0 and q5 with 4 negatives, q1 with 2, q2 without positives, q3 without negatives, q4 with 6."""
    found = {
        "q0": [4, 9, 30, 1],
        "q1": [39, 2],
        "q2": [5, 6, 7, 8],
        "q3": [],
        "q4": [9, 30, 1, 2, 3, 12],
        "q5": [0, 26, 27, 28],
    }
    positives = {"q0": [10], "q1": [11], "q2": [], "q3": [13], "q4": [14, 38, 15], "q5": [16]}
    parts = []
    for ids in (["q0", "q1", "q2"], ["q3", "q4", "q5"]):
        rows = np.full((3, 6), -1, np.int64)
        for number, id in enumerate(ids):
            rows[number, : len(found[id])] = found[id]
        answering = [np.array(positives[id], np.int64) for id in ids]
        pool = mining.pool_hits(
            ids, {"bm25": Hits(np.where(rows < 0, -np.inf, 1).astype(np.float32), rows)}, answering, 6
        )
        drawn = sampling.sample_negatives(
            pool,
            None,
            NegativeOptions(pool_negatives=6, denoised_negatives=0, denoise_threshold=0.1, seed=0),
            query_ids=ids,
            positives=answering,
        )
        assert [sorted(rows) for rows in drawn["negatives"].to_pylist()] == [sorted(found[id]) for id in ids]
        parts.append(drawn)
    return parts


def mined(tables: list[pa.Table]) -> dict[str, dict[str, Any]]:
    return {fields["query_id"]: fields for table in tables for fields in table.to_pylist()}


def load(kind: str, path: str, cache: Path) -> Any:
    from datasets import load_dataset

    return load_dataset(kind, data_files=path, split="train", cache_dir=str(cache))


@pytest.mark.parametrize("block", [1, 2, 128])
def test_tevatron_reads_its_lines(
    corpus: Corpus, tables: list[pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(exports, "BLOCK_QUERIES", block)
    path = str(tmp_path / "new" / "train.jsonl")
    assert export_tevatron(iter(tables), QUESTIONS, corpus, path) == ExportResult(4, ["q2", "q3"])
    expected = []
    for query_id, fields in mined(tables).items():
        positives, negatives = (
            [{"docid": p.id, "title": p.title, "text": p.text} for p in corpus.passages(fields[name])]
            for name in ("positives", "negatives")
        )
        if positives and negatives:
            expected.append(
                {
                    "query_id": query_id,
                    "query": QUESTIONS[query_id],
                    "positive_passages": positives,
                    "negative_passages": negatives,
                }
            )
    assert [json.loads(line) for line in Path(path).read_bytes().split(b"\n")[:-1]] == expected
    found = load("json", path, tmp_path / "cache")
    assert found.to_list() == expected
    for group in found:  # as Tevatron's TrainDataset takes them
        for passage in (group["positive_passages"][7 % len(group["positive_passages"])], *group["negative_passages"]):
            assert isinstance(passage["title"] + " " + passage["text"], str)
    assert [file.name for file in Path(path).parent.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(("negatives", "left_out"), [(2, ["q2", "q3"]), (4, ["q1", "q2", "q3"])])
@pytest.mark.parametrize("block", [1, 128])
def test_sentence_transformers_rows(
    corpus: Corpus,
    tables: list[pa.Table],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    negatives: int,
    left_out: list[str],
    block: int,
) -> None:
    monkeypatch.setattr(exports, "BLOCK_QUERIES", block)
    path = str(tmp_path / "train.parquet")
    expected = []
    for query_id, fields in mined(tables).items():
        if query_id not in left_out:
            for positive in fields["positives"]:
                rows = corpus.passages([positive, *fields["negatives"][:negatives]])
                texts = [f"{p.title} {p.text}" if p.title else p.text for p in rows]
                names = ["positive", *(f"negative_{n}" for n in range(1, negatives + 1))]
                expected.append({"query": QUESTIONS[query_id], **dict(zip(names, texts, strict=True))})
    exported = export_sentence_transformers(iter(tables), QUESTIONS, corpus, path, num_negatives=negatives)
    assert exported == ExportResult(len(expected), left_out)
    found = load("parquet", path, tmp_path / "cache")
    assert found.to_list() == expected
    assert found.column_names == list(expected[0])
    assert {str(field.type) for field in pq.read_schema(path)} == {"string"}


def test_sentence_transformers_trains_on_the_columns(corpus: Corpus, tables: list[pa.Table], tmp_path: Path) -> None:
    """The collator and loss accept the data; the loss equals one from the texts' vectors, and weights change."""
    import torch
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    path = str(tmp_path / "train.parquet")
    export_sentence_transformers(tables, QUESTIONS, corpus, path, num_negatives=4)
    data = load("parquet", path, tmp_path / "cache")
    model = SentenceTransformer(str(save_bert(tmp_path / "model")), device="cpu").eval()
    loss = MultipleNegativesRankingLoss(model)
    batch = SentenceTransformerDataCollator(model.preprocess)([data[row] for row in range(len(data))])
    features, labels = SentenceTransformerTrainer.collect_features(None, batch)
    assert len(features) == 6  # query, positive, four negatives
    with torch.no_grad():
        vectors = {name: model.encode(list(data[name]), convert_to_tensor=True) for name in data.column_names}
        unit = {name: torch.nn.functional.normalize(each) for name, each in vectors.items()}
        passages = torch.cat([unit[name] for name in data.column_names[1:]])
        by_hand = torch.nn.functional.cross_entropy(20 * unit["query"] @ passages.T, torch.arange(len(data)))
    torch.testing.assert_close(loss(features, labels), by_hand, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss(features, labels).backward()
        optimizer.step()
    assert loss(features, labels).item() < by_hand.item() - 0.01


def test_what_cannot_be_exported_leaves_no_file(corpus: Corpus, tables: list[pa.Table], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "train"
    some = {id: text for id, text in QUESTIONS.items() if id != "q4"}
    with pytest.raises(InputError, match="the question 'q4' has negatives but no text"):
        export_tevatron(tables, some, corpus, str(path))
    with pytest.raises(InputError, match="the question 'q4' has negatives but no text"):
        export_sentence_transformers(tables, some, corpus, str(path), num_negatives=2)
    with pytest.raises(
        InputError, match=r"none of 6 queries has a positive and 7 negatives, the most that one has is 6"
    ):
        export_sentence_transformers(tables, QUESTIONS, corpus, str(path), num_negatives=7)
    with pytest.raises(InputError, match="0 negatives in a row: expected at least 1"):
        export_sentence_transformers(tables, QUESTIONS, corpus, str(path), num_negatives=0)
    with pytest.raises(InputError, match="none of 1 queries has a positive and a negative"):
        export_tevatron([tables[0].slice(2)], QUESTIONS, corpus, str(path))
    with pytest.raises(InputError, match="this is a folder"):
        export_tevatron(tables, QUESTIONS, corpus, str(tmp_path))
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(
    corpus: Corpus, tables: list[pa.Table], tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("old")

    def broken() -> Any:
        yield tables[0]
        assert path.read_text() == "old"
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="the store is gone"):
        export_tevatron(broken(), QUESTIONS, corpus, str(path))
    with pytest.raises(OSError, match="the store is gone"):
        export_sentence_transformers(broken(), QUESTIONS, corpus, str(path), num_negatives=2)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.glob("*train*")] == ["train.jsonl"]
