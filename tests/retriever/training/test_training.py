"""The training loop with a dual encoder: equal results on any number of workers, and runs that resume."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import training_cases as cases
from safetensors import safe_open
from tiny import save_bert
from training_cases import (
    CPU,
    ENCODER,
    LONG_AND_SHORT,
    Checkpoints,
    clock,
    dual_system,
    gradients,
    make_data,
    record_norms,
)
from two_workers import TwoWorkers

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.prompts.deep_prompt import DeepPrompt
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training import loop as training
from riptide.retriever.training.dev import DevSet
from riptide.retriever.training.hooks import NodeDraining, RunResumed, StartMeasured, Stopped
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters
from riptide.retriever.training.system import checkpoint_activations
from riptide.retriever.training.time_limit import SpeedMeasurement
from riptide.retriever.training.training_data import batch_at


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], close: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    assert actual["loss"] == pytest.approx(expected["loss"], abs=close)
    for name in actual.keys() - {"loss"}:
        torch.testing.assert_close(actual[name], expected[name], atol=close, rtol=1e-3)


@pytest.mark.parametrize("parametrisation", ["embedding", "mlp"])
def test_every_text_has_its_own_dropout_of_the_prompt(bert: Path, parametrisation: str) -> None:
    """Copies of a text get different vectors in training, the same ones in each pass, and equal ones in evaluation."""
    system = dual_system(bert, dropout=0.0, parametrisation=parametrisation)
    for prompt in system.prompts.modules():
        if isinstance(prompt, DeepPrompt):
            prompt.dropout = 0.5
    [chunk] = system.chunks(["w1 w2 w3"] * 6, "query", np.arange(6))

    def vectors() -> torch.Tensor:
        torch.manual_seed(7)
        return system.forward(chunk)[0]["dense"].detach()

    system.module.train()
    found = vectors()
    assert len({tuple(row.tolist()) for row in found}) == 6
    assert torch.equal(found, vectors())
    system.module.eval()
    torch.testing.assert_close(*(vectors()[[0, 0, 0]], vectors()[[1, 3, 5]]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_grad_cache_draws_the_dropout_of_prompts_again(bert: Path, checkpointing: bool) -> None:
    def compute(grad_cache: str) -> dict[str, Any]:
        system = dual_system(bert, dropout=0.3, chunk=200)
        if checkpointing:
            checkpoint_activations(system.pooled.backbone)
        return gradients(system, grad_cache=grad_cache)

    assert_equal(compute("on"), compute("off"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_training_and_encoding_place_texts_alike(bert: Path, tmp_path: Path, side: Any) -> None:
    """Texts that start after the prompt, in training and in an encoder with the saved prompt."""
    options = replace(ENCODER, padding_side=side)
    make = functools.partial(DualEncoderSystem, bert, options, data=None, device=CPU, dtype=torch.float32)
    tuning = TuneOptions(length=9, prompt_dropout=0.0, sides="untied", position_offset=True)
    system = make(tuning=tuning)
    system.prompt().save(tmp_path)
    encoder = Encoder(str(bert), options, tasks={"t": load_prompt(tmp_path)})
    texts = ["w1 w2 w3", " ".join(["w4"] * 30), "w5"]
    usual = make(tuning=replace(tuning, position_offset=False), start=system.prompt())
    for text_side in ("query", "passage"):
        expected = encoder.encode(texts, side=text_side, task="t")
        np.testing.assert_allclose(system.encode(texts, text_side), expected, atol=1e-5)
        assert np.abs(usual.encode(texts, text_side) - expected).max() > 1e-3  # the same numbers, other positions
    with pytest.raises(InputError, match="passage_length 48 and a prompt of 17 tokens need 65 positions"):
        make(tuning=replace(tuning, length=17))
    make(tuning=replace(tuning, length=17, sides="query"))
    with pytest.raises(InputError, match="position_offset: method finetune trains no prompt"):
        TuneOptions(method="finetune", position_offset=True)
    with pytest.raises(InputError, match="position_offset: a text starts at its usual position after a prompt that is"):
        TuneOptions(method="finetune", joint_prompt=True, position_offset=True)
    with pytest.raises(InputError, match="joint_prompt: found method prompt, sides tied and parametrisation embedding"):
        TuneOptions(joint_prompt=True)


@pytest.mark.parametrize("method", ["prompt", "lora", "finetune", "joint"])
@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_grad_cache_gives_the_gradients_of_the_whole_batch(bert: Path, method: str, temperature: float) -> None:
    options = {"method": "finetune", "joint_prompt": True} if method == "joint" else {"method": method}
    make = functools.partial(dual_system, bert, **options, temperature=temperature)
    whole = gradients(make(dropout=0.0), grad_cache="off")  # one chunk per side
    chunked = make(dropout=0.0, chunk=200)
    assert len(chunked.batch(0, 0, 1).chunks) > 4
    assert_equal(gradients(chunked, grad_cache="on"), whole)
    with_dropout = gradients(make(chunk=200), grad_cache="off")  # one graph over the same chunks and random states
    assert_equal(gradients(make(chunk=200), grad_cache="on"), with_dropout)
    assert abs(with_dropout["loss"] - whole["loss"]) > 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_prompts_only(bert: Path, checkpointing: bool) -> None:
    options = TuneOptions(length=4, batch=8, sides="untied", prompt_dropout=0.0)
    system = DualEncoderSystem(
        bert, ENCODER, options, make_data(), device=CPU, dtype=torch.float32, checkpointing=checkpointing
    )
    result = gradients(system)
    assert {*result} == {"loss", "prompts.query.embedding", "prompts.passage.embedding"}
    for name in result.keys() - {"loss"}:
        by_layer = result[name].view(4, 2, -1)
        assert bool((by_layer.abs().amax(dim=(0, 2)) > 0).all())


def test_a_batch_is_the_same_for_any_number_of_workers(bert: Path) -> None:
    system = dual_system(bert)
    whole = system.batch(7, 0, 1)
    shares = [system.batch(7, rank, 3) for rank in range(3)]
    rows = np.concatenate([chunk.rows["dense"] for share in shares for chunk in share.chunks])
    assert sorted(rows) == list(range(whole.outputs["dense"].rows))
    for share in shares:
        assert share.outputs == whole.outputs
        assert torch.equal(share.arguments["ignored"], whole.arguments["ignored"])
    batches = [system.batch(step, 0, 1) for step in range(40)]
    assert any(bool(batch.arguments["ignored"].any()) for batch in batches), (
        "another positive of a query is not a negative"
    )
    sizes = [batch.outputs["dense"].rows for batch in batches]
    assert min(sizes) < 12 * 4, "a passage that two queries share is in the batch once"
    for batch in batches:
        assert not bool(batch.arguments["ignored"][torch.arange(12), batch.arguments["positives"]].any())


def test_a_copy_of_a_positive_is_no_negative_in_the_batch(bert: Path) -> None:
    """Every passage is a copy of the one that follows it; the batches are drawn as DPTDR's authors do."""
    system = dual_system(bert, draw_positive="first", draw_negatives="windows")
    assert system.data is not None
    copies = [np.setdiff1d((rows + 1) % system.data.num_passages, rows) for rows in system.data.positives]
    system.data = replace(system.data, copies=copies)
    masked = 0
    for step in range(6):
        given = system.batch(step, 0, 1).arguments
        queries, rows = batch_at(system.data, system.tuning, step, draw_positive="first", draw_negatives="windows")
        passages = np.unique(rows)
        for place, query in enumerate(queries):
            expected = np.isin(passages, [*system.data.positives[query], *copies[query]])
            expected[given["positives"][place]] = False
            assert given["ignored"][place].numpy().tolist() == expected.tolist()
            assert passages[given["positives"][place]] == system.data.positives[query][0]
            masked += int(np.isin(passages, copies[query]).sum())
    assert masked > 10


