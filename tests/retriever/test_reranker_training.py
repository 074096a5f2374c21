"""Training: batches are a function of the step, gradients those of plain torch, a resumed run ends where it would."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from sentence_transformers import CrossEncoder
from test_training import Kept
from tiny import save_bert
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retriever import reranker_training
from retriever.errors import InputError
from retriever.files import describe_backbone
from retriever.reranker import Reranker, RerankerOptions
from retriever.reranker_data import TrainingData, batch_at
from retriever.reranker_training import CrossOptions, CrossSystem, loss_of
from retriever.training import LoopOptions, Trainer

SMALL = CrossOptions(batch=4, negatives_per_query=3, max_length=32, seed=5)
CPU = torch.device("cpu")
NUM_QUERIES, NUM_ANSWERS, NUM_PASSAGES = 10, 200, 400


def texts_of(rows: np.ndarray) -> tuple[list[str], list[str]]:
    """Titles and texts of nonsense; the word w500 is in every passage of a row below NUM_ANSWERS, and no other."""
    made = []
    for row in rows:
        draw = random.Random(int(row))
        words = [f"w{draw.randrange(400)}" for _ in range(draw.randint(4, 14))]
        if row < NUM_ANSWERS:
            words.insert(draw.randrange(len(words)), "w500")
        made.append(" ".join(words))
    return ["w7" if row % 2 else "" for row in rows], made


def toy(answers: int = 2, negatives: int = 3) -> TrainingData:
    """Each query has so many answers of its own, and `negatives` to `negatives + 4` passages that are none."""
    draw = np.random.default_rng(0)
    return TrainingData(
        queries=[f"w{400 + number} w{410 + number}" for number in range(NUM_QUERIES)],
        positives=[20 * number + np.arange(answers) for number in range(NUM_QUERIES)],
        negatives=[draw.choice(np.arange(NUM_ANSWERS, NUM_PASSAGES), negatives + number % 5, replace=False)
                   for number in range(NUM_QUERIES)],
        num_passages=NUM_PASSAGES,
        passages=texts_of,
    )  # fmt: skip


def system(folder: Path, data: TrainingData | None = None, dtype: str = "float32", **changes: Any) -> CrossSystem:
    return CrossSystem(folder, replace(SMALL, **changes), data or toy(), device=CPU, dtype=getattr(torch, dtype))


def trainer_of(made: CrossSystem, rank: int = 0, world: int = 1, **loop: Any) -> Trainer:
    options = LoopOptions(**{"steps": 8, "lr": 1e-3, "seed": 5, "checkpoint_every": 2, **loop})
    return Trainer(made, options, device=CPU, dtype=made.dtype, rank=rank, world=world)


def losses_of(kept: Kept) -> list[float]:
    return [note["loss"] for note in kept.notes if "loss" in note]


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


def weights(made: CrossSystem) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in made.module.named_parameters()}


def test_a_batch_is_a_function_of_the_step() -> None:
    """Ten queries in batches of four: five steps are two epochs, in each of which every query comes once."""
    data = toy()
    steps = [batch_at(data, SMALL, step) for step in range(5)]
    queries = np.concatenate([queries for queries, _ in steps])
    assert sorted(queries[:10]) == sorted(queries[10:]) == list(range(10))
    assert list(queries[:10]) != list(queries[10:])
    again = batch_at(toy(), SMALL, 3)
    np.testing.assert_array_equal(again[0], steps[3][0])
    np.testing.assert_array_equal(again[1], steps[3][1])
    for query, rows in zip(queries, np.concatenate([rows for _, rows in steps]), strict=True):
        assert rows[0] in data.positives[query]
        assert len({*rows[1:]} & {*data.negatives[query]}) == 3
    drawn = {tuple(sorted(rows)) for _, groups in steps for rows in groups}
    assert len(drawn) > 14, "the second epoch draws other negatives"
    other = replace(SMALL, seed=6)
    assert any((batch_at(data, other, step)[0] != steps[step][0]).any() for step in range(2))


def test_too_few_negatives_are_filled_up_from_the_corpus() -> None:
    data = TrainingData(["w1"], [np.array([3, 4])], [np.array([9])], 6, texts_of)
    options = CrossOptions(batch=1, negatives_per_query=5)
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert rows[0] in (3, 4)
        assert rows[1] == 9
        assert not {*rows[2:]} - {0, 1, 2, 5}


def test_what_is_deleted_fills_nothing_up_and_else_nothing_changes() -> None:
    options = CrossOptions(batch=1, negatives_per_query=5)
    queries, positives, negatives = ["w1"], [np.array([3, 4])], [np.array([9])]
    data = TrainingData(queries, positives, negatives, 8, texts_of, deleted=np.array([0, 5, 7]))
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert {*rows[2:]} <= {1, 2, 6}
        np.testing.assert_array_equal([rows], batch_at(data, options, step)[1])
    whole = TrainingData(queries, positives, negatives, 8, texts_of)
    far = TrainingData(queries, positives, negatives, 8, texts_of, deleted=np.array([8]))
    np.testing.assert_array_equal(batch_at(whole, options, 3)[1], batch_at(far, options, 3)[1])


def test_the_schedule() -> None:
    rates = [LoopOptions(steps=100, lr=1.0).learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)
    assert LoopOptions(steps=1, lr=1.0).learning_rate(0) == 1.0


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    probability = 1 / (1 + np.exp(-logits.numpy()))
    expected = -(np.log(probability[:, 0]) + np.log(1 - probability[:, 1:]).sum(axis=1)).sum() / 3
    assert float(loss_of(logits, "bce")) == pytest.approx(expected, rel=1e-6)
    softmax = np.exp(logits.numpy())[:, 0] / np.exp(logits.numpy()).sum(axis=1)
    assert float(loss_of(logits, "listwise")) == pytest.approx(-np.log(softmax).sum(), rel=1e-6)


def test_a_querys_pairs_stay_together(backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into chunks of a query or two, of which each worker has its own; all pairs of the batch, each once."""
    made = system(backbone)
    [whole] = made.batch(3, 0, 1).chunks
    monkeypatch.setitem(reranker_training._CHUNK, "cpu", 200)
    shares = [made.batch(3, rank, 2) for rank in range(2)]
    assert all(share.total == 0 for share in shares)
    cut = [chunk for share in shares for chunk in share.chunks]
    assert len(cut) > 2

    def groups(chunks: Any) -> list[tuple]:
        rows = [[tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
                for ids, _, lengths in (chunk.inputs for chunk in chunks)]  # fmt: skip
        return sorted(tuple(each[start : start + 4]) for each in rows for start in range(0, len(each), 4))

    assert groups(cut) == groups([whole])
    assert len(groups(cut)) == 4
    assert all(chunk.tokens == chunk.inputs[0].numel() <= max(200, 4 * 32) for chunk in cut)


@pytest.mark.parametrize("tokens", [4096, 200])
@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_a_step_is_that_of_plain_torch(still: Path, loss: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one padded batch through transformers, torch's own AdamW and clipping; in one chunk, and in several."""
    monkeypatch.setitem(reranker_training._CHUNK, "cpu", tokens)
    data = toy()
    queries, rows = batch_at(data, SMALL, 0)
    made = system(still, data, loss=loss)
    trainer = trainer_of(made, warm_up=0.0)
    assert (len(made.batch(0, 0, 1).chunks) > 1) == (tokens == 200)
    made.module.train()
    torch.manual_seed(SMALL.seed)
    model = AutoModelForSequenceClassification.from_pretrained(still, num_labels=1).train()
    tokenizer = AutoTokenizer.from_pretrained(still)
    titles, texts = texts_of(rows.ravel())
    passages = [f"{title} {text}" if title else text for title, text in zip(titles, texts, strict=True)]
    inputs = tokenizer([data.queries[q] for q in queries for _ in range(4)], passages, truncation=True, max_length=32,
                       padding=True, return_tensors="pt")  # fmt: skip
    logits = model(**inputs).logits.view(4, 4)
    targets = torch.tensor([[1.0, 0, 0, 0]] * 4)
    expected = (torch.nn.functional.binary_cross_entropy_with_logits(logits, targets) if loss == "bce"
                else torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))  # fmt: skip
    expected.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    trained = dict(made.module.named_parameters())
    assert trainer.step(0) == pytest.approx(float(expected.detach()), rel=1e-5)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3).step()
    # AdamW's first step is lr * sign(gradient): where a gradient is all but 0, rounding decides.
    for name, parameter in model.named_parameters():
        clear = gradients[name].abs() > 1e-5
        torch.testing.assert_close(trained[name].detach()[clear], parameter.detach()[clear], atol=1e-5,
                                   rtol=1e-4)  # fmt: skip
    assert sum(int((g.abs() > 1e-5).sum()) for g in gradients.values()) > 4000


