"""Training a re-ranker: batches, gradients against plain torch, resumed runs, and what the model learns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reranker_cases import (
    SMALL,
    cross_system,
    make_pairs,
    texts_of,
    trained_state,
    trainer_of,
)
from safetensors import safe_open
from sentence_transformers import CrossEncoder
from tiny import save_bert
from training_cases import Checkpoints
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions
from riptide.retriever.forward import batching
from riptide.retriever.model.model_folder import describe_backbone
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.training.training_data import TrainingData, batch_at


def losses_of(checkpoints: Checkpoints) -> list[float]:
    return [report.loss for report in checkpoints.step_reports]


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    return save_bert(tmp_path / "backbone")


@pytest.fixture
def still(backbone: Path) -> Path:
    """The backbone without dropout, so that gradients can be compared."""
    file = backbone / "config.json"
    text = file.read_text()
    assert text.count('_dropout_prob": 0.1') == 2
    file.write_text(text.replace('_dropout_prob": 0.1', '_dropout_prob": 0.0'))
    return backbone


def weights(system: CrossSystem) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in system.module.named_parameters()}


def test_a_batch_is_a_function_of_the_step() -> None:
    """Ten queries in batches of four: five steps are two epochs, and each epoch has every query once."""
    data = make_pairs()
    steps = [batch_at(data, SMALL, step) for step in range(5)]
    queries = np.concatenate([queries for queries, _ in steps])
    assert sorted(queries[:10]) == sorted(queries[10:]) == list(range(10))
    assert list(queries[:10]) != list(queries[10:])
    again = batch_at(make_pairs(), SMALL, 3)
    np.testing.assert_array_equal(again[0], steps[3][0])
    np.testing.assert_array_equal(again[1], steps[3][1])
    for query, rows in zip(queries, np.concatenate([rows for _, rows in steps]), strict=True):
        assert rows[0] in data.positives[query]
        assert len({*rows[1:]} & {*data.negatives[query]}) == 3
    drawn = {tuple(sorted(rows)) for _, groups in steps for rows in groups}
    assert len(drawn) > 14, "the second epoch draws other negatives"
    other = replace(SMALL, seed=6)
    assert any((batch_at(data, other, step)[0] != steps[step][0]).any() for step in range(2))


def test_missing_negatives_are_drawn_from_the_corpus() -> None:
    data = TrainingData(["w1"], [np.array([3, 4])], [np.array([9])], 6, texts_of)
    options = CrossEncoderOptions(batch=1, negatives_per_query=5)
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert rows[0] in (3, 4)
        assert rows[1] == 9
        assert not {*rows[2:]} - {0, 1, 2, 5}


def test_deleted_passages_are_never_drawn_as_negatives() -> None:
    options = CrossEncoderOptions(batch=1, negatives_per_query=5)
    queries, positives, negatives = ["w1"], [np.array([3, 4])], [np.array([9])]
    data = TrainingData(queries, positives, negatives, 8, texts_of, deleted=np.array([0, 5, 7]))
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert {*rows[2:]} <= {1, 2, 6}
        np.testing.assert_array_equal([rows], batch_at(data, options, step)[1])
    whole = TrainingData(queries, positives, negatives, 8, texts_of)
    far = TrainingData(queries, positives, negatives, 8, texts_of, deleted=np.array([8]))
    np.testing.assert_array_equal(batch_at(whole, options, 3)[1], batch_at(far, options, 3)[1])


def test_copies_of_positives_are_never_drawn_as_negatives() -> None:
    data = TrainingData(["w1"], [np.array([3])], [np.array([9])], 6, texts_of, copies=[np.array([0, 5])])
    options = CrossEncoderOptions(batch=1, negatives_per_query=5)
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert {*rows[2:]} <= {1, 2, 4}


def test_windows_use_all_negatives_before_one_comes_again() -> None:
    """As DPTDR's authors draw: one shuffled order per query, from which each epoch takes the next ones."""
    negatives = np.arange(20, 27)
    data = TrainingData(["w1", "w2"], [np.array([5, 2, 9])] * 2, [negatives] * 2, 40, texts_of)
    options = CrossEncoderOptions(batch=2, negatives_per_query=3)
    epochs = []
    for epoch in range(14):
        queries, rows = batch_at(data, options, epoch, draw_positive="first", draw_negatives="windows")
        assert rows[:, 0].tolist() == [5, 5]
        epochs.append(dict(zip(queries.tolist(), rows[:, 1:].tolist(), strict=True)))
    orders = []
    for query in range(2):
        drawn = [row for epoch in epochs for row in epoch[query]]
        assert sorted(drawn[:7]) == negatives.tolist()
        assert drawn == drawn[:7] * 6
        orders.append(drawn[:7])
    assert orders[0] != orders[1]
    few = TrainingData(["w1"], [np.array([5])], [np.array([20, 21])], 40, texts_of)
    [rows] = batch_at(few, CrossEncoderOptions(batch=1, negatives_per_query=3), 4, draw_negatives="windows")[1]
    assert {*rows[1:3]} == {20, 21}
    assert len(rows) == 4
    assert {row for step in range(30) for row in batch_at(data, options, step)[1][:, 0]} == {5, 2, 9}, "at random"