@pytest.mark.parametrize("method", ["prompt", "lora", "finetune"])
def test_two_workers_compute_the_gradients_of_one(two_workers: TwoWorkers, bert: Path, method: str) -> None:
    """The passages of the other worker are negatives, and receive gradients."""
    actual, _ = two_workers.run(cases.summed_gradients, bert, method)
    assert_equal(actual, gradients(dual_system(bert, dropout=0.0, method=method)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_deepspeed_stage_equals_one_worker_of_torch(
    two_deepspeed_workers: TwoWorkers, bert: Path, stage: int
) -> None:
    """Four steps with weight decay and clipping, the last one from a state that was loaded."""
    method = "prompt" if stage < 2 else "finetune"
    system = dual_system(bert, dropout=0.0, method=method)
    trainer = Trainer(system, LoopOptions(steps=6, lr=1e-2), device=CPU, dtype=torch.float32)
    norms = record_norms(trainer)
    losses = [trainer.step(number) for number in range(4)]
    expected = {"loss": losses[-1], "norm": torch.tensor(norms[-1]), **trainer.stepper.state()}
    actual, _ = two_deepspeed_workers.run(cases.resumed_steps, bert, method, stage, {})
    for name in [name for name in expected if name.endswith("key.bias")]:
        # This gradient is 0 except for rounding, which AdamW amplifies.
        del expected[name], actual[name]
    assert_equal(actual, expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_grad_cache_draws_the_same_dropout_under_deepspeed(
    two_deepspeed_workers: TwoWorkers, bert: Path, stage: int, dtype: torch.dtype
) -> None:
    for actual in two_deepspeed_workers.run(cases.losses_with_dropout, bert, stage, dtype):
        assert actual["on"] == pytest.approx(actual["off"], rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_sharded_weights_are_used_and_saved_whole(two_deepspeed_workers: TwoWorkers, tmp_path: Path) -> None:
    # DeepSpeed shards only weights of this size.
    large = save_bert(tmp_path / "large", hidden=256, spread=0.1)
    out = tmp_path / "out"
    out.mkdir()
    results = two_deepspeed_workers.run(cases.sharded_weights, large, out, {})
    expected = Encoder(str(out), ENCODER).encode(LONG_AND_SHORT, side="passage")
    assert len({row.tobytes() for row in expected.round(3)}) == 2
    for vectors, first in results:
        np.testing.assert_allclose(vectors, expected, atol=1e-4)
        np.testing.assert_allclose(first, expected[:1], atol=1e-4)


def train(system: DualEncoderSystem, checkpoints: Checkpoints, evaluate: Any = None, **loop: Any) -> Any:
    options = LoopOptions(**{"steps": 9, "lr": 1e-2, "checkpoint_every": 2, **loop})
    return Trainer(system, options, device=CPU, dtype=torch.float32).train(checkpoints.hooks(), evaluate)


@pytest.mark.parametrize("method", ["prompt", "finetune"])
def test_a_run_that_was_killed_ends_with_the_same_weights(bert: Path, tmp_path: Path, method: str) -> None:
    whole = dual_system(bert, method=method)
    progress = train(whole, Checkpoints(tmp_path / "whole"))
    assert progress.steps == 9
    with pytest.raises(KeyboardInterrupt):
        train(dual_system(bert, method=method), Checkpoints(tmp_path / "killed", die_at=6))
    resumed, checkpoints = dual_system(bert, method=method), Checkpoints(tmp_path / "killed")
    again = train(resumed, checkpoints)
    assert checkpoints.reports.pop(0) == RunResumed(4)
    assert [report.step for report in checkpoints.step_reports] == [5, 6, 7, 8, 9]
    assert again.curve == progress.curve
    expected = dict(whole.module.named_parameters())
    for name, parameter in resumed.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_run_on_fewer_workers_resumes_with_the_same_batches(
    two_workers: TwoWorkers, bert: Path, tmp_path: Path
) -> None:
    """Two workers, which are lost after four of nine steps; then one worker with as many threads."""
    two_workers.run(cases.first_four_steps, bert, tmp_path / "resumed")
    steps: list[int] = []
    resumed = dual_system(bert, dropout=0.0)
    batch = resumed.batch

    def record(step: int, rank: int, world: int) -> Any:
        steps.append(step)
        return batch(step, rank, world)

    resumed.batch = record  # type: ignore[method-assign]
    progress = train(resumed, Checkpoints(tmp_path / "resumed"))
    whole = dual_system(bert, dropout=0.0)
    expected = train(whole, Checkpoints(tmp_path / "whole"))
    assert {*steps} == {4, 5, 6, 7, 8}
    assert progress.steps == expected.steps == 9
    losses, expected_losses = ([loss for _, loss, *_ in each.curve] for each in (progress, expected))
    np.testing.assert_allclose(losses, expected_losses, atol=1e-4)
    for (name, one), other in zip(resumed.module.named_parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3, msg=name)


class Shuffled:
    """A Refresh whose negatives are a function of the weights.

    Attributes:
        taken: Number of calls of `take`.
    """

    def __init__(self, system: DualEncoderSystem):
        self.system, self.taken = system, 0

    def mine(self) -> torch.Tensor:
        matrix = self.system.prompts["both"].matrix()  # type: ignore[operator,union-attr]
        seed = int(matrix.abs().sum() * 1e6) % 2**31
        return torch.from_numpy(np.random.default_rng(seed).integers(60, size=(120, 3)))

    def train_on(self, mined_rows: torch.Tensor) -> None:
        assert self.system.data is not None
        self.taken += 1
        negatives = [np.setdiff1d(rows, own) for rows, own in zip(mined_rows, self.system.data.positives, strict=True)]
        self.system.data = replace(self.system.data, negatives=negatives)


def cuts_of_batches(steps: int) -> dict[str, dict[str, int]]:
    """Returns the counts of `short_system`, whose texts have a token for each word, and two special tokens."""
    data, options = make_data(), TuneOptions(length=4, batch=12, negatives_per_query=2)
    lengths: dict[str, list[int]] = {"queries": [], "passages": []}
    for step in range(steps):
        queries, rows = batch_at(data, options, step)
        lengths["queries"] += [len(data.queries[query].split()) + 2 for query in queries]
        lengths["passages"] += [len(text.split()) + 2 for text in data.passages(np.unique(rows))[1]]
    counts = {}
    for noun, limit in (("queries", 6), ("passages", 20)):
        over = [length - limit for length in lengths[noun] if length > limit]
        counts[noun] = Cuts(len(lengths[noun]), sum(lengths[noun]), len(over), sum(over), limit).to_dict()
    return counts


def test_cut_texts_of_all_steps_are_counted_after_a_kill_too(bert: Path, tmp_path: Path) -> None:
    def run(checkpoints: Checkpoints) -> list[dict[str, Any]]:
        progress = cases.train(cases.short_system(bert), checkpoints)
        return [progress.cuts, *(report.cuts for report in checkpoints.step_reports)]

    whole, resumed = cases.whole_and_resumed(run, tmp_path)
    assert whole[0] == resumed[0] == cuts_of_batches(6)
    up_to = (0, 0, 2, 2, 4, 6)  # the last checkpoint before each step's note; after the last step, all steps
    assert whole[1:] == [cuts_of_batches(step) if step else {} for step in up_to]


def test_the_texts_of_all_workers_are_counted(two_workers: TwoWorkers, bert: Path, tmp_path: Path) -> None:
    assert two_workers.run(cases.cuts_of_six_steps, bert, tmp_path)[0] == cuts_of_batches(6)


def test_a_resumed_run_uses_the_negatives_mined_last(bert: Path, tmp_path: Path) -> None:
    """Mined at steps 3 and 6, killed after the checkpoint at 6: the resumed run trains on the negatives of step 6."""

    def run(checkpoints: Checkpoints) -> tuple[DualEncoderSystem, Shuffled]:
        system = dual_system(bert)
        refresh = Shuffled(system)
        options = LoopOptions(steps=9, lr=1e-2, checkpoint_every=2, refresh_every=3)
        Trainer(system, options, device=CPU, dtype=torch.float32).train(checkpoints.hooks(), None, refresh)
        return system, refresh

    whole, refresh = run(Checkpoints(tmp_path / "whole"))
    assert refresh.taken == 2
    plain = dual_system(bert)
    train(plain, Checkpoints(tmp_path / "plain"))
    assert not torch.equal(plain.prompts["both"].embedding, whole.prompts["both"].embedding)
    with pytest.raises(KeyboardInterrupt):
        run(Checkpoints(tmp_path / "kept", die_at=8))
    system, again = run(Checkpoints(tmp_path / "kept"))
    assert again.taken == 1
    assert torch.equal(system.prompts["both"].embedding, whole.prompts["both"].embedding)


def test_a_run_that_is_stopped_resumes_after_the_step_that_it_has_saved(bert: Path, tmp_path: Path) -> None:
    """Stopped before the first step, after a step that measures and mines, after a plain one, and after the last.

    Both runs together measure and mine as often as one that is not stopped, and end with the same weights.
    """

    def run(checkpoints: Checkpoints) -> tuple[dict[str, Any], int]:
        system = dual_system(bert)
        measured: list[float] = []

        def evaluate() -> float:
            measured.append(
                sum(float(weight.detach().abs().sum()) for weight in trained_parameters(system.module).values())
            )
            return measured[-1]

        loop = LoopOptions(steps=9, lr=1e-2, evaluate_every=3, refresh_every=3)
        trainer = Trainer(system, loop, device=CPU, dtype=torch.float32)
        stops = checkpoints.stop_at is not None
        with pytest.raises(Stopped) if stops else contextlib.nullcontext():
            trainer.train(checkpoints.hooks(), evaluate, Shuffled(system))
        return {} if stops else trainer.stepper.state(), len(measured)

    whole, times = run(Checkpoints(tmp_path / "whole"))
    assert times == 4
    for stop_at, saved in ((0, []), (3, [3]), (5, [3, 5]), (9, [3, 6, 9])):
        stopped = Checkpoints(tmp_path / f"stopped-{stop_at}", stop_at=stop_at)
        _, before = run(stopped)
        assert stopped.saved == saved
        resumed = Checkpoints(tmp_path / f"stopped-{stop_at}")
        state, after = run(resumed)
        assert resumed.reports[0] == (RunResumed(stop_at) if stop_at else StartMeasured(ANY))
        assert before + after == times + (stop_at == 0)
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], whole[name]) for name in whole), stop_at


@pytest.mark.parametrize(("method", "zero"), [("prompt", None), ("prompt", 1), ("finetune", 2)])
def test_all_workers_stop_and_save_at_the_same_step(
    request: pytest.FixtureRequest, bert: Path, tmp_path: Path, method: str, zero: int | None
) -> None:
    pair: TwoWorkers = request.getfixturevalue("two_workers" if zero is None else "two_deepspeed_workers")
    whole, resumed = pair.run(cases.stopped_and_resumed, bert, tmp_path, method, zero)[0]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("minutes", "seconds", "drains_at", "saved"),
    [
        (5.0, 100.0, None, [3, 6, 8]),
        (0.0, 100.0, None, [8]),
        (5.0, 4.0, 2, [2, 5, 8]),
        (0.0, 4.0, 3, [3, 6, 8]),
        (0.0, 20.0, 1, [1, 3, 5, 7, 8]),
    ],
)
def test_a_checkpoint_is_written_once_the_last_one_is_old(
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    seconds: float,
    drains_at: int | None,
    saved: list[int],
) -> None:
    """The clock goes forward whenever it is read: once per step and checkpoint.

    While a node is draining, a checkpoint is old after 10 s, or after twice the time of the last one.
    """
    monkeypatch.setattr(training, "time", clock(seconds))
    checkpoints = Checkpoints(tmp_path / "kept", drains_at=drains_at or math.inf)
    train(dual_system(bert), checkpoints, steps=8, checkpoint_every=100, checkpoint_minutes=minutes)
    assert checkpoints.saved == saved
    draining = [report for report in checkpoints.reports if isinstance(report, NodeDraining)]
    assert draining == ([NodeDraining(drains_at, 10.0)] if drains_at else [])


