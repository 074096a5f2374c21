"""Training of one encoder for each side, and of queries against stored vectors of passages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny import save_bert
from training_cases import CPU, ENCODER, LONG_AND_SHORT, dual_system, gradients, make_data

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.dev import DevSet
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters
from riptide.retriever.training.training_data import batch_at


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def query_system(bert: Path, stored: np.ndarray, method: str = "prompt") -> DualEncoderSystem:
    """A system that trains queries only, against the stored vectors of the passages of `make_data`."""
    options = TuneOptions(method=method, sides="query", length=4, batch=12, negatives_per_query=2)  # type: ignore[arg-type]
    return DualEncoderSystem(
        bert, ENCODER, options, make_data(), device=CPU, dtype=torch.float32, vectors=stored.__getitem__
    )


def test_untied_fine_tuning_trains_and_saves_two_encoders(bert: Path, tmp_path: Path) -> None:
    """Both start from the backbone. Each folder gives the vectors of its side in other libraries too."""
    system = dual_system(bert, dropout=0.0, method="finetune", sides="untied")
    start = Encoder(str(bert), ENCODER)
    for side in ("query", "passage"):
        expected = start.encode(LONG_AND_SHORT, side=side)
        np.testing.assert_allclose(system.encode(LONG_AND_SHORT, side), expected, atol=1e-5)
    trainer = Trainer(system, LoopOptions(steps=3, lr=1e-2, warm_up=0.0), device=CPU, dtype=torch.float32)
    for step in range(3):
        trainer.step(step)
    system.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["passage", "query"]
    vectors = {}
    for side in ("query", "passage"):
        vectors[side] = system.encode(LONG_AND_SHORT, side)
        folder = str(tmp_path / side)
        np.testing.assert_allclose(Encoder(folder, ENCODER).encode(LONG_AND_SHORT, side=side), vectors[side], atol=1e-5)
        peer = SentenceTransformer(folder, device="cpu", local_files_only=True)
        np.testing.assert_allclose(peer.encode(LONG_AND_SHORT[1::2]), vectors[side][1::2], atol=1e-5)
    assert np.abs(vectors["query"] - vectors["passage"]).max() > 1e-3
    with pytest.raises(InputError, match=r"holds an encoder of each side in query/ and passage/, expected one encoder"):
        Encoder(str(tmp_path))


def test_untied_encoders_get_the_gradients_of_their_own_texts(bert: Path) -> None:
    """Before the first step both have the same weights, so that their gradients add up to those of the tied encoder."""
    tied = gradients(dual_system(bert, dropout=0.0, method="finetune"))
    untied = gradients(dual_system(bert, dropout=0.0, method="finetune", sides="untied"), grad_cache="on")
    assert untied["loss"] == pytest.approx(tied["loss"], abs=1e-5)
    assert len(untied) == 2 * len(tied) - 1
    for name in tied.keys() - {"loss"}:
        total = untied[name] + untied[f"passage.{name}"]
        torch.testing.assert_close(total, tied[name], atol=1e-5, rtol=1e-3)


def test_tied_systems_have_the_parameters_that_their_checkpoints_name(bert: Path) -> None:
    for method, prefix in (("finetune", "backbone.backbone."), ("prompt", "prompts.both.")):
        names = trained_parameters(dual_system(bert, method=method).module)
        assert all(name.startswith(prefix) for name in names)


@pytest.mark.parametrize("method", ["prompt", "finetune"])
@pytest.mark.parametrize("grad_cache", ["on", "off"])
def test_passages_of_a_step_are_the_stored_vectors(bert: Path, method: str, grad_cache: str) -> None:
    """The loss gets their bytes, queries alone get gradients, and no passage is encoded."""
    stored = np.random.default_rng(0).normal(size=(60, 32)).astype(np.float16)
    system = query_system(bert, stored, method)
    loss, chunks, seen = system.loss, system.chunks, []

    def record(outputs: Mapping[str, torch.Tensor], batch: Any) -> torch.Tensor:
        seen.append((outputs["dense"].detach().numpy().copy(), batch))
        return loss(outputs, batch)

    def of_queries(texts: Any, side: str, rows: np.ndarray, numbers: None) -> Any:
        assert side == "query"
        return chunks(texts, "query", rows)

    system.loss, system.chunks = record, of_queries  # type: ignore[method-assign]
    result = gradients(system, step=3, grad_cache=grad_cache)
    [(vectors, batch)] = seen
    num_queries = batch.arguments["queries"]
    found = {row.tobytes() for row in vectors[num_queries:]}
    assert found <= {row.tobytes() for row in stored.astype(np.float32)}
    assert len(found) == batch.outputs["dense"].rows - num_queries > 24
    assert system.data is not None
    positives = vectors[num_queries + batch.arguments["positives"].numpy()]
    rows = [int(np.flatnonzero((stored.astype(np.float32) == row).all(axis=1))[0]) for row in positives]
    assert all(any(row in own for own in system.data.positives) for row in rows)
    assert any(bool(value.abs().max() > 0) for name, value in result.items() if name != "loss")


def test_workers_share_the_stored_vectors_of_a_step(bert: Path) -> None:
    stored = np.random.default_rng(0).normal(size=(60, 32)).astype(np.float16)
    system = query_system(bert, stored)
    [*_, whole] = system.batch(2, 0, 1).chunks
    shares = [system.batch(2, rank, 3).chunks[-1] for rank in range(3)]
    assert sorted(np.concatenate([share.rows["dense"] for share in shares])) == whole.rows["dense"].tolist()
    expected = dict(zip(whole.rows["dense"].tolist(), whole.inputs, strict=True))
    for share in shares:
        for row, vector in zip(share.rows["dense"].tolist(), share.inputs, strict=True):
            assert torch.equal(vector, expected[row])


def test_the_dev_split_is_searched_in_stored_vectors(bert: Path) -> None:
    data = make_data()
    rows = np.arange(10, 40)
    positives = [np.array([place]) for place in range(30)]
    queries = data.queries[20:80:2]
    plain = DualEncoderSystem(bert, ENCODER, TuneOptions(length=4), None, device=CPU, dtype=torch.float32)
    encoded = plain.encode(queries, "query")
    stored = np.zeros((60, 32), np.float16)
    stored[rows] = encoded
    system = query_system(bert, stored, "finetune")  # not trained: the backbone's own vectors
    assert DevSet(queries, positives, [], system.encode_passages(rows)).mrr(system) == 1.0
    stored[rows] = np.roll(encoded, 1, axis=0)
    assert DevSet(queries, positives, [], system.encode_passages(rows)).mrr(system) < 1.0


def test_queries_are_not_trained_without_stored_vectors(bert: Path) -> None:
    options = TuneOptions(sides="query", length=4)
    with pytest.raises(InputError, match="expected stored vectors of the passages"):
        DualEncoderSystem(bert, ENCODER, options, make_data(), device=CPU, dtype=torch.float32)
    DualEncoderSystem(bert, replace(ENCODER), options, None, device=CPU, dtype=torch.float32)  # opened, and not trained


def test_own_negatives_are_those_that_were_drawn_for_a_query(bert: Path) -> None:
    """The loss of a batch, computed query by query in float64; other passages of the batch do not count."""
    system = dual_system(bert, dropout=0.0, negatives_from="own", chunk=200)
    data = system.data
    assert data is not None
    queries, rows = batch_at(data, system.tuning, 2)
    total = 0.0
    for query, group in zip(queries, rows, strict=True):
        [vector] = system.encode([data.queries[query]], "query").astype(np.float64)
        scores = system.encode(system.compose(group), "passage").astype(np.float64) @ vector
        assert not np.isin(group[1:], data.relevant_rows(query)).any()
        total += float(np.logaddexp.reduce(scores) - scores[0]) / len(queries)
    assert gradients(system, step=2, grad_cache="on")["loss"] == pytest.approx(total, rel=1e-5)
    for change in ({"negatives_per_query": 0}, {"loss": "symmetric"}, {"loss": "kl"}):
        with pytest.raises(InputError, match=r"parameter negatives_from own.*: expected "):
            TuneOptions(negatives_from="own", **change)  # type: ignore[arg-type]
    TuneOptions(negatives_from="own", loss="kl", contrastive_weight=0.1)
