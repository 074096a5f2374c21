"""Optimizers against slow references, groups of parameters, and their state in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optimizer_cases as cases
import pytest
import torch
from optimizer_cases import PAIRS, Grouped, TwoLayers, body_with_adafactor, head_apart, trainer_of
from safetensors import safe_open
from torch import nn
from training_cases import Checkpoints
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.objectives.contrastive import contrastive_loss
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.adafactor import Adafactor, factored_dimensions
from riptide.retriever.training.hooks import RunResumed
from riptide.retriever.training.parameter_groups import ParameterGroup

SHAPES = [(130, 140), (140, 130), (128, 128), (127, 200), (3, 130, 150), (7,), (1,)]


def reference_step(
    value: np.ndarray, gradient: np.ndarray, moments: dict[str, np.ndarray], t: int, lr: float, *, scaled: bool
) -> np.ndarray:
    """Returns a parameter after step t of Adafactor: Algorithms 4, 5 and 6 of Shazeer & Stern 2018, in float64."""
    eps1, eps2, threshold, beta = 1e-30, 1e-3, 1.0, 1 - t**-0.8

    def rms(x: np.ndarray) -> float:
        return float(np.sqrt(np.mean(x**2)))

    def new(name: str, average: np.ndarray) -> np.ndarray:
        moments[name] = beta * moments.get(name, np.zeros_like(average)) + (1 - beta) * average
        return moments[name]

    squares = gradient**2 + eps1
    if factored_dimensions(value.shape) is not None and value.ndim == 2:
        # Sums, as in the paper: R of the rows, C of the columns, and V = R C / (the sum of R).
        rows, columns = new("rows", squares.sum(1)), new("columns", squares.sum(0))
        second = np.empty_like(value)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                second[i, j] = row * column / rows.sum()
    elif factored_dimensions(value.shape) is not None:
        # T5X with more dimensions: the two largest ones are factored, for each index of the others.
        rows, columns = new("rows", squares.mean(2)), new("columns", squares.mean(1))
        second = rows[:, :, None] * columns[:, None, :] / rows.mean(1)[:, None, None]
    else:
        second = new("second", squares)
    update = gradient / np.sqrt(second)
    update /= max(1.0, rms(update) / threshold)
    return value - lr * (max(eps2, rms(value)) if scaled else 1.0) * update


def contents(checkpoint: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Returns the metadata of a checkpoint, whose order in the file is random, and the bytes of each tensor."""
    with safe_open(checkpoint, "pt") as file:
        tensors = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
        return file.metadata(), tensors


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adafactor_is_the_papers(scaled: bool, dtype: torch.dtype) -> None:
    """Also with a parameter that is nearly 0, whose scale is epsilon_2, and with gradients of 0."""
    draw = np.random.default_rng(0)
    values = [draw.normal(size=shape).astype(np.float32).astype(np.float64) for shape in SHAPES]
    values[-2] *= 1e-5
    parameters = [nn.Parameter(torch.from_numpy(value).to(dtype)) for value in values]
    optimizer = Adafactor(parameters, lr=0.0, parameter_scale=scaled)
    moments: list[dict[str, np.ndarray]] = [{} for _ in SHAPES]
    for t in range(1, 6):
        lr = 0.01 * t
        optimizer.param_groups[0]["lr"] = lr
        for place, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
            gradient = draw.normal(size=value.shape).astype(np.float32) * 10.0 ** draw.integers(-4, 2)
            gradient *= t != 3 or place != 1
            parameter.grad = torch.from_numpy(gradient).to(dtype)
            gradient = parameter.grad.double().numpy()
            values[place] = reference_step(value, gradient, moments[place], t, lr, scaled=scaled)
        optimizer.step()
    for value, parameter in zip(values, parameters, strict=True):
        error = np.abs(parameter.detach().double().numpy() - value).max()
        assert error < (1e-12 if dtype == torch.float64 else 1e-6), parameter.shape


def test_adafactor_of_large_matrices_is_that_of_transformers() -> None:
    from transformers.optimization import Adafactor as Peer

    draw = torch.Generator().manual_seed(0)
    ours, theirs = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in SHAPES[:3]]
        for _ in range(2)
    )
    peer = Peer(theirs, lr=1e-2, relative_step=False, scale_parameter=True)
    optimizer = Adafactor(ours, lr=1e-2)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        optimizer.step()
        peer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_weight_decay_of_adafactor_is_multiplied_by_the_learning_rate() -> None:
    plain, decayed = (nn.Parameter(torch.full((3, 2), 0.5)) for _ in range(2))
    for parameter, decay in ((plain, 0.0), (decayed, 0.1)):
        parameter.grad = torch.ones(3, 2)
        Adafactor([parameter], lr=0.2, weight_decay=decay).step()
    torch.testing.assert_close(plain - decayed, torch.full((3, 2), 0.5 * 0.2 * 0.1))