def test_a_draining_node_is_reported_once_the_steps_are_decided(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nothing is saved."""
    monkeypatch.setattr(training, "time", clock(0.5))
    checkpoints = Checkpoints(tmp_path / "draining", drains_at=1)
    train(dual_system(bert), checkpoints, steps=1000, max_minutes=0.25, warm_up=0.2)
    decided = next(report.step for report in checkpoints.step_reports if report.run_steps)
    [draining] = [report for report in checkpoints.reports if isinstance(report, NodeDraining)]
    assert checkpoints.saved[:2] == [decided, draining.step]
    assert checkpoints.polls == 1


def test_a_time_limit_decides_the_steps_once_and_a_killed_run_keeps_them(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes forward by 0.5 s whenever it is read. Three steps take 6 s with all readings; each takes 0.5 s."""

    def run(name: str, seconds: float, die_at: int | None = None) -> tuple[Checkpoints, dict[str, Any], Any]:
        monkeypatch.setattr(training, "time", clock(seconds))
        system, checkpoints = dual_system(bert), Checkpoints(tmp_path / name, die_at=die_at)
        with pytest.raises(KeyboardInterrupt) if die_at else contextlib.nullcontext():
            progress = train(system, checkpoints, steps=1000, max_minutes=0.25, warm_up=0.2)
            return checkpoints, dict(system.module.state_dict()), progress
        return checkpoints, {}, None

    checkpoints, expected, progress = run("whole", 0.5)
    steps = progress.run_steps
    assert 15 < steps < 25
    assert progress.steps == steps
    assert checkpoints.saved[:3] == [3, 4, 6]  # the step after which the number is decided
    rates = [lr for _, _, lr, _ in progress.curve]
    assert max(rates[:3]) < 1e-3  # 200 steps of warm-up, as long as the number of steps is unknown
    assert max(rates[3:]) > 9e-3
    assert rates[-1] == pytest.approx(1e-2 / (steps - round(0.2 * steps)))  # one step before 0
    assert [report.run_steps for report in checkpoints.step_reports] == [None] * 2 + [steps] * (steps - 2)
    run("killed", 0.5, die_at=8)
    resumed, weights, again = run("killed", 50.0)  # a hundred times slower, and still as many steps
    assert resumed.reports[0] == RunResumed(6)
    assert again.curve == progress.curve
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert run("early", 0.5, die_at=3)[0].saved == []


def test_the_steps_that_fit_are_those_of_the_measured_speed() -> None:
    """The first step is slow; measurements on the dev split count as parts of the steps."""
    measured = SpeedMeasurement(100.0, [30.0] + [1.0] * 8)
    assert measured.fit_steps(9.0, 1000, 0) is None
    measured.step_s.append(1.0)
    assert measured.fit_steps(1.0, 1000, 0) is None  # less than 2% of the time
    assert measured.fit_steps(10.0, 1000, 0) == 10 + 85
    assert measured.fit_steps(10.0, 40, 0) == 40
    measured.evaluation_s = 5.0
    assert measured.fit_steps(10.0, 1000, 5) == 10 + 40


def test_a_time_limit_only_lowers_the_number_of_steps_and_always_ends(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, expected in [(0.001, 14), (1e6, 4)]:
        monkeypatch.setattr(training, "time", clock(seconds))
        progress = train(dual_system(bert), Checkpoints(tmp_path / f"{seconds}"), steps=14, max_minutes=1.0)
        assert progress.steps == expected


def test_all_workers_make_the_steps_that_rank_0_decides(two_workers: TwoWorkers, bert: Path, tmp_path: Path) -> None:
    first, second = two_workers.run(cases.limited_run, bert, tmp_path)
    assert first == second
    assert 10 < first[0] == first[1] < 60


def test_the_quality_before_the_first_step_is_reported_and_changes_nothing(bert: Path, tmp_path: Path) -> None:
    """It counts neither as the best one nor for patience; the weights are those of a run that measures at the end."""
    data = make_data()
    rows = np.arange(data.num_passages)
    dev = DevSet(data.queries[::2], [np.array([row]) for row in rows], data.passages(rows)[1])
    qualities = iter([0.9, 0.1, 0.2])
    measured, plain = dual_system(bert), dual_system(bert)

    def evaluate() -> float:
        dev.mrr(measured)
        torch.rand(7)
        return next(qualities)

    checkpoints, without = Checkpoints(tmp_path / "measured"), Checkpoints(tmp_path / "plain")
    progress = train(measured, checkpoints, evaluate, steps=4, evaluate_every=2, patience=1)
    train(plain, without, steps=4)
    assert checkpoints.reports[0] == StartMeasured(0.9)
    assert (progress.best, progress.best_step, progress.since) == (0.2, 4, 0)
    assert [point[3] for point in progress.curve] == [None, 0.1, None, 0.2]
    assert not isinstance(without.reports[0], StartMeasured)
    assert torch.equal(measured.prompts["both"].embedding, plain.prompts["both"].embedding)


def test_a_prompts_checkpoint_holds_no_backbone(bert: Path, tmp_path: Path) -> None:
    train(dual_system(bert), Checkpoints(tmp_path / "kept"))
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert {*file.keys()} == {f"{kind}.prompts.both.embedding" for kind in ("weight", "exp_avg", "exp_avg_sq")}


def test_the_best_is_kept_and_training_ends_early(bert: Path, tmp_path: Path) -> None:
    qualities = iter([0.9, 0.2, 0.5, 0.4, 0.3, 0.9])
    system = dual_system(bert)
    progress = train(
        system, Checkpoints(tmp_path / "kept"), lambda: next(qualities), steps=50, evaluate_every=3, patience=2
    )
    assert (progress.best, progress.best_step, progress.steps) == (0.5, 6, 12)
    halfway = dual_system(bert)
    train(halfway, Checkpoints(tmp_path / "other"), lambda: 0.0, steps=50, evaluate_every=3, patience=1)
    assert not torch.equal(system.prompts["both"].embedding, halfway.prompts["both"].embedding)


def test_a_missing_best_checkpoint_is_an_error(bert: Path, tmp_path: Path) -> None:
    hooks = replace(Checkpoints(tmp_path / "kept").hooks(), load_best=lambda: None)
    qualities = iter([0.9, 0.5, 0.1])
    options = LoopOptions(steps=4, lr=1e-3, evaluate_every=2)
    trainer = Trainer(dual_system(bert), options, device=CPU, dtype=torch.float32)
    with pytest.raises(InputError, match="the best checkpoint, of step 2, is gone"):
        trainer.train(hooks, lambda: next(qualities))


def test_the_curve_of_a_long_run_keeps_some_points(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CURVE_POINTS", 2)
    progress = train(dual_system(bert), Checkpoints(tmp_path / "kept"), lambda: 0.5, steps=9, evaluate_every=3)
    assert [point[0] for point in progress.curve] == [3, 4, 6, 8, 9]


def test_training_raises_the_quality_on_the_dev_split(bert: Path, tmp_path: Path) -> None:
    data = make_data()
    rows = np.arange(data.num_passages)
    dev = DevSet(data.queries[::2], [np.array([row]) for row in rows], data.passages(rows)[1])
    for method, lr in (("finetune", 3e-3), ("prompt", 0.1)):
        system = dual_system(bert, method=method, dropout=0.0)
        before = dev.mrr(system)
        train(system, Checkpoints(tmp_path / method), steps=60, lr=lr)
        assert dev.mrr(system) > before + 0.1, method


def test_a_loss_that_is_not_finite_is_reported_with_its_step(bert: Path, tmp_path: Path) -> None:
    system, checkpoints = dual_system(bert, method="finetune"), Checkpoints(tmp_path / "kept")
    before = system.loss

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        return before(outputs, batch) * (float("nan") if len(checkpoints.reports) == 5 else 1.0)

    system.loss = loss  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 6: the loss is nan; the last checkpoint is from before it"):
        train(system, checkpoints)
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 4


def test_a_collapsed_model_is_not_the_best(bert: Path, tmp_path: Path) -> None:
    """Equal vectors give MRR 0. Vectors that are not finite end the training, and no checkpoint is written."""
    data = make_data()
    rows = np.arange(data.num_passages)
    dev = DevSet(data.queries[::2], [np.array([row]) for row in rows], data.passages(rows)[1])
    system, checkpoints = dual_system(bert), Checkpoints(tmp_path / "kept")
    system.encode = lambda texts, *_: np.ones((len(texts), 4), np.float32)  # type: ignore[method-assign]
    assert dev.mrr(system) == 0.0
    system.encode = lambda texts, *_: np.full((len(texts), 4), np.nan, np.float32)  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 3: the vectors or scores of the dev split are not finite; the last"):
        train(system, checkpoints, lambda: dev.mrr(system), evaluate_every=3)
    assert [*(tmp_path / "kept").iterdir()] == [tmp_path / "kept" / "last"]
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 2


def test_weights_that_are_not_finite_are_not_saved(bert: Path, tmp_path: Path) -> None:
    system, checkpoints = dual_system(bert), Checkpoints(tmp_path / "kept")
    before = system.batch

    def batch(step: int, rank: int, world: int) -> Any:
        if step == 3:
            with torch.no_grad():
                system.prompts["both"].embedding[0, 0] = torch.inf  # type: ignore[index,union-attr]
        return before(step, rank, world)

    system.batch = batch  # type: ignore[method-assign]
    system.loss = lambda outputs, batch: outputs["dense"].nan_to_num().sum() * 0  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"step 4: (its weights are|the gradient's norm is)"):
        train(system, checkpoints)
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 2


def test_a_prompt_starts_from_another(bert: Path, tmp_path: Path) -> None:
    first = dual_system(bert, sides="untied")
    make = functools.partial(DualEncoderSystem, bert, ENCODER, data=None, device=CPU, dtype=torch.float32)
    tied = TuneOptions(length=4)
    system = make(tuning=tied, start=first.prompt())
    assert torch.equal(system.prompts["both"].matrix(), first.prompts["query"].matrix())  # type: ignore[operator,union-attr]
    again = make(tuning=replace(tied, sides="untied"), start=first.prompt())
    assert torch.equal(again.prompts["passage"].matrix(), first.prompts["passage"].matrix())  # type: ignore[operator,union-attr]
    scaled = DualEncoderSystem(bert, replace(ENCODER, normalize=True), tied, None, device=CPU, dtype=torch.float32)
    for encoder, start in ((replace(ENCODER, normalize=True), first.prompt()), (ENCODER, scaled.prompt())):
        system = DualEncoderSystem(bert, encoder, tied, None, device=CPU, dtype=torch.float32, start=start)
        actual = system.prompt().query
        assert actual is not None
        assert start.query is not None
        assert torch.equal(actual, start.query)
    query = make(tuning=replace(tied, sides="query")).prompt()
    for tuning, message in [
        (replace(tied, length=5), "expected \\(2, 2, 4, 5, 8\\): use its length"),
        (replace(tied, parametrisation="mlp"), "mlp cannot start from an initial prompt"),
        (replace(tied, sides="untied"), "missing for this side"),
    ]:
        with pytest.raises(InputError, match=message):
            make(tuning=tuning, start=query)
    other = save_bert(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="for another backbone"):
        DualEncoderSystem(other, ENCODER, tied, None, device=CPU, dtype=torch.float32, start=query)


def test_cls_pooling_of_a_causal_backbone_is_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2Model

    bert = save_bert(tmp_path / "bert")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "gpt")
    GPT2Model(GPT2Config(vocab_size=600, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        tmp_path / "gpt"
    )
    with pytest.raises(InputError, match="the first token of a GPT2Model sees no other"):
        Encoder(str(tmp_path / "gpt"), ENCODER)
    assert Encoder(str(tmp_path / "gpt"), replace(ENCODER, pooling="last")).encode(["w1"]).shape == (1, 32)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_fine_tuned_model_opens_in_sentence_transformers(
    bert: Path, tmp_path: Path, pooling: Any, normalize: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    options = replace(ENCODER, pooling=pooling, normalize=normalize, query_prefix="w1 ", query_length=48)
    tuning = TuneOptions(method="finetune", batch=8)
    system = DualEncoderSystem(bert, options, tuning, make_data(), device=CPU, dtype=torch.float32)
    train(system, Checkpoints(tmp_path / "kept"), steps=3)
    (tmp_path / "model").mkdir()
    system.save(tmp_path / "model")
    assert system.data is not None
    texts = list(system.data.queries[:9])
    peer = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    expected = peer.encode(texts, prompt_name="query")
    ours = Encoder(str(tmp_path / "model"), EncoderOptions(dtype="float32", compile="never"))
    np.testing.assert_allclose(ours.encode(texts, side="query"), expected, atol=1e-5)
    np.testing.assert_allclose(system.encode(texts, "query"), expected, atol=1e-5)


def test_a_saved_prompt_loads_unchanged(bert: Path, tmp_path: Path) -> None:
    system = dual_system(bert, sides="untied", parametrisation="mlp")
    system.prompt().save(tmp_path)
    loaded = load_prompt(tmp_path)
    for side in ("query", "passage"):
        prompt = system.prompts[side]
        assert torch.equal(loaded.fixed_matrix(side), prompt.matrix())  # type: ignore[arg-type,operator,union-attr]
    assert loaded.options == replace(ENCODER, compile="auto")
