"""Training of sparse vectors: the loss against a slow reference, on chunks and workers, and the saved models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases
from sentence_transformers import SparseEncoder as Peer
from tiny import add_masked_head, save_bert
from training_cases import CPU, ENCODER, dual_system, gradients
from two_workers import TwoWorkers

from riptide.base.errors import DivergedError, InputError
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.objectives.flops_term import FlopsOptions, mean_words
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import batch_at

FLOPS = FlopsOptions(queries=0.3, passages=0.2, warm_up=3)
NONE = FlopsOptions(queries=0.0, passages=0.0, warm_up=3)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_masked_head(save_bert(tmp_path_factory.mktemp("masked")), spread=0.2)


def slow_loss(system: DualEncoderSystem, step: int) -> float:
    """Returns the contrastive loss and the regulariser of a batch, computed text by text in float64."""
    data = system.data
    assert data is not None
    queries, rows = batch_at(data, system.tuning, step)
    passages = np.unique(rows)
    encoded = {
        "query": system.encode([data.queries[query] for query in queries], "query").astype(np.float64),
        "passage": system.encode_passages(passages).astype(np.float64),
    }
    loss = 0.0
    for place, query in enumerate(queries):
        scores = encoded["passage"] @ encoded["query"][place]
        positive = rows[place][0]
        others = [
            score
            for row, score in zip(passages, scores, strict=True)
            if row == positive or row not in data.relevant_rows(query)
        ]
        loss += (np.logaddexp.reduce(others) - scores[passages.tolist().index(positive)]) / len(queries)
    options = system.tuning.term_options(FlopsOptions)
    assert options is not None
    ramp = min(1.0, (step + 1) / options.warm_up) ** 2
    for weight, vectors in ((options.queries, encoded["query"]), (options.passages, encoded["passage"])):
        loss += ramp * weight * sum((sum(column) / len(column)) ** 2 for column in vectors.T.tolist())
    return loss


@pytest.mark.parametrize("step", [0, 2, 5])
def test_the_loss_is_that_of_the_equations(bert: Path, step: int) -> None:
    system = dual_system(bert, dropout=0.0, chunk=100, method="finetune", terms=(FLOPS,))
    expected = slow_loss(system, step)
    assert gradients(system, step)["loss"] == pytest.approx(expected, rel=1e-5)
    assert gradients(dual_system(bert, dropout=0.0, method="finetune", terms=(NONE,)), step)["loss"] < expected - 0.01


@pytest.mark.parametrize("step", [0, 5])
def test_the_loss_of_queries_against_stored_vectors_is_that_of_the_equations(bert: Path, step: int) -> None:
    """FLOPS of the queries alone; the vectors of passages are those that are stored."""
    tuning: dict[str, Any] = {"sides": "query", "terms": (replace(FLOPS, passages=0.0),)}
    system = dual_system(bert, dropout=0.0, chunk=100, **tuning)
    expected = slow_loss(system, step)
    for choice in ("off", "on"):
        result = gradients(system, step, grad_cache=choice)
        assert result["loss"] == pytest.approx(expected, rel=1e-5)
        assert bool(result["prompts.query.embedding"].abs().max() > 0)
    plain = gradients(dual_system(bert, dropout=0.0, sides="query", terms=(NONE,)), step)
    assert plain["loss"] < expected - 0.001


SYNTHESISED: dict[str, Any] = {
    "method": "finetune",
    "sides": "untied",
    "parametrisation": "synthesised",
    "synthesis": SynthesisOptions(prompts=3, length=4, hidden=6, bottleneck=5, temperature=0.2),
}


@pytest.mark.parametrize("tuning", [{"method": "finetune"}, {"learn_temperature": True}, SYNTHESISED])
def test_chunks_and_gradcache_give_the_gradient_of_the_whole_batch(bert: Path, tuning: dict[str, Any]) -> None:
    """The batch mean is that of the whole batch, and a learned temperature does not scale the regularised vectors."""
    tuning = {**tuning, "terms": (FLOPS,)}
    whole = gradients(dual_system(bert, dropout=0.0, **tuning), 5)
    for choice in ("off", "on"):
        cut = gradients(dual_system(bert, dropout=0.0, chunk=60, **tuning), 5, grad_cache=choice)
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        for name in whole.keys() - {"loss"}:
            torch.testing.assert_close(cut[name], whole[name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("loss", ["contrastive", "kl", "margin-mse"])
def test_the_regularisers_gradient_equals_finite_differences(bert: Path, loss: str) -> None:
    """Of the whole loss, by the bias of the head, which every text shares."""

    def compute(shift: float) -> dict[str, Any]:
        system = dual_system(bert, dropout=0.0, method="finetune", loss=loss, terms=(FLOPS,))
        with torch.no_grad():
            system.pooled.model_to_save.cls.predictions.bias[40:60] += shift
        return gradients(system, 5)

    name = next(name for name in compute(0.0) if name.endswith("predictions.bias"))
    expected = (compute(5e-3)["loss"] - compute(-5e-3)["loss"]) / 1e-2
    assert float(compute(0.0)[name][40:60].sum()) == pytest.approx(expected, rel=0.02, abs=1e-3)


@pytest.mark.parametrize("tuning", [{}, {"method": "finetune", "loss": "margin-mse"}, {"sides": "query"}])
def test_two_workers_train_the_weights_of_one(two_workers: TwoWorkers, bert: Path, tuning: dict[str, Any]) -> None:
    tuning = {**tuning, "terms": (replace(FLOPS, passages=0.0) if "sides" in tuning else FLOPS,)}
    expected = cases.steps_and_state(bert, tuning)
    expected = {name: value for name, value in expected.items() if not name.endswith("key.bias")}  # only rounding
    for actual in two_workers.run(cases.four_steps, bert, tuning):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(actual[name], expected[name], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_trains_the_weights_of_torch(two_deepspeed_workers: TwoWorkers, bert: Path, stage: int) -> None:
    """Four steps, the last one from a state that was loaded; the head shares parameters with the backbone."""
    method: Any = "prompt" if stage < 2 else "finetune"
    system = dual_system(bert, dropout=0.0, method=method, terms=(FLOPS,))
    trainer = Trainer(system, LoopOptions(steps=6, lr=1e-2), device=CPU, dtype=torch.float32)
    losses = [trainer.step(number) for number in range(4)]
    expected = trainer.stepper.state()
    tuning = {"terms": (FLOPS,)}
    for actual in two_deepspeed_workers.run(cases.resumed_steps, bert, method, stage, tuning):
        assert actual["loss"] == pytest.approx(losses[-1], rel=1e-3)
        for name in [name for name in expected if not name.endswith("key.bias")]:  # only rounding
            torch.testing.assert_close(actual[name], expected[name], atol=1e-3, rtol=1e-2)


def test_sharded_weights_are_used_and_saved_whole(two_deepspeed_workers: TwoWorkers, tmp_path: Path) -> None:
    """The head's largest weights are those of the backbone's word embeddings."""
    large = add_masked_head(save_bert(tmp_path / "large", hidden=256), spread=0.1)  # DeepSpeed shards these weights
    out = tmp_path / "out"
    out.mkdir()
    results = two_deepspeed_workers.run(cases.sharded_weights, large, out, {"terms": (FLOPS,)})
    encoder = SparseEncoder(str(out), EncoderOptions(dtype="float32"))
    expected = encoder.encode(cases.LONG_AND_SHORT, side="passage").dense()
    assert 0 < np.count_nonzero(expected) < expected.size
    for vectors, first in results:
        np.testing.assert_allclose(vectors, expected, atol=1e-4)
        np.testing.assert_allclose(first, expected[:1], atol=1e-4)


def test_the_regulariser_leaves_fewer_words(bert: Path) -> None:
    words = {}
    for options in (NONE, FlopsOptions(queries=0.3, passages=0.3, warm_up=5)):
        system = dual_system(bert, dropout=0.0, method="finetune", terms=(options,))
        trainer = Trainer(system, LoopOptions(steps=20, lr=2e-3), device=CPU, dtype=torch.float32)
        for number in range(20):
            trainer.step(number)
        words[options.queries] = mean_words(torch.from_numpy(system.encode(cases.make_data().queries, "query")))
    assert 1 < words[0.3] < 0.7 * words[0.0]


def test_vectors_without_words_end_the_run(bert: Path) -> None:
    system = dual_system(bert, method="finetune", terms=(FLOPS,))
    with torch.no_grad():
        system.pooled.model_to_save.cls.predictions.bias -= 100
    with pytest.raises(DivergedError) as raised:
        Trainer(system, LoopOptions(steps=9, lr=1e-3), device=CPU, dtype=torch.float32).step(4)
    assert str(raised.value) == (
        "step 5: the sparse vectors of the query side have 0.00 non-zero words on average, expected at least 1: give a "
        "smaller parameter flops_queries than 0.3, or a smaller lr, under another name"
    )


@pytest.mark.parametrize(
    "tuning", [{"method": "finetune"}, {"method": "finetune", "sides": "untied"}, {"method": "lora"}]
)
def test_trained_models_open_in_sentence_transformers(bert: Path, tmp_path: Path, tuning: dict[str, Any]) -> None:
    system = dual_system(bert, chunk=200, terms=(FLOPS,), **tuning)
    trainer = Trainer(system, LoopOptions(steps=3, lr=1e-2), device=CPU, dtype=torch.float32)
    system.module.train()
    for number in range(3):
        trainer.step(number)
    system.module.eval()
    system.save(tmp_path)
    texts = cases.make_data().queries[:5]
    for side in ("query", "passage"):
        folder = tmp_path / side if "sides" in tuning else tmp_path
        peer = Peer(str(folder), device="cpu", local_files_only=True)
        encode = peer.encode_query if side == "query" else peer.encode_document
        expected = system.encode(texts, side)  # type: ignore[arg-type]
        np.testing.assert_allclose(encode(texts, convert_to_sparse_tensor=False).numpy(), expected, atol=1e-5)
        ours = SparseEncoder(str(folder), EncoderOptions(dtype="float32")).encode(texts, side=side)  # type: ignore[arg-type]
        np.testing.assert_allclose(ours.dense(), expected, atol=1e-5)


def test_a_trained_prompt_is_served_by_a_sparse_encoder(bert: Path) -> None:
    system = dual_system(bert, chunk=200, terms=(FLOPS,))
    trainer = Trainer(system, LoopOptions(steps=3, lr=1e-2), device=CPU, dtype=torch.float32)
    for number in range(3):
        trainer.step(number)
    prompt, texts = system.prompt(), cases.make_data().queries[:5]
    encoder = SparseEncoder(str(bert), prompt.options, tasks={"t": prompt})
    actual = encoder.encode(texts, task="t").dense()
    np.testing.assert_allclose(actual, system.encode(texts, "query"), atol=1e-4)
    assert np.abs(actual - encoder.encode(texts).dense()).max() > 1e-3


def test_options_that_do_not_fit_are_refused(bert: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"flops_passages 0\.2: expected 0 with parameter sides query, as vectors of passages are stored",
    ):
        TuneOptions(sides="query", terms=(FLOPS,))
    for encoder, options, message in (
        (ENCODER, (FLOPS,), "flops_queries 0.3 and parameter flops_passages 0.2: expected no weights of the FLOPS"),
        (EncoderOptions(pooling="splade"), (), "pooling splade: found no weights of the FLOPS regulariser, expected"),
    ):
        with pytest.raises(InputError, match=message):
            DualEncoderSystem(bert, encoder, TuneOptions(terms=options), None, device=CPU, dtype=torch.float32)