def test_adamw_steps_as_a_plain_loop() -> None:
    """The same bytes after five steps with warm-up, decay and clipping."""
    loop = LoopOptions(steps=6, lr=1e-2, weight_decay=0.1, clip=0.05)
    trainer = trainer_of(steps=6, lr=1e-2, weight_decay=0.1, clip=0.05)
    losses = [trainer.step(number) for number in range(5)]
    system = TwoLayers()
    parameters = list(system.module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
    expected = []
    for number in range(5):
        vectors = system.vectors(system.features(number))
        loss = contrastive_loss(vectors[:PAIRS], vectors[PAIRS:], torch.arange(PAIRS))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        assert float(norm) > 0.05
        for group in optimizer.param_groups:
            group["lr"] = loop.learning_rate(number)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    state = trainer.stepper.state()
    assert len(state) == 3 * len(parameters)
    for name, parameter in system.module.named_parameters():
        assert torch.equal(state[f"weight.{name}"], parameter)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{moment}.{name}"], optimizer.state[parameter][moment])


def test_groups_have_their_own_learning_rate_and_decay() -> None:
    """The first step of each group is that of a run whose loop has the group's settings."""

    def weights(groups: cases.Groups | None, **loop: Any) -> dict[str, torch.Tensor]:
        trainer = trainer_of(groups, **loop)
        trainer.step(0)
        return dict(trainer.stepper.state())

    actual = weights(head_apart, weight_decay=0.1)
    body, head = weights(None, weight_decay=0.1), weights(None, lr=3e-4, weight_decay=0.5)
    before = dict(TwoLayers().module.named_parameters())
    for name, value in before.items():
        expected = head if name.startswith("head") else body
        other = body if name.startswith("head") else head
        torch.testing.assert_close(actual[f"weight.{name}"], expected[f"weight.{name}"], atol=1e-9, rtol=1e-6)
        assert float((actual[f"weight.{name}"] - other[f"weight.{name}"]).abs().max()) > 1e-5, name
        assert not torch.equal(actual[f"weight.{name}"], value)


@pytest.mark.parametrize(
    ("groups", "loop", "zero"),
    [
        (None, {"optimizer": "adafactor"}, None),
        (None, {"optimizer": "adafactor"}, 0),
        (body_with_adafactor, {}, None),
        (body_with_adafactor, {}, 0),
        *((head_apart, {"weight_decay": 0.1}, zero) for zero in (None, 0, 1, 2, 3)),
    ],
)
def test_two_workers_step_as_one(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    groups: cases.Groups | None,
    loop: dict[str, Any],
    zero: int | None,
) -> None:
    expected = cases.states(0, monkeypatch, 1, groups, loop)
    pair: TwoWorkers = request.getfixturevalue("two_workers" if zero is None else "two_deepspeed_workers")
    first, second = pair.run(cases.states, 2, groups, {**loop, "zero": zero})
    assert first.keys() == second.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("groups", "loop"),
    [(None, {"optimizer": "adafactor"}), (body_with_adafactor, {}), (head_apart, {"weight_decay": 0.1})],
)
def test_a_run_that_was_killed_ends_with_the_same_bytes(
    tmp_path: Path, groups: cases.Groups | None, loop: dict[str, Any]
) -> None:
    whole = trainer_of(groups, **loop)
    whole.train(Checkpoints(tmp_path / "whole").hooks())
    with pytest.raises(KeyboardInterrupt):
        trainer_of(groups, **loop).train(Checkpoints(tmp_path / "killed", die_at=6).hooks())
    resumed, checkpoints = trainer_of(groups, **loop), Checkpoints(tmp_path / "killed")
    resumed.train(checkpoints.hooks())
    assert checkpoints.reports[0] == RunResumed(4)
    expected = whole.stepper.state()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.stepper.state().items())
    assert contents(tmp_path / "killed" / "last") == contents(tmp_path / "whole" / "last")


