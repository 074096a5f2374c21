"""The training loop with a dual encoder: what must be equal is equal, and what is interrupted goes on."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import VOCABULARY, save_bert

from retriever import training
from retriever.dual import DevSet, DualSystem, TuneOptions
from retriever.encoder import Encoder
from retriever.errors import InputError
from retriever.losses import contrastive_loss
from retriever.options import EncoderOptions
from retriever.prompts import load_prompt
from retriever.reranker_data import TrainingData
from retriever.stepping import trained
from retriever.training import Hooks, LoopOptions, Progress, Trainer

ENCODER = EncoderOptions(pooling="cls", query_length=16, passage_length=48, dtype="float32", compile="never")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def make_data(passages: int = 60) -> TrainingData:
    """Each question is words of its passage; two questions a passage, and some questions have two answers."""
    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in draw.integers(VOCABULARY, size=draw.integers(10, 40))) for _ in range(passages)]
    queries = [" ".join(texts[number // 2].split()[:6]) for number in range(2 * passages)]
    positives = [np.array([number // 2, *([(number // 2 + 9) % passages] if number % 4 == 0 else [])])
                 for number in range(2 * passages)]  # fmt: skip
    negatives = [np.setdiff1d(draw.integers(passages, size=5), own) for own in positives]
    return TrainingData(queries, positives, negatives, passages,
                        lambda rows: ([""] * len(rows), [texts[row] for row in rows]))  # fmt: skip


def system(bert: Path, dropout: float = 0.1, **tuning: Any) -> DualSystem:
    options = TuneOptions(**{"length": 4, "batch": 12, "negatives_per_query": 2, "prompt_dropout": dropout, **tuning})
    made = DualSystem(bert, ENCODER, options, make_data(), device=CPU, dtype=torch.float32)
    for module in made.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return made


def small_chunks(made: DualSystem, tokens: int = 200) -> DualSystem:
    """Several chunks a batch."""
    from retriever import dual

    def chunks(texts: Any, side: Any, rows: Any) -> Any:
        before = dual._CHUNK["cpu"]
        dual._CHUNK["cpu"] = tokens
        try:
            return DualSystem.chunks(made, texts, side, rows)
        finally:
            dual._CHUNK["cpu"] = before

    made.chunks = chunks  # type: ignore[method-assign]
    return made


def gradients(made: DualSystem, step: int = 0, *, rank: int = 0, world: int = 1, **loop: Any) -> dict[str, Any]:
    """The loss and the gradients of one step, caught before the optimizer uses them."""
    trainer = Trainer(made, LoopOptions(steps=10, lr=1e-3, **loop), device=CPU, dtype=torch.float32, rank=rank,
                      world=world)  # fmt: skip
    caught: dict[str, Any] = {}

    def catch(lr: float) -> float:
        caught.update({n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                       for n, p in trained(made.module).items()})  # fmt: skip
        made.module.zero_grad()
        return 0.0

    trainer.stepper.step = catch  # type: ignore[method-assign]
    made.module.train()
    loss = trainer.step(step)
    return {"loss": loss, **caught}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], close: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    assert found["loss"] == pytest.approx(expected["loss"], abs=close)
    for name in found.keys() - {"loss"}:
        torch.testing.assert_close(found[name], expected[name], atol=close, rtol=1e-3)


def test_the_loss_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    queries, passages = torch.randn(5, 8), torch.randn(9, 8)
    positives = torch.tensor([3, 0, 8, 3, 1])
    ignored = torch.zeros(5, 9, dtype=torch.bool)
    ignored[0, 5] = True
    total = 0.0
    for place, query in enumerate(queries.double()):
        weights = [torch.exp(query @ p / 0.5) for n, p in enumerate(passages.double()) if not ignored[place, n]]
        total += -torch.log(torch.exp(query @ passages[positives[place]].double() / 0.5) / sum(weights)).item()
    assert contrastive_loss(queries, passages, positives, 0.5, ignored).item() == pytest.approx(total / 5, rel=1e-5)


@pytest.mark.parametrize("method", ["prompt", "finetune"])
@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_grad_cache_is_the_whole_batch(bert: Path, method: str, temperature: float) -> None:
    make = functools.partial(system, bert, method=method, temperature=temperature)
    whole = gradients(make(dropout=0.0), grad_cache="off")  # one chunk a side
    chunked = small_chunks(make(dropout=0.0))
    assert len(chunked.batch(0, 0, 1).chunks) > 4
    assert_equal(gradients(chunked, grad_cache="on"), whole)
    with_dropout = gradients(small_chunks(make()), grad_cache="off")  # one graph over the same chunks and random states
    assert_equal(gradients(small_chunks(make()), grad_cache="on"), with_dropout)
    assert abs(with_dropout["loss"] - whole["loss"]) > 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_prompts_only(bert: Path, checkpointing: bool) -> None:
    made = DualSystem(bert, ENCODER, TuneOptions(length=4, batch=8, sides="untied", prompt_dropout=0.0), make_data(),
                      device=CPU, dtype=torch.float32, checkpointing=checkpointing)  # fmt: skip
    found = gradients(made)
    assert {*found} == {"loss", "prompts.query.embedding", "prompts.passage.embedding"}
    for name in found.keys() - {"loss"}:
        by_layer = found[name].view(4, 2, -1)
        assert bool((by_layer.abs().amax(dim=(0, 2)) > 0).all())


def test_a_batch_is_the_same_for_any_number_of_workers(bert: Path) -> None:
    made = system(bert)
    whole = made.batch(7, 0, 1)
    shares = [made.batch(7, rank, 3) for rank in range(3)]
    rows = np.concatenate([chunk.rows for share in shares for chunk in share.chunks])
    assert sorted(rows) == list(range(whole.total))
    for share in shares:
        assert share.total == whole.total
        assert torch.equal(share.given["ignored"], whole.given["ignored"])
    seen = [made.batch(step, 0, 1) for step in range(40)]
    assert any(bool(batch.given["ignored"].any()) for batch in seen), "a question's other answer is no negative"
    assert any(batch.total < 12 * 4 for batch in seen), "a passage that two questions bring goes in once"
    for batch in seen:
        assert not bool(batch.given["ignored"][torch.arange(12), batch.given["positives"]].any())


def work(rank: int, folder: str, bert: str, out: str, method: str, zero: int | None) -> None:
    import torch.distributed as dist

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    if zero is None:
        found = gradients(system(Path(bert), dropout=0.0, method=method), rank=rank, world=2)
        # What the stepper adds up.
        for name in sorted(found.keys() - {"loss"}):
            dist.all_reduce(found[name])
    else:
        made = small_chunks(system(Path(bert), dropout=0.0, method=method))
        loop = LoopOptions(steps=6, lr=1e-2, zero=zero)
        trainer = Trainer(made, loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
        shares = [sum(chunk.tokens for chunk in made.batch(0, each, 2).chunks) for each in range(2)]
        training.KEPT["cpu"] = max(shares) - 1  # one worker's graphs are too much to keep, the other's are not
        assert min(shares) < training.KEPT["cpu"]
        norms = norms_of(trainer)
        losses = [trainer.step(number) for number in range(3)]
        # As another process would go on.
        state = trainer.stepper.state()
        losses.append(trainer.step(3))
        trainer.stepper.load(state.__getitem__, 3, trainer._touch)
        assert trainer.step(3) == losses[-1]
        found = {"loss": losses[-1], "norm": torch.tensor(norms[-1]), **trainer.stepper.state()}
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def norms_of(trainer: Trainer) -> list[float]:
    """What its steps will find as the gradient's norm."""
    norms: list[float] = []
    step = trainer.stepper.step

    def noted(lr: float) -> float:
        norms.append(step(lr))
        return norms[-1]

    trainer.stepper.step = noted  # type: ignore[method-assign]
    return norms


