"""A prompt for each task through a shared prefix encoder: gradients of each task's queries, workers, the saved form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_bert
from training_cases import CPU, ENCODER, Checkpoints, dual_system, gradients, make_data, train, whole_and_resumed

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.mixture_schedule import SetMixture
from riptide.retriever.training.training_data import batch_at

SYNTHESIS = SynthesisOptions(prompts=2, length=4, hidden=1, bottleneck=5, mix="after", attention="uniform")
TUNING: dict[str, Any] = {
    "sides": "query",
    "parametrisation": "per-task",
    "synthesis": SYNTHESIS,
    "batch": 12,
    "negatives_per_query": 2,
}
MIXTURE = SetMixture(("squad", "nq", "squad"), (50, 40, 30), (1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def system_of(bert: Path, mixture: SetMixture = MIXTURE, dropout: float = 0.0, **tuning: Any) -> DualEncoderSystem:
    stored = np.random.default_rng(0).normal(size=(60, 32)).astype(np.float16)
    options = TuneOptions(**{**TUNING, "prompt_dropout": dropout, **tuning})
    return DualEncoderSystem(
        bert,
        ENCODER,
        options,
        replace(make_data(), mixture=mixture),
        device=CPU,
        dtype=torch.float32,
        vectors=stored.__getitem__,
    )


def test_a_query_trains_the_prompt_of_its_task(bert: Path) -> None:
    single = system_of(bert, replace(MIXTURE, batches="one-task"))
    assert single.data is not None
    assert single.data.task_names() == ("nq", "squad")  # training sets of one name are one task
    trained = set()
    for step in range(4):
        queries, _ = batch_at(single.data, single.tuning, step)
        [task] = set(single.data.task_numbers_of(queries).tolist())
        by_name = gradients(single, step)
        gradient = by_name["prompts.query.synthesiser.basic"]
        assert bool(gradient[task].abs().max() > 0)
        assert not bool(gradient[1 - task].any())
        names = ("basic", "down.weight", "up.weight")
        assert {*by_name} == {"loss", *(f"prompts.query.synthesiser.{name}" for name in names)}
        trained.add(task)
    assert trained == {0, 1}


def test_two_shares_have_the_gradients_of_the_whole(bert: Path) -> None:
    """Each chunk holds the tasks of its queries, also that of a single query."""
    whole = system_of(bert).batch(0, 0, 1)
    expected = dict(zip(whole.chunks[0].rows["dense"].tolist(), whole.chunks[0].inputs[3].tolist(), strict=True))
    for rank in range(12):
        chunk = system_of(bert).batch(0, rank, 12).chunks[0]
        assert chunk.inputs[3].tolist() == [expected[rank]] * 2


def test_saved_prompts_are_those_of_the_tasks_and_their_mean(bert: Path, tmp_path: Path) -> None:
    system = system_of(bert)
    trainer = Trainer(system, LoopOptions(steps=4, lr=1e-2), device=CPU, dtype=torch.float32)
    losses = [trainer.step(0) for _ in range(6)]
    assert losses[-1] < losses[0]
    system.save(tmp_path)
    mean = load_prompt(tmp_path)
    prompts = {name: load_prompt(tmp_path / "tasks" / name) for name in ("nq", "squad")}
    assert mean.query is not None
    matrices = [prompt.query for prompt in prompts.values() if prompt.query is not None]
    torch.testing.assert_close(mean.query, (matrices[0] + matrices[1]) / 2)
    assert not torch.equal(*matrices)
    texts = make_data().queries[:6]
    encoder = Encoder(str(bert), ENCODER, tasks={"mean": mean, **prompts})
    np.testing.assert_allclose(encoder.encode(texts, task="mean"), system.encode(texts, "query"), atol=1e-5)
    chunk = system.batch(0, 0, 1).chunks[0]
    queries, _ = MIXTURE.queries_at(0, 0, 12)
    assert system.data is not None
    rows = chunk.rows["dense"]
    named = [("nq", "squad")[task] for task in chunk.inputs[3]]
    texts_of_batch = [system.data.queries[query] for query in queries[rows]]
    system.module.eval()
    with torch.no_grad():
        np.testing.assert_allclose(
            encoder.encode(texts_of_batch, task=named), system.forward(chunk)[0]["dense"], atol=1e-5
        )


def test_a_run_that_was_killed_ends_with_the_same_weights(bert: Path, tmp_path: Path) -> None:
    def run(checkpoints: Checkpoints) -> DualEncoderSystem:
        system = system_of(bert, dropout=0.1)
        train(system, checkpoints)
        return system

    whole, resumed = whole_and_resumed(run, tmp_path)
    for (name, one), other in zip(whole.task_prompts().items(), resumed.task_prompts().values(), strict=True):
        assert one.query is not None
        assert other.query is not None
        assert torch.equal(one.query, other.query), name


def test_prompts_need_a_task_each(bert: Path) -> None:
    with pytest.raises(InputError, match=r"2 prompts for 0 tasks \(\): expected a prompt for each"):
        dual_system(bert, **TUNING)
    with pytest.raises(InputError, match="cannot start from an initial prompt"):
        DualEncoderSystem(
            bert, ENCODER, TuneOptions(**TUNING), None, device=CPU, dtype=torch.float32, start=system_of(bert).prompt()
        )
