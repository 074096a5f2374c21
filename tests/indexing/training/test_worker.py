"""Workers without Ray: messages of a worker of Ray Train, and a run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCABULARY, save_bert

from riptide.base.errors import InputError
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.model_artifacts import StoredCheckpoint, model_folder
from riptide.indexing.store.sealed_json import begun_document
from riptide.indexing.store.store import Store
from riptide.indexing.training.cluster import run_worker
from riptide.indexing.training.local import plan_local_worker, run_local
from riptide.indexing.training.messages import (
    InvalidInput,
    Message,
    RunFinished,
    SecondsSpent,
    WorkerFailed,
    WorkerStarted,
)
from riptide.indexing.training.worker import TrainingTask
from riptide.indexing.training.workers import WorkerGroup
from riptide.indexing.work.local_runner import cores_of_process
from riptide.indexing.work.visibility import mark_store
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.training.hooks import RunResumed, StepDone
from riptide.retriever.training.training_data import TrainingData

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SmallMaker:
    """Makes a small cross-encoder, or raises an error.

    Attributes:
        backbone: The folder of the backbone.
        error: The error; None: no error.
    """

    backbone: Path
    error: Exception | None = None

    def make(self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int) -> tuple[Any, None, None]:
        if self.error is not None:
            raise self.error
        draw = np.random.default_rng(0)
        texts = [" ".join(f"w{n}" for n in draw.integers(VOCABULARY, size=8)) for _ in range(12)]
        positives, negatives = [np.array([n]) for n in range(4)], [np.array([8, 9])] * 4

        def read(rows: Any) -> tuple[list[str], list[str]]:
            return [""] * len(rows), [texts[row] for row in rows]

        data = TrainingData(texts[:4], positives, negatives, 12, read, np.empty(0, np.int64))
        options = CrossEncoderOptions(batch=4, negatives_per_query=1, max_length=32)
        return CrossSystem(self.backbone, options, data, device=device, dtype=dtype), None, None

    def judge(self, system: Any) -> dict[str, Any]:
        return {"order": "judged"}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def task_of(tmp_path: Path) -> Callable[[SmallMaker], TrainingTask]:
    """task_of(maker): a task of 3 steps with a checkpoint every 2, in a new store."""
    store = Store(str(tmp_path / "store"))

    def make(maker: SmallMaker) -> TrainingTask:
        draft = Draft(store.storage, store.cache, "models/m", begun_document("models", {}, {}, False))
        last, best = (StoredCheckpoint(store, name, "identity") for name in ("m.models", "m.models.best"))
        loop = LoopOptions(steps=3, lr=1e-3, checkpoint_every=2)
        group = WorkerGroup(workers=1, min_workers=1, cpus=1, gpus=0)
        return TrainingTask(
            draft=draft,
            last_checkpoint=last,
            best_checkpoint=best,
            loop=loop,
            maker=maker,
            dtype="float32",
            group=group,
        )

    return make


def messages_of(task: TrainingTask) -> list[Message]:
    messages: list[Message] = []
    run_worker(task, messages.append, device=CPU, rank=0, world=1)
    return messages


def test_a_worker_reports_its_start_its_steps_and_its_result(
    backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]
) -> None:
    task = task_of(SmallMaker(backbone))
    start, *steps, spent, end = messages_of(task)
    assert start == WorkerStarted(0)
    assert isinstance(spent, SecondsSpent)
    assert spent.seconds.keys() >= {"open", "tokenise", "compute", "write"}
    assert [step.step for step in steps if isinstance(step, StepDone)] == [1, 2, 3]
    assert isinstance(end, RunFinished)
    assert (end.result.steps, end.result.workers, end.result.judged) == (3, 1, {"order": "judged"})
    assert end.result.loss == steps[-1].loss
    assert messages_of(task)[:2] == [WorkerStarted(0), RunResumed(3)]
    task.draft.finish()
    assert (model_folder(task.last_checkpoint.store.open("models", "m")) / "config.json").is_file()


def test_bad_input_is_reported_and_leaves_no_draft(
    backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]
) -> None:
    task = task_of(SmallMaker(backbone, InputError("weights: cut off")))
    assert messages_of(task) == [WorkerStarted(0), InvalidInput("weights: cut off")]
    assert task.last_checkpoint.store.incomplete_keys() == []


def test_a_worker_on_a_node_that_does_not_see_the_store_names_the_node(
    backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]
) -> None:
    """The node lacks the file that the driver keeps in the store."""
    task = task_of(SmallMaker(backbone))
    messages: list[Message] = []
    store = task.last_checkpoint.store
    with mark_store(store) as marker:
        pass
    run_worker(task, messages.append, device=CPU, rank=0, world=1, marker=marker, node="node 10.0.0.7")
    [_, message] = messages
    assert isinstance(message, InvalidInput)
    assert message.problem.startswith(f"node 10.0.0.7 does not see the store {store.url}: put it on a file system that")


def test_another_error_is_reported_and_raised(backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]) -> None:
    """Ray Train then starts the worker again."""
    messages: list[Message] = []
    task = task_of(SmallMaker(backbone, OSError("no room\nand more")))
    with pytest.raises(OSError, match="no room"):
        run_worker(task, messages.append, device=CPU, rank=0, world=1)
    assert messages == [WorkerStarted(0), WorkerFailed("OSError: no room")]


def test_a_run_in_this_process_restores_the_threads(
    backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]
) -> None:
    threads, counted, shown = torch.get_num_threads(), [], []
    result = run_local(task_of(SmallMaker(backbone)), lambda *steps: counted.append(steps), shown.append)
    assert (result.steps, result.workers) == (3, 1)
    assert counted == [(1, False)] * 3
    assert [done.step for done in shown] == [1, 2, 3]
    assert torch.get_num_threads() == threads


def test_too_little_memory_of_a_gpu_is_one_line(backbone: Path, task_of: Callable[[SmallMaker], TrainingTask]) -> None:
    task = task_of(SmallMaker(backbone, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")))
    with pytest.raises(InputError, match=r"step 1: the memory of the GPU does not suffice \(CUDA out of memory"):
        run_local(task, lambda *_: None, lambda _: None)
    assert task.last_checkpoint.store.incomplete_keys() == []


@pytest.mark.parametrize(
    ("has_gpu", "gpus", "expected"), [(True, None, 1), (True, 0, 0), (True, 1, 1), (False, None, 0), (False, 0, 0)]
)
def test_a_worker_in_this_process_takes_the_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, gpus: int | None, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert plan_local_worker(1, gpus) == WorkerGroup(workers=1, min_workers=1, cpus=1, gpus=expected)


def test_what_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="parameter gpus 1: this machine has no GPU"):
        plan_local_worker(1, 1)
    with pytest.raises(InputError, match=f"expected at most {cores_of_process()}, the cores that"):
        plan_local_worker(10_000)
