"""Training: batches are a function of the step, gradients those of plain torch, a resumed run ends where it would."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from tiny import save_bert
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retriever.errors import InputError
from retriever.reranker import Reranker, RerankerOptions
from retriever.reranker_data import TrainingData, TrainingOptions, batch_at, learning_rate
from retriever.reranker_training import Hooks, Trainee, describe_backbone, loss_of

SMALL = TrainingOptions(steps=8, batch=4, negatives_per_query=3, lr=1e-3, max_length=32, seed=5)
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


class Run:
    """Hooks that remember; checkpoints lie in a folder. `stop_at`: the step whose note raises, as a kill would."""

    def __init__(self, folder: Path, stop_at: int | None = None):
        self.folder, self.stop_at = folder, stop_at
        self.losses: list[float] = []
        self.hooks = Hooks(self.load, self.save, self.note)
        folder.mkdir(exist_ok=True)

    def load(self) -> Path | None:
        found = sorted(self.folder.glob("*.safetensors"))
        if not found:
            return None
        copy = self.folder / "copy"
        copy.write_bytes(found[-1].read_bytes())
        return copy

    def save(self, step: int, write: Callable[[Path], object]) -> None:
        write(self.folder / f"{step:04d}.safetensors")

    def note(self, step: int, loss: float) -> None:
        if step == self.stop_at:
            raise KeyboardInterrupt
        self.losses.append(loss)


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


def weights(trainee: Trainee) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in trainee.parameters.items()}


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
    other = TrainingOptions(**{**vars(SMALL), "seed": 6})
    assert any((batch_at(data, other, step)[0] != steps[step][0]).any() for step in range(2))


def test_too_few_negatives_are_filled_up_from_the_corpus() -> None:
    data = TrainingData(["w1"], [np.array([3, 4])], [np.array([9])], 6, texts_of)
    options = TrainingOptions(steps=1, batch=1, negatives_per_query=5)
    for step in range(20):
        [rows] = batch_at(data, options, step)[1]
        assert rows[0] in (3, 4)
        assert rows[1] == 9
        assert not {*rows[2:]} - {0, 1, 2, 5}


def test_what_is_deleted_fills_nothing_up_and_else_nothing_changes() -> None:
    options = TrainingOptions(steps=1, batch=1, negatives_per_query=5)
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
    options = TrainingOptions(steps=100, lr=1.0)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)
    assert learning_rate(0, TrainingOptions(steps=1, lr=1.0)) == 1.0


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    probability = 1 / (1 + np.exp(-logits.numpy()))
    expected = -(np.log(probability[:, 0]) + np.log(1 - probability[:, 1:]).sum(axis=1)).sum() / 3
    assert float(loss_of(logits, "bce")) == pytest.approx(expected, rel=1e-6)
    softmax = np.exp(logits.numpy())[:, 0] / np.exp(logits.numpy()).sum(axis=1)
    assert float(loss_of(logits, "listwise")) == pytest.approx(-np.log(softmax).sum(), rel=1e-6)


@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_a_step_is_that_of_plain_torch(still: Path, loss: str) -> None:
    """Against one padded batch through transformers, torch's own AdamW and clipping."""
    options = TrainingOptions(**{**vars(SMALL), "loss": loss})
    data = toy()
    queries, rows = batch_at(data, options, 0)
    trainee = Trainee(still, options, dtype="float32")
    torch.manual_seed(options.seed)
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
    found = trainee.step(queries, rows, data, 1e-3)
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3).step()
    # AdamW's first step is lr * sign(gradient): where a gradient is all but 0, rounding decides.
    for name, parameter in model.named_parameters():
        clear = gradients[name].abs() > 1e-5
        torch.testing.assert_close(trainee.parameters[name].detach()[clear], parameter.detach()[clear], atol=1e-5,
                                   rtol=1e-4)  # fmt: skip
    assert sum(int((g.abs() > 1e-5).sum()) for g in gradients.values()) > 4000


@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_training_learns(backbone: Path, tmp_path: Path, loss: str) -> None:
    """The word w500 says what answers; the saved model tells it in passages that training never saw."""
    options = TrainingOptions(steps=100, batch=10, lr=3e-3, max_length=32, loss=loss)  # type: ignore[arg-type]
    run = Run(tmp_path / "run")
    trainee = Trainee(backbone, options)
    trainee.train(toy(answers=20, negatives=40), run.hooks)
    assert len(run.losses) == 100
    assert np.mean(run.losses[-5:]) < 0.3 * np.mean(run.losses[:5])
    trainee.save_model(tmp_path / "model")
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


