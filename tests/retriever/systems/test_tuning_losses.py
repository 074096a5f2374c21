"""The losses and the learned temperature in training: equal on any number of workers, and after a kill."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import training_cases as cases
from safetensors import safe_open
from tiny import save_bert
from training_cases import CPU, ENCODER, Checkpoints, dual_system, gradients, make_data, record_norms
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.objectives.learned_temperature import LearnedTemperature
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import batch_at

LEARNED = "temperature.log_scale"
LR = 1e-2  # of the steps of `resumed_steps`


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], close: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    assert actual["loss"] == pytest.approx(expected["loss"], rel=close)
    for name in actual.keys() - {"loss"}:
        torch.testing.assert_close(actual[name], expected[name], atol=close, rtol=1e-3)


@pytest.mark.parametrize("negatives", [2, 8])
def test_a_batch_holds_the_teachers_logits_of_its_mined_passages(bert: Path, negatives: int) -> None:
    """Each query has at most 5 mined negatives; random passages of the corpus fill up its group."""
    system = dual_system(bert, loss="kl", negatives_per_query=negatives)
    data = system.data
    assert data is not None
    assert data.teacher is not None
    batch = system.batch(3, 0, 1)
    queries, rows = batch_at(data, system.tuning, 3)
    passages = np.unique(rows)
    assert batch.arguments["groups"].shape == batch.arguments["teacher"].shape == (12, 1 + negatives)
    assert (passages[batch.arguments["groups"].numpy()] == rows).all()
    known = 0
    for query, group, logits in zip(queries, rows, batch.arguments["teacher"].double().tolist(), strict=True):
        scores = dict(zip(data.positives[query].tolist(), data.teacher.positives[query].tolist(), strict=True))
        scores |= zip(data.negatives[query].tolist(), data.teacher.negatives[query].tolist(), strict=True)
        num_mined = min(negatives, len(data.negatives[query]))
        for place, (row, logit) in enumerate(zip(group.tolist(), logits, strict=True)):
            if place <= num_mined:
                assert logit == pytest.approx(math.log(scores[row] / (1 - scores[row])), abs=1e-4)
                known += 1
            else:
                assert math.isnan(logit)
    assert (known < 12 * (1 + negatives)) == (negatives == 8)
    assert "teacher" not in dual_system(bert).batch(3, 0, 1).arguments


def losses_of(bert: Path, **tuning: Any) -> list[float]:
    """Returns the losses of 30 steps on the same batch."""
    system = dual_system(bert, dropout=0.0, method="finetune", **tuning)
    batch = system.batch(0, 0, 1)
    system.batch = lambda *_: batch  # type: ignore[method-assign]
    trainer = Trainer(system, LoopOptions(steps=30, lr=1e-3), device=CPU, dtype=torch.float32)
    return [trainer.step(number) for number in range(30)]


@pytest.mark.parametrize("loss", ["symmetric", "kl", "margin-mse"])
def test_training_lowers_the_loss(bert: Path, loss: str) -> None:
    losses = losses_of(bert, loss=loss)
    assert losses[-1] < 0.7 * losses[0]
    assert losses[0] != pytest.approx(losses_of(bert)[0])


@pytest.mark.parametrize(
    "tuning",
    [
        {"loss": "symmetric"},
        {"loss": "kl", "contrastive_weight": 0.5, "learn_temperature": True},
        {"loss": "margin-mse", "method": "finetune", "learn_temperature": True},
        {"loss": "contrastive", "temperature": 0.5, "learn_temperature": True},
    ],
)
def test_two_workers_train_the_weights_of_one(two_workers: TwoWorkers, bert: Path, tuning: dict[str, Any]) -> None:
    expected = cases.steps_and_state(bert, tuning)
    for name in [name for name in expected if name.endswith("key.bias")]:
        del expected[name]  # this gradient is 0 except for rounding, which AdamW amplifies
    for actual in two_workers.run(cases.four_steps, bert, tuning):
        assert_equal({name: actual[name] for name in expected}, expected, 1e-4)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_learns_the_temperature_of_torch(two_deepspeed_workers: TwoWorkers, bert: Path, stage: int) -> None:
    """Four steps, the last one from a state that was loaded."""
    method = "prompt" if stage < 2 else "finetune"
    tuning = {"loss": "kl", "learn_temperature": True}
    system = dual_system(bert, dropout=0.0, method=method, **tuning)  # type: ignore[arg-type]
    trainer = Trainer(system, LoopOptions(steps=6, lr=LR), device=CPU, dtype=torch.float32)
    norms = record_norms(trainer)
    losses = [trainer.step(number) for number in range(4)]
    expected = {"loss": losses[-1], "norm": torch.tensor(norms[-1]), **trainer.stepper.state()}
    actual, _ = two_deepspeed_workers.run(cases.resumed_steps, bert, method, stage, tuning)
    expected = {name: value for name, value in expected.items() if not name.endswith("key.bias")}
    # AdamW divides a gradient by its size. Where it is as small as its rounding error, which depends on the kind of CPU
    # and on the number of workers, a weight moves by up to LR in either direction: at most one weight in a thousand.
    assert actual["loss"] == pytest.approx(expected.pop("loss"), rel=1e-4)
    for name, value in expected.items():
        differences = (actual[name] - value).abs()
        assert (differences <= 1e-4 + 1e-3 * value.abs()).double().mean() >= 0.999, name
        assert differences.max() < LR, name
    assert abs(float(actual[f"weight.{LEARNED}"])) > 1e-3


@pytest.mark.parametrize("loss", ["contrastive", "kl", "margin-mse"])
def test_the_temperatures_gradient_equals_finite_differences(bert: Path, loss: str) -> None:
    """Of the loss at fixed temperatures, by log(1 / T); and the other gradients are those of the fixed temperature."""

    def compute(temperature: float, learn: bool = False) -> dict[str, Any]:
        return gradients(
            dual_system(bert, dropout=0.0, loss=loss, temperature=temperature, learn_temperature=learn, chunk=200)
        )

    learned, width = compute(0.5, learn=True), 1e-2
    below, above = (compute(0.5 * math.exp(-sign * width))["loss"] for sign in (-1, 1))
    assert float(learned.pop(LEARNED)) == pytest.approx((above - below) / (2 * width), rel=1e-2)
    assert_equal(learned, compute(0.5))


def test_grad_cache_trains_the_same_temperature(bert: Path) -> None:
    """With dropout, over several chunks for each side."""
    on, off = (
        gradients(dual_system(bert, dropout=0.3, chunk=200, learn_temperature=True), grad_cache=choice)
        for choice in ("on", "off")
    )
    assert float(off[LEARNED]) != 0
    assert_equal(on, off)


def test_a_learned_temperature_does_not_fall_below_a_hundredth() -> None:
    learned = LearnedTemperature(0.05)
    assert learned.value() == pytest.approx(0.05)
    with torch.no_grad():
        learned.log_scale.fill_(9.0)
    scale = learned()
    assert scale.item() == pytest.approx(10.0)
    assert learned.value() == pytest.approx(0.01)
    scale.backward()
    assert learned.log_scale.grad is not None
    assert learned.log_scale.grad.item() == pytest.approx(5.0), "from the limit it can rise again"


def test_a_learned_temperature_has_no_weight_decay_and_no_part_in_encoding(bert: Path) -> None:
    options = replace(ENCODER, normalize=True)
    make = {
        learn: DualEncoderSystem(
            bert, options, TuneOptions(length=4, learn_temperature=learn), make_data(), device=CPU, dtype=torch.float32
        )
        for learn in (False, True)
    }
    texts = ["w1 w2", "w3"]
    np.testing.assert_array_equal(*(make[learn].encode(texts, "query") for learn in (False, True)))
    assert make[True].learned is not None
    assert make[True].learned.value() == pytest.approx(0.05), "it starts at the temperature of cosines"
    trainer = Trainer(make[True], LoopOptions(steps=6, lr=1e-2, weight_decay=0.5), device=CPU, dtype=torch.float32)
    decays = {
        id(parameter): group["weight_decay"]
        for group in trainer.stepper.optimizer.param_groups  # type: ignore[attr-defined]
        for parameter in group["params"]
    }
    assert decays[id(make[True].learned.log_scale)] == 0.0
    assert 0.5 in decays.values()


@pytest.mark.parametrize("own", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_learned_temperature_has_its_own_learning_rate_and_adamw(
    bert: Path, own: float | None, optimizer: Literal["adamw", "adafactor"]
) -> None:
    """The first step of AdamW changes a parameter by its learning rate."""
    system = dual_system(bert, dropout=0.0, learn_temperature=True, temperature_lr=own)
    options = LoopOptions(steps=10, lr=1e-2, weight_decay=0.5, optimizer=optimizer)
    trainer = Trainer(system, options, device=CPU, dtype=torch.float32)
    trainer.step(0)
    state = trainer.stepper.state()
    assert f"exp_avg.{LEARNED}" in state
    assert abs(float(state[f"weight.{LEARNED}"])) == pytest.approx(own or 1e-3, rel=1e-3)
    rates = {
        tuple(name for name, parameter in system.module.named_parameters() if parameter is one): group["lr"]
        for group in trainer.stepper.optimizer.param_groups  # type: ignore[attr-defined]
        for one in group["params"]
    }
    assert rates.pop((LEARNED,)) == pytest.approx(own or 1e-3)
    assert len(rates) > 0
    assert all(rate == pytest.approx(1e-2) for rate in rates.values())


def test_a_run_that_was_killed_ends_with_the_same_temperature(bert: Path, tmp_path: Path) -> None:
    def train(folder: Path, die_at: int | None = None) -> dict[str, torch.Tensor]:
        system = dual_system(bert, loss="kl", contrastive_weight=0.5, learn_temperature=True)
        options = LoopOptions(steps=9, lr=1e-2, checkpoint_every=2)
        trainer = Trainer(system, options, device=CPU, dtype=torch.float32)
        trainer.train(Checkpoints(folder, die_at).hooks())
        return trainer.stepper.state()

    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", die_at=6)
    with safe_open(tmp_path / "killed" / "last", "pt") as file:
        assert f"exp_avg.{LEARNED}" in file.keys()  # noqa: SIM118
    resumed = train(tmp_path / "killed")
    assert abs(float(whole[f"weight.{LEARNED}"])) > 1e-3
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "mse"},
            "parameter loss 'mse': expected one of contrastive, symmetric, symmetric-sum, kl, margin-mse",
        ),
        (
            {"contrastive_weight": 0.5},
            "contrastive_weight 0.5 parameter loss contrastive: expected a distillation loss",
        ),
        ({"loss": "symmetric", "contrastive_weight": 1.0}, "expected a distillation loss, to which it is added: kl or"),
        ({"loss": "kl", "contrastive_weight": -1.0}, "contrastive_weight -1.0: expected at least 0"),
        ({"loss": "kl", "contrastive_weight": math.nan}, "contrastive_weight nan: expected at least 0"),
        (
            {"loss": "margin-mse", "negatives_per_query": 0},
            "parameter loss margin-mse, parameter negatives_per_query 0: expected at",
        ),
        ({"learn_temperature": True, "temperature": 0.009}, "parameter temperature 0.009: expected at least 0.01"),
        ({"learn_temperature": True, "temperature_lr": 0.0}, "parameter temperature_lr 0.0: expected more than 0"),
        ({"temperature_lr": 0.1}, "temperature_lr 0.1: expected parameter learn_temperature too"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TuneOptions(**options)