def test_the_learning_rate_rises_and_falls_linearly() -> None:
    rates = [LoopOptions(steps=100, lr=1.0).learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)
    assert LoopOptions(steps=1, lr=1.0).learning_rate(0) == 1.0


def test_the_pairs_of_a_query_stay_in_one_chunk(backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks hold one or two queries; the chunks of all workers hold each pair of the batch once."""
    system = cross_system(backbone)
    [whole] = system.batch(3, 0, 1).chunks
    monkeypatch.setitem(batching.BATCH_TOKENS, "cpu", 200)
    shares = [system.batch(3, rank, 2) for rank in range(2)]
    assert all(share.outputs == {} for share in shares)
    cut = [chunk for share in shares for chunk in share.chunks]
    assert len(cut) > 2

    def groups(chunks: Any) -> list[tuple]:
        rows = [
            [tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
            for ids, _, lengths in (chunk.inputs for chunk in chunks)
        ]
        return sorted(tuple(each[start : start + 4]) for each in rows for start in range(0, len(each), 4))

    assert groups(cut) == groups([whole])
    assert len(groups(cut)) == 4
    assert all(chunk.tokens == chunk.inputs[0].numel() <= max(200, 4 * 32) for chunk in cut)


@pytest.mark.parametrize("tokens", [4096, 200])
@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_a_step_equals_plain_torch(still: Path, loss: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk and in several, against one padded batch in transformers with torch's AdamW and clipping."""
    monkeypatch.setitem(batching.BATCH_TOKENS, "cpu", tokens)
    data = make_pairs()
    queries, rows = batch_at(data, SMALL, 0)
    system = cross_system(still, data, loss=loss)
    trainer = trainer_of(system, warm_up=0.0)
    assert (len(system.batch(0, 0, 1).chunks) > 1) == (tokens == 200)
    system.module.train()
    torch.manual_seed(SMALL.seed)
    model = AutoModelForSequenceClassification.from_pretrained(still, num_labels=1).train()
    tokenizer = AutoTokenizer.from_pretrained(still)
    titles, texts = texts_of(rows.ravel())
    passages = [f"{title} {text}" if title else text for title, text in zip(titles, texts, strict=True)]
    inputs = tokenizer(
        [data.queries[q] for q in queries for _ in range(4)],
        passages,
        truncation=True,
        max_length=32,
        padding=True,
        return_tensors="pt",
    )
    logits = model(**inputs).logits.view(4, 4)
    targets = torch.tensor([[1.0, 0, 0, 0]] * 4)
    expected = (
        torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
        if loss == "bce"
        else torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    )
    expected.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    trained = dict(system.module.named_parameters())
    assert trainer.step(0) == pytest.approx(float(expected.detach()), rel=1e-5)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3).step()
    # The first step of AdamW is lr * sign(gradient), which rounding decides if a gradient is nearly 0.
    for name, parameter in model.named_parameters():
        clear = gradients[name].abs() > 1e-5
        torch.testing.assert_close(trained[name].detach()[clear], parameter.detach()[clear], atol=1e-5, rtol=1e-4)
    assert sum(int((g.abs() > 1e-5).sum()) for g in gradients.values()) > 4000


@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_training_learns(backbone: Path, tmp_path: Path, loss: str) -> None:
    """Positives contain w500; the saved model ranks new passages with the word above those without it."""
    system = cross_system(
        backbone, make_pairs(answers=20, negatives=40), "bfloat16", batch=10, negatives_per_query=4, loss=loss
    )
    checkpoints = Checkpoints(tmp_path / "kept")
    trainer_of(system, steps=100, lr=3e-3).train(checkpoints.hooks())
    losses = losses_of(checkpoints)
    assert len(losses) == 100
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
    system.save(tmp_path / "model")
    of_attention = [
        json.loads((folder / "config.json").read_text())["attention_probs_dropout_prob"]
        for folder in (backbone, tmp_path / "model")
    ]
    assert of_attention[0] == of_attention[1] > 0, "the saved config has the original dropout"
    reranker = Reranker(str(tmp_path / "model"), RerankerOptions(dtype="float32"))
    assert (reranker.config["probability"], reranker.config["max_length"]) == ("sigmoid", 32)
    draw = random.Random(9)
    unseen = [" ".join(f"w{draw.randrange(400)}" for _ in range(8)) for _ in range(40)]
    answers = [f"{text} w500" for text in unseen]
    right, wrong = (reranker.score(["w405 w415"] * 40, texts) for texts in (answers, unseen))
    assert (right > wrong).mean() > 0.9
    if loss == "bce":
        assert right.mean() > 0.6 > 0.4 > wrong.mean()
    peer = CrossEncoder(str(tmp_path / "model"), device="cpu")
    pairs = [("w405 w415", text) for text in answers]
    np.testing.assert_allclose(peer.predict(pairs), right, atol=1e-5)