@pytest.mark.parametrize(
    ("groups", "loop"),
    [
        (None, {"optimizer": "adafactor", "zero": 0}),
        (body_with_adafactor, {"zero": 0}),
        *((head_apart, {"weight_decay": 0.1, "zero": zero}) for zero in range(4)),
    ],
)
def test_a_run_under_deepspeed_resumes_with_the_same_bytes(
    two_deepspeed_workers: TwoWorkers, tmp_path: Path, groups: cases.Groups | None, loop: dict[str, Any]
) -> None:
    for whole, resumed in two_deepspeed_workers.run(cases.resumed_states, tmp_path, groups, loop):
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_a_checkpoint_of_adafactor_holds_factored_moments(tmp_path: Path) -> None:
    trainer_of(optimizer="adafactor").train(Checkpoints(tmp_path).hooks())
    with safe_open(tmp_path / "last", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["optimizer"] == "adafactor"
    moments = {name: shape for name, shape in shapes.items() if not name.startswith("weight.")}
    assert moments == {
        # The weight is [140, 130]: as in T5X, the row's moments are means over the larger dimension, here the first.
        "exp_avg_sq_row.body.0.weight": (1, 130),
        "exp_avg_sq_col.body.0.weight": (140, 1),
        "exp_avg_sq.head.weight": (6, 140),
        **{f"exp_avg_sq.{name}": (140,) for name in ("body.0.bias", "body.1.weight", "body.1.bias")},
        "exp_avg_sq.head.bias": (6,),
    }


@pytest.mark.parametrize(
    ("made", "resumed", "message"),
    [
        ("adamw", "adafactor", "made with the optimizer adamw, this run has adafactor: use the checkpoint's, or give"),
        ("adafactor", "adamw", "made with the optimizer adafactor, this run has adamw: use the checkpoint's, or give"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, made: Any, resumed: Any, message: str) -> None:
    trainer_of(optimizer=made).train(Checkpoints(tmp_path).hooks())
    with pytest.raises(InputError, match=message):
        trainer_of(optimizer=resumed).train(Checkpoints(tmp_path).hooks())
    mixed = "adafactor (4 parameters), adamw (2 parameters)"
    with pytest.raises(InputError) as error:
        trainer_of(body_with_adafactor).train(Checkpoints(tmp_path).hooks())
    assert f"made with the optimizer {made}, this run has {mixed}:" in str(error.value)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_adafactor_is_refused_where_zero_splits_matrices(zero: int) -> None:
    message = (
        f"parameter optimizer adafactor parameter zero {zero}: Adafactor needs the rows and columns of whole matrices"
    )
    with pytest.raises(InputError, match=message):
        LoopOptions(steps=1, lr=1.0, optimizer="adafactor", zero=zero)
    with pytest.raises(InputError, match=message):
        trainer_of(body_with_adafactor, zero=zero)


def test_bad_groups_are_refused() -> None:
    def twice(module: nn.ModuleDict) -> list[ParameterGroup]:
        return [*head_apart(module), *head_apart(module)]

    def foreign(module: nn.ModuleDict) -> list[ParameterGroup]:
        return [ParameterGroup(parameters=[nn.Parameter(torch.zeros(2))])]

    with pytest.raises(InputError, match=r"parameter groups: head\.weight is in two: expected each parameter of the"):
        trainer_of(twice)
    with pytest.raises(InputError, match="parameter groups: a parameter is not of the model"):
        trainer_of(foreign)
    for settings in ({"lr": 0.0}, {"lr_factor": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}):
        with pytest.raises(InputError, match="expected rates above 0, and a decay of 0 or more"):
            ParameterGroup(parameters=[], **settings)
    with pytest.raises(InputError, match="parameter optimizer 'adam': expected one of adamw, adafactor"):
        ParameterGroup(parameters=[], optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="parameter optimizer 'adam': expected one of adamw, adafactor"):
        LoopOptions(steps=1, lr=1.0, optimizer="adam")  # type: ignore[arg-type]


def test_frozen_parameters_of_a_group_are_left_out() -> None:
    system = Grouped(head_apart)
    assert isinstance(system.module, nn.ModuleDict)
    system.module["head"].bias.requires_grad_(False)  # type: ignore[union-attr]
    trainer = cases.Trainer(system, LoopOptions(steps=2, lr=1e-2), device=cases.CPU, dtype=torch.float32)
    trainer.step(0)
    assert "weight.head.bias" not in trainer.stepper.state()


def test_adamw_is_not_among_the_options_that_shape_a_result() -> None:
    """So the fingerprints of runs with it are those from before there was another optimizer."""
    default = LoopOptions(steps=1, lr=1.0).fingerprint_options()
    assert {"lr", "seed", "clip", "weight_decay"} < default.keys()
    assert {"optimizer", "parameter_scale", "zero"}.isdisjoint(default)
    other = LoopOptions(steps=1, lr=1.0, optimizer="adafactor").fingerprint_options()
    assert other == {**default, "optimizer": "adafactor", "parameter_scale": True}