@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_training_learns(backbone: Path, tmp_path: Path, loss: str) -> None:
    """The word w500 says what answers; the saved model tells it in passages that training never saw."""
    made = system(backbone, toy(answers=20, negatives=40), "bfloat16", batch=10, negatives_per_query=4, loss=loss)
    kept = Kept(tmp_path / "kept")
    trainer_of(made, steps=100, lr=3e-3).train(kept.hooks())
    losses = losses_of(kept)
    assert len(losses) == 100
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
    made.save(tmp_path / "model")
    of_attention = [json.loads((folder / "config.json").read_text())["attention_probs_dropout_prob"]
                    for folder in (backbone, tmp_path / "model")]  # fmt: skip
    assert of_attention[0] == of_attention[1] > 0, "put off for training alone"
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
    whole, undisturbed = system(backbone), Kept(tmp_path / "whole")
    trainer_of(whole).train(undisturbed.hooks())
    with pytest.raises(KeyboardInterrupt):
        trainer_of(system(backbone)).train(Kept(tmp_path / "run", die_at=killed_at).hooks())
    again, resumed = Kept(tmp_path / "run"), system(backbone)
    trainer_of(resumed).train(again.hooks())
    assert len(losses_of(again)) == 10 - killed_at, "it goes on from the last checkpoint"
    assert weights(resumed) == weights(whole)
    assert losses_of(again)[-1] == losses_of(undisturbed)[-1]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last"]