def two_workers(tmp_path: Path, bert: Path, method: str, zero: int | None) -> dict[str, Any]:
    import torch.multiprocessing as processes

    arguments = (str(tmp_path / "meet"), str(bert), str(tmp_path / "found.pt"), method, zero)
    processes.spawn(work, arguments, nprocs=2)  # type: ignore[no-untyped-call]
    return torch.load(tmp_path / "found.pt")


@pytest.mark.parametrize("method", ["prompt", "finetune"])
def test_two_workers_are_one(bert: Path, tmp_path: Path, method: str) -> None:
    """Negatives of the other worker, with gradient."""
    assert_equal(two_workers(tmp_path, bert, method, None), gradients(system(bert, dropout=0.0, method=method)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_deepspeed_is_one_worker_of_torch(bert: Path, tmp_path: Path, stage: int) -> None:
    """Four steps with weight decay and clipping, the last one from a state that was kept."""
    method = "prompt" if stage < 2 else "finetune"
    made = system(bert, dropout=0.0, method=method)
    trainer = Trainer(made, LoopOptions(steps=6, lr=1e-2), device=CPU, dtype=torch.float32)
    norms = norms_of(trainer)
    losses = [trainer.step(number) for number in range(4)]
    expected = {"loss": losses[-1], "norm": torch.tensor(norms[-1]), **trainer.stepper.state()}
    found = two_workers(tmp_path, bert, method, stage)
    for name in [name for name in expected if name.endswith("key.bias")]:
        del expected[name], found[name]  # whose gradient is 0 but for rounding, which AdamW makes large
    assert_equal(found, expected, 1e-4)


def work_cached(rank: int, folder: str, bert: str, out: str, stage: int, dtype: torch.dtype) -> None:
    """Losses and norms of three steps with dropout, cached and not."""
    import torch.distributed as dist

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {}
    for choice in ("off", "on"):
        options = TuneOptions(length=4, batch=12, negatives_per_query=2, method="finetune" if stage > 1 else "prompt")
        made = small_chunks(DualSystem(Path(bert), ENCODER, options, make_data(), device=CPU, dtype=dtype))
        loop = LoopOptions(steps=6, lr=1e-3, zero=stage, grad_cache=choice)  # type: ignore[arg-type]
        trainer = Trainer(made, loop, device=CPU, dtype=dtype, rank=rank, world=2)
        norms = norms_of(trainer)
        made.module.train()
        found[choice] = [trainer.step(number) for number in range(3)] + norms
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_grad_cache_draws_the_same_dropout_under_deepspeed(
    bert: Path, tmp_path: Path, stage: int, dtype: torch.dtype
) -> None:
    import torch.multiprocessing as processes

    arguments = (str(tmp_path / "meet"), str(bert), str(tmp_path / "found.pt"), stage, dtype)
    processes.spawn(work_cached, arguments, nprocs=2)  # type: ignore[no-untyped-call]
    found = torch.load(tmp_path / "found.pt")
    assert found["on"] == pytest.approx(found["off"], rel=1e-5 if dtype == torch.float32 else 1e-2)


def work_shared_out(rank: int, folder: str, bert: str, out: str) -> None:
    """Weights large enough that DeepSpeed cuts them; more chunks for one worker than for the other."""
    import torch.distributed as dist

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    made = small_chunks(system(Path(bert), dropout=0.0, method="finetune"), 100)
    trainer = Trainer(made, LoopOptions(steps=6, lr=1e-3, zero=3), device=CPU, dtype=torch.float32, rank=rank, world=2)
    made.module.train()
    trainer.step(0)
    made.module.eval()
    assert made.pooled.backbone.embeddings.word_embeddings.weight.numel() == 0, "it is whole on each worker"
    texts = ["w1 w2" if number % 2 else " ".join(["w3"] * 40) for number in range(12)]
    vectors = made.encode(texts, "passage", rank, 2)
    one = made.encode(texts[:1], "passage", rank, 2)  # nothing for the second worker
    with trainer.stepper.whole():
        if rank == 0:
            made.save(Path(out))
    if rank == 0:
        np.savez(Path(out) / "found.npz", vectors=vectors, one=one)
    dist.barrier()
    dist.destroy_process_group()


def test_weights_that_are_shared_out_are_judged_and_saved_whole(tmp_path: Path) -> None:
    import torch.multiprocessing as processes

    large = save_bert(tmp_path / "large", hidden=256, spread=0.1)
    out = tmp_path / "out"
    out.mkdir()
    processes.spawn(work_shared_out, (str(tmp_path / "meet"), str(large), str(out)), nprocs=2)  # type: ignore[no-untyped-call]
    found = np.load(out / "found.npz")
    texts = ["w1 w2" if number % 2 else " ".join(["w3"] * 40) for number in range(12)]
    expected = Encoder(str(out), ENCODER).encode(texts, side="passage")
    assert len({row.tobytes() for row in expected.round(3)}) == 2
    np.testing.assert_allclose(found["vectors"], expected, atol=1e-4)
    np.testing.assert_allclose(found["one"], expected[:1], atol=1e-4)


class Kept:
    """Checkpoints in a folder; `die_at`: the process is lost before this step's is written."""

    def __init__(self, folder: Path, die_at: int | None = None):
        self.folder, self.die_at = folder, die_at
        folder.mkdir(exist_ok=True)
        self.notes: list[dict[str, Any]] = []

    def hooks(self) -> Hooks:
        def save(name: str, step: int, write: Callable[[Path], object]) -> None:
            if self.die_at is not None and step >= self.die_at:
                raise KeyboardInterrupt
            write(self.folder / name)

        def load(name: str) -> Path | None:
            if not (self.folder / name).exists():
                return None
            return Path(shutil.copy(self.folder / name, self.folder / f"copy-{name}"))

        part = functools.partial
        return Hooks(part(load, "last"), part(save, "last"), part(load, "best"), part(save, "best"), self.notes.append)


def train(made: DualSystem, kept: Kept, evaluate: Any = None, **loop: Any) -> Any:
    options = LoopOptions(**{"steps": 9, "lr": 1e-2, "checkpoint_every": 2, **loop})
    return Trainer(made, options, device=CPU, dtype=torch.float32).train(kept.hooks(), evaluate)


@pytest.mark.parametrize("method", ["prompt", "finetune"])
def test_a_run_that_was_killed_ends_with_the_same_weights(bert: Path, tmp_path: Path, method: str) -> None:
    whole = system(bert, method=method)
    progress = train(whole, Kept(tmp_path / "whole"))
    assert progress.steps == 9
    with pytest.raises(KeyboardInterrupt):
        train(system(bert, method=method), Kept(tmp_path / "killed", die_at=6))
    resumed, kept = system(bert, method=method), Kept(tmp_path / "killed")
    again = train(resumed, kept)
    assert kept.notes.pop(0) == {"resumed": 4}
    assert [note["step"] for note in kept.notes] == [5, 6, 7, 8, 9]
    assert again.curve == progress.curve
    expected = dict(whole.module.named_parameters())
    for name, parameter in resumed.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def work_half(rank: int, folder: str, bert: str, kept: str) -> None:
    """Four of nine steps on one of two workers, which then are lost."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    loop = LoopOptions(steps=9, lr=1e-2)
    trainer = Trainer(system(Path(bert), dropout=0.0), loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
    curve: list[Any] = [[number + 1, trainer.step(number), loop.learning_rate(number), None] for number in range(4)]
    trainer._keep(Kept(Path(kept)).hooks().save, Progress(4, curve))
    dist.barrier()
    dist.destroy_process_group()


def test_with_fewer_workers_it_goes_on_with_the_same_batches(bert: Path, tmp_path: Path) -> None:
    import torch.multiprocessing as processes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (tmp_path / "kept").mkdir()
        processes.spawn(work_half, (str(tmp_path / "meet"), str(bert), str(tmp_path / "kept")), nprocs=2)  # type: ignore[no-untyped-call]
        seen: list[int] = []
        resumed = system(bert, dropout=0.0)
        before = resumed.batch
        resumed.batch = lambda step, rank, world: (seen.append(step), before(step, rank, world))[1]  # type: ignore[method-assign]
        progress = train(resumed, Kept(tmp_path / "kept"))
        whole = system(bert, dropout=0.0)
        expected = train(whole, Kept(tmp_path / "whole"))
    finally:
        torch.set_num_threads(threads)
    assert {*seen} == {4, 5, 6, 7, 8}
    assert progress.steps == expected.steps == 9
    np.testing.assert_allclose([loss for _, loss, *_ in progress.curve], [loss for _, loss, *_ in expected.curve],
                               atol=1e-4)  # fmt: skip
    for (name, one), other in zip(resumed.module.named_parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3, msg=name)


class Shuffled:
    """A Refresh whose negatives are a function of the weights; `taken`: how often they were."""

    def __init__(self, made: DualSystem):
        self.made, self.taken = made, 0

    def mine(self) -> torch.Tensor:
        matrix = self.made.prompts["both"].matrix()  # type: ignore[operator,union-attr]
        seed = int(matrix.abs().sum() * 1e6) % 2**31
        return torch.from_numpy(np.random.default_rng(seed).integers(60, size=(120, 3)))

    def take(self, mined: torch.Tensor) -> None:
        assert self.made.data is not None
        self.taken += 1
        negatives = [np.setdiff1d(rows, own) for rows, own in zip(mined, self.made.data.positives, strict=True)]
        self.made.data = replace(self.made.data, negatives=negatives)


def test_what_was_mined_anew_is_gone_on_with(bert: Path, tmp_path: Path) -> None:
    """Killed after the checkpoint at 6; mined at 3 and 6: the run that goes on trains on what was mined at 6."""

    def run(kept: Kept) -> tuple[DualSystem, Shuffled]:
        made = system(bert)
        refresh = Shuffled(made)
        options = LoopOptions(steps=9, lr=1e-2, checkpoint_every=2, refresh_every=3)
        Trainer(made, options, device=CPU, dtype=torch.float32).train(kept.hooks(), None, refresh)
        return made, refresh

    whole, mined = run(Kept(tmp_path / "whole"))
    assert mined.taken == 2
    plain = system(bert)
    train(plain, Kept(tmp_path / "plain"))
    assert not torch.equal(plain.prompts["both"].embedding, whole.prompts["both"].embedding)
    with pytest.raises(KeyboardInterrupt):
        run(Kept(tmp_path / "kept", die_at=8))
    made, again = run(Kept(tmp_path / "kept"))
    assert again.taken == 1
    assert torch.equal(made.prompts["both"].embedding, whole.prompts["both"].embedding)


def test_a_prompts_checkpoint_holds_no_backbone(bert: Path, tmp_path: Path) -> None:
    train(system(bert), Kept(tmp_path / "kept"))
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert {*file.keys()} == {f"{kind}.prompts.both.embedding" for kind in ("weight", "exp_avg", "exp_avg_sq")}


def test_the_best_is_kept_and_training_ends_early(bert: Path, tmp_path: Path) -> None:
    qualities = iter([0.2, 0.5, 0.4, 0.3, 0.9])
    made = system(bert)
    progress = train(made, Kept(tmp_path / "kept"), lambda: next(qualities), steps=50, evaluate_every=3, patience=2)
    assert (progress.best, progress.best_step, progress.steps) == (0.5, 6, 12)
    halfway = system(bert)
    train(halfway, Kept(tmp_path / "other"), lambda: 0.0, steps=50, evaluate_every=3, patience=1)
    qualities = iter([0.2, 0.5, 0.4, 0.3, 0.9])
    assert not torch.equal(made.prompts["both"].embedding, halfway.prompts["both"].embedding)


def test_a_best_checkpoint_that_is_gone_is_told(bert: Path, tmp_path: Path) -> None:
    hooks = replace(Kept(tmp_path / "kept").hooks(), load_best=lambda: None)
    qualities = iter([0.5, 0.1])
    options = LoopOptions(steps=4, lr=1e-3, evaluate_every=2)
    trainer = Trainer(system(bert), options, device=CPU, dtype=torch.float32)
    with pytest.raises(InputError, match="the best checkpoint, of step 2, is gone"):
        trainer.train(hooks, lambda: next(qualities))


def test_of_a_long_run_some_points_of_the_curve_are_kept(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "POINTS", 2)
    progress = train(system(bert), Kept(tmp_path / "kept"), lambda: 0.5, steps=9, evaluate_every=3)
    assert [point[0] for point in progress.curve] == [3, 4, 6, 8, 9]


def test_training_lifts_the_quality_that_it_is_judged_by(bert: Path, tmp_path: Path) -> None:
    data = make_data()
    every = np.arange(data.num_passages)
    dev = DevSet(data.queries[::2], [np.array([row]) for row in every], data.passages(every)[1])
    for method, lr in (("finetune", 3e-3), ("prompt", 0.1)):
        made = system(bert, method=method, dropout=0.0)
        before = dev.mrr(made)
        train(made, Kept(tmp_path / method), steps=60, lr=lr)
        assert dev.mrr(made) > before + 0.1, method


def test_a_loss_that_is_no_number_is_told_with_its_step(bert: Path, tmp_path: Path) -> None:
    made, kept = system(bert, method="finetune"), Kept(tmp_path / "kept")
    before = made.loss

    def loss(vectors: torch.Tensor, batch: Any) -> torch.Tensor:
        return before(vectors, batch) * (float("nan") if len(kept.notes) == 5 else 1.0)

    made.loss = loss  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 6: the loss is nan; the last checkpoint is from before it"):
        train(made, kept)
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 4


def test_a_collapsed_model_is_not_the_best(bert: Path, tmp_path: Path) -> None:
    """All vectors equal: an answer is not before the others. Numbers that are none end it, and are not kept."""
    data = make_data()
    every = np.arange(data.num_passages)
    dev = DevSet(data.queries[::2], [np.array([row]) for row in every], data.passages(every)[1])
    made, kept = system(bert), Kept(tmp_path / "kept")
    made.encode = lambda texts, *_: np.ones((len(texts), 4), np.float32)  # type: ignore[method-assign]
    assert dev.mrr(made) == 0.0
    made.encode = lambda texts, *_: np.full((len(texts), 4), np.nan, np.float32)  # type: ignore[method-assign]
    with pytest.raises(InputError, match="step 3: the vectors of the dev split are not finite; the last checkpoint"):
        train(made, kept, lambda: dev.mrr(made), evaluate_every=3)
    assert [*(tmp_path / "kept").iterdir()] == [tmp_path / "kept" / "last"]
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 2


def test_weights_that_are_no_numbers_are_not_kept(bert: Path, tmp_path: Path) -> None:
    made, kept = system(bert), Kept(tmp_path / "kept")
    before = made.batch

    def batch(step: int, rank: int, world: int) -> Any:
        if step == 3:
            with torch.no_grad():
                made.prompts["both"].embedding[0, 0] = torch.inf  # type: ignore[index,union-attr]
        return before(step, rank, world)

    made.batch = batch  # type: ignore[method-assign]
    made.loss = lambda vectors, batch: vectors.nan_to_num().sum() * 0  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"step 4: (its weights are|the gradient's norm is)"):
        train(made, kept)
    with safe_open(tmp_path / "kept" / "last", "pt") as file:
        assert json.loads(file.metadata()["progress"])["steps"] == 2


def test_a_prompt_begins_from_another(bert: Path, tmp_path: Path) -> None:
    first = system(bert, sides="untied")
    make = functools.partial(DualSystem, bert, ENCODER, data=None, device=CPU, dtype=torch.float32)
    tied = TuneOptions(length=4)
    made = make(tuning=tied, start=first.prompt())
    assert torch.equal(made.prompts["both"].matrix(), first.prompts["query"].matrix())  # type: ignore[operator,union-attr]
    again = make(tuning=replace(tied, sides="untied"), start=first.prompt())
    assert torch.equal(again.prompts["passage"].matrix(), first.prompts["passage"].matrix())  # type: ignore[operator,union-attr]
    query = system(bert, sides="query").prompt()
    for tuning, message in [
        (replace(tied, length=5), "expected \\(2, 2, 4, 5, 8\\): take its length"),
        (replace(tied, parametrisation="mlp"), "not an mlp"),
        (replace(tied, sides="untied"), "none for this side"),
    ]:
        with pytest.raises(InputError, match=message):
            make(tuning=tuning, start=query)
    other = save_bert(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="for another backbone"):
        DualSystem(other, ENCODER, tied, None, device=CPU, dtype=torch.float32, start=query)


def test_the_first_token_of_a_causal_backbone_is_no_text(tmp_path: Path) -> None:
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
    made = DualSystem(bert, options, TuneOptions(method="finetune", batch=8), make_data(), device=CPU,
                      dtype=torch.float32)  # fmt: skip
    train(made, Kept(tmp_path / "kept"), steps=3)
    (tmp_path / "model").mkdir()
    made.save(tmp_path / "model")
    assert made.data is not None
    texts = list(made.data.queries[:9])
    peer = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    expected = peer.encode(texts, prompt_name="query")
    ours = Encoder(str(tmp_path / "model"), EncoderOptions(dtype="float32", compile="never"))
    np.testing.assert_allclose(ours.encode(texts, side="query"), expected, atol=1e-5)
    np.testing.assert_allclose(made.encode(texts, "query"), expected, atol=1e-5)


def test_a_prompt_is_saved_and_opened(bert: Path, tmp_path: Path) -> None:
    made = system(bert, sides="untied", parametrisation="mlp")
    made.prompt().save(tmp_path)
    opened = load_prompt(tmp_path)
    for side in ("query", "passage"):
        prompt = made.prompts[side]
        assert torch.equal(opened.of(side), prompt.matrix())  # type: ignore[arg-type,operator,union-attr]
    assert opened.options == replace(ENCODER, compile="auto")