@pytest.mark.parametrize("killed_at", [1, 2, 3, 6, 8])
def test_a_killed_run_ends_with_the_same_weights(backbone: Path, tmp_path: Path, killed_at: int) -> None:
    whole = Trainee(backbone, SMALL)
    undisturbed = Run(tmp_path / "whole")
    whole.train(toy(), undisturbed.hooks, checkpoint_every=2)
    run = Run(tmp_path / "run", stop_at=killed_at)
    with pytest.raises(KeyboardInterrupt):
        Trainee(backbone, SMALL).train(toy(), run.hooks, checkpoint_every=2)
    again = Run(tmp_path / "run")
    resumed = Trainee(backbone, SMALL)
    resumed.train(toy(), again.hooks, checkpoint_every=2)
    assert len(again.losses) == 8 - (killed_at - 1) // 2 * 2, "it goes on from the last checkpoint"
    assert weights(resumed) == weights(whole)
    assert again.losses[-1] == undisturbed.losses[-1]
    assert not (tmp_path / "run" / "copy").exists()


def test_a_checkpoint_of_other_conditions_is_refused(backbone: Path, tmp_path: Path) -> None:
    trainee = Trainee(backbone, SMALL, dtype="float32")
    run = Run(tmp_path / "run")
    trainee.train(toy(), run.hooks, checkpoint_every=4)
    with pytest.raises(InputError, match=r"the run was begun with .*float32.*now .*bfloat16"):
        Trainee(backbone, SMALL, dtype="bfloat16").train(toy(), run.hooks)
    with pytest.raises(InputError, match=r"begun with .*workers 1\b.*now .*workers 2\b"):
        Trainee(backbone, SMALL, dtype="float32", world=2).train(toy(), run.hooks)


def _two_workers(rank: int, folder: Path, backbone: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    trainee = Trainee(backbone, SMALL, dtype="float32", rank=rank, world=2)
    trainee.train(toy(), Run(folder / f"run{rank}").hooks)
    trainee.save_checkpoint(folder / f"rank{rank}.safetensors", SMALL.steps)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_train_as_one(still: Path, tmp_path: Path) -> None:
    mp.spawn(_two_workers, (tmp_path, still), nprocs=2)
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    alone = Trainee(still, SMALL, dtype="float32")
    alone.train(toy(), Run(tmp_path / "alone").hooks)
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(first[f"weight.{name}"], second[f"weight.{name}"], atol=0, rtol=0)
        torch.testing.assert_close(first[f"weight.{name}"], parameter.detach(), atol=2e-3, rtol=0)
    start = dict(Trainee(still, SMALL).parameters)
    moved = max(float((first[f"weight.{name}"] - start[name].detach()).abs().max()) for name in start)
    assert moved > 4e-3, "the two agree in what they learned, and not in having learned nothing"


def test_a_loss_that_is_not_finite_is_refused(backbone: Path, tmp_path: Path) -> None:
    trainee = Trainee(backbone, SMALL, dtype="float32")
    with torch.no_grad():
        trainee.parameters["classifier.bias"].fill_(float("nan"))
    with pytest.raises(InputError, match="the loss is nan"):
        trainee.train(toy(), Run(tmp_path / "run").hooks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"negatives_per_query": 0}, "negatives_per_query=0"),
        ({"lr": 0.0}, r"lr=0\.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"loss": "mse"}, "loss='mse' is not one of bce, listwise"),
        ({"title": "tab"}, "title='tab'"),
    ],
)
def test_bad_options(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingOptions(**{**vars(SMALL), **changes})


def test_bad_backbones(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length=65 is more than the 64 positions"):
        Trainee(backbone, TrainingOptions(steps=1, max_length=65))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"config\.json and weights are expected"):
        describe_backbone(tmp_path / "empty")
    described = describe_backbone(backbone)
    assert described == describe_backbone(save_bert(tmp_path / "same"))
    assert described["weights"] != describe_backbone(save_bert(tmp_path / "other", seed=1))["weights"]
    from safetensors.torch import save_file

    save_file({"something": torch.zeros(2)}, backbone / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="the weights lack"):
        Trainee(backbone, SMALL)