def test_a_checkpoint_of_other_numerics_is_refused(backbone: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    trainer_of(system(backbone)).train(kept.hooks())
    with pytest.raises(InputError, match=r"the run was begun with .*float32.*now .*bfloat16"):
        trainer_of(system(backbone, dtype="bfloat16")).train(kept.hooks())


def _two_workers(rank: int, folder: Path, backbone: Path, zero: int | None) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    reranker_training._CHUNK["cpu"] = 200  # several chunks, more for one worker than for the other at some step
    trainer = trainer_of(system(backbone), rank, 2, zero=zero)
    trainer.train(Kept(folder / f"run{rank}").hooks())
    state = trainer.stepper.state()
    torch.save(state, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_two_workers_train_as_one(still: Path, tmp_path: Path, zero: int | None) -> None:
    """Gradients added up by torch, or by DeepSpeed."""
    mp.spawn(_two_workers, (tmp_path, still, zero), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    alone = system(still)
    trainer_of(alone).train(Kept(tmp_path / "alone").hooks())
    start = dict(system(still).module.named_parameters())
    moved = 0.0
    for name, parameter in alone.module.named_parameters():
        found = first[f"weight.{name}"]
        torch.testing.assert_close(found, second[f"weight.{name}"], atol=0, rtol=0)
        torch.testing.assert_close(found, parameter.detach(), atol=2e-3, rtol=0)
        moved = max(moved, float((found - start[name].detach()).abs().max()))
    assert moved > 4e-3, "the two agree in what they learned, and not in having learned nothing"


def test_a_loss_that_is_not_finite_is_refused(backbone: Path, tmp_path: Path) -> None:
    """It is told with its step, and the checkpoint from before it stays."""
    made, kept = system(backbone), Kept(tmp_path / "kept")
    forward = made.forward

    def broken(chunk: Any) -> Any:
        vectors, part = forward(chunk)
        return vectors, part * float("nan") if len(kept.notes) == 5 else part

    made.forward = broken  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 6: the loss is nan; the last checkpoint is from before it"):
        trainer_of(made).train(kept.hooks())
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 4
        assert all(bool(torch.isfinite(file.get_tensor(name)).all()) for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"negatives_per_query": 0}, "negatives_per_query=0"),
        ({"seed": -1}, "seed=-1"),
        ({"loss": "mse"}, "loss='mse' is not one of bce, listwise"),
        ({"title": "tab"}, "title='tab'"),
    ],
)
def test_bad_options(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)


def test_bad_backbones(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length=65 is more than the 64 positions"):
        system(backbone, max_length=65)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"config\.json and weights are expected"):
        describe_backbone(tmp_path / "empty")
    described = describe_backbone(backbone)
    assert described == describe_backbone(save_bert(tmp_path / "same"))
    assert described["weights"] != describe_backbone(save_bert(tmp_path / "other", seed=1))["weights"]
    from safetensors.torch import save_file

    save_file({"something": torch.zeros(2)}, backbone / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="the weights lack"):
        system(backbone)