@pytest.mark.parametrize("killed_at", [2, 4, 8])
def test_a_killed_run_ends_with_the_same_weights(backbone: Path, tmp_path: Path, killed_at: int) -> None:
    whole, undisturbed = cross_system(backbone), Checkpoints(tmp_path / "whole")
    trainer_of(whole).train(undisturbed.hooks())
    with pytest.raises(KeyboardInterrupt):
        trainer_of(cross_system(backbone)).train(Checkpoints(tmp_path / "run", die_at=killed_at).hooks())
    again, resumed = Checkpoints(tmp_path / "run"), cross_system(backbone)
    trainer_of(resumed).train(again.hooks())
    assert len(losses_of(again)) == 10 - killed_at, "it resumes from the last checkpoint"
    assert weights(resumed) == weights(whole)
    assert losses_of(again)[-1] == losses_of(undisturbed)[-1]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last"]


def test_a_checkpoint_of_other_numerics_is_refused(backbone: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "kept")
    trainer_of(cross_system(backbone)).train(checkpoints.hooks())
    with pytest.raises(InputError, match=r"the run was begun with .*float32.*now .*bfloat16"):
        trainer_of(cross_system(backbone, dtype="bfloat16")).train(checkpoints.hooks())


@pytest.mark.parametrize("zero", [None, 1, 3])
def test_two_workers_train_as_one(
    request: pytest.FixtureRequest, still: Path, tmp_path: Path, zero: int | None
) -> None:
    """Gradients are summed by torch, or by DeepSpeed."""
    pair: TwoWorkers = request.getfixturevalue("two_workers" if zero is None else "two_deepspeed_workers")
    first, second = pair.run(trained_state, still, tmp_path, zero)
    alone = cross_system(still)
    trainer_of(alone).train(Checkpoints(tmp_path / "alone").hooks())
    start = dict(cross_system(still).module.named_parameters())
    largest_change = 0.0
    for name, parameter in alone.module.named_parameters():
        actual = first[f"weight.{name}"]
        torch.testing.assert_close(actual, second[f"weight.{name}"], atol=0, rtol=0)
        torch.testing.assert_close(actual, parameter.detach(), atol=2e-3, rtol=0)
        largest_change = max(largest_change, float((actual - start[name].detach()).abs().max()))
    assert largest_change > 4e-3, "two workers agree with one because neither learned anything"


def test_a_loss_that_is_not_finite_is_refused(backbone: Path, tmp_path: Path) -> None:
    """The error names the step, and the previous checkpoint remains."""
    system, checkpoints = cross_system(backbone), Checkpoints(tmp_path / "kept")
    forward = system.forward

    def broken(chunk: Any) -> Any:
        outputs, part = forward(chunk)
        return outputs, part * float("nan") if len(checkpoints.reports) == 5 else part

    system.forward = broken  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 6: the loss is nan; the last checkpoint is from before it"):
        trainer_of(system).train(checkpoints.hooks())
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 4
        assert all(bool(torch.isfinite(file.get_tensor(name)).all()) for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "parameter batch 0: expected at least 1"),
        ({"negatives_per_query": 0}, "parameter negatives_per_query 0"),
        ({"seed": -1}, "parameter seed -1"),
        ({"loss": "mse"}, "parameter loss 'mse': expected one of bce, listwise"),
        ({"title": "tab"}, "parameter title 'tab'"),
    ],
)
def test_bad_options(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)


def test_bad_backbones(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parameter max_length 65: more than the 64 positions"):
        cross_system(backbone, max_length=65)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"config\.json and weights are expected"):
        describe_backbone(tmp_path / "empty")
    described = describe_backbone(backbone)
    assert described == describe_backbone(save_bert(tmp_path / "same"))
    assert described["weights"] != describe_backbone(save_bert(tmp_path / "other", seed=1))["weights"]
    from safetensors.torch import save_file

    save_file({"something": torch.zeros(2)}, backbone / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="no tensor of the weights has this size"):
        cross_system(backbone)
