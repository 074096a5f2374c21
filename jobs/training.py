"""The options that jobs of training share: how much at a time, and on what machines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jobs.cli import Common, Stage, say
from jobs.session import connect

from indexing.artifact import Artifact, fingerprint_of
from indexing.curves import Curves
from indexing.models import Checkpoints, checkpoint_names
from indexing.placement import find_places
from indexing.store import Store, artifact_key
from indexing.training_job import Maker, TrainingTask, run_training
from retriever.errors import InputError
from retriever.training import LoopOptions

QUALITY = "dev MRR@10"  # by which the best weights are known


@dataclass(frozen=True, kw_only=True)
class Training(Common):
    """Of every training."""

    batch: int
    """Rows a step, over all workers."""
    seed: int = 0
    workers: int = 1
    cpus: int = 2
    """Cores of each worker. As sums are rounded by workers and cores, both shape the result."""
    gpus: Literal[0, 1] | None = None
    """Of each worker; default: 1 where the cluster has one for each, or for --min-workers, now."""
    wait: int = 0
    """Seconds that an autoscaler's nodes may take to come; 0: there is room now."""
    min_workers: int | None = None
    """Go on with as few as these where the cluster loses places, on the same batches."""
    checkpoint_every: int = 100
    """Steps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    zero: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; default: plain data parallelism."""
    offload: bool = False
    """Keep the optimizer in the processor's memory (ZeRO 1 to 3)."""
    checkpointing: bool = False
    """Compute activations again on the way back, instead of keeping them."""
    curves: str | None = None
    """Write TensorBoard's events to this folder while it trains, and at the end a picture."""

    def check(self, row: str, frozen: str | None = None) -> None:
        """Raises InputError for workers that cannot be had. row: what a batch is of. frozen: the option by which the
        backbone does not train, None where it does."""
        if self.workers < 1 or self.cpus < 1 or self.checkpoint_every < 1 or self.batch < self.workers:
            raise InputError(f"--workers {self.workers} --cpus {self.cpus} --batch {self.batch} --checkpoint-every "
                             f"{self.checkpoint_every}: expected 1 at least, and a {row} for each worker")  # fmt: skip
        if self.wait < 0:
            raise InputError(f"--wait {self.wait}: expected seconds")
        if self.curves and "://" in self.curves:
            raise InputError(f"--curves {self.curves}: expected a folder that this machine sees")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise InputError(f"--min-workers {self.min_workers}: expected 1 to --workers {self.workers}")
        if frozen and (self.zero or 0) >= 2:
            raise InputError(f"--zero {self.zero} {frozen}: prompts are small and the backbone does not train: "
                             "give 0 or 1")  # fmt: skip

    def make(
        self, store: Store, kind: str, name: str, *, inputs: dict[str, Artifact], config: dict[str, Any],
        prepare: Callable[[], tuple[Maker, LoopOptions, dict[str, Any]]],
    ) -> Artifact:  # fmt: skip
        """kind/NAME of the store, trained now where that has not been done; kind: prompts or models.

        prepare: called on the cluster, before a training; gives what the workers make their system from, the loop, and
        what the artifact notes. Raises InputError.
        """
        places = None
        if name not in store.names(kind):
            connect(store)
            places = find_places(self.workers, self.cpus, say, gpus=self.gpus, least=self.min_workers, wait=self.wait)
        identity = fingerprint_of([{role: a.fingerprint for role, a in inputs.items()}, config])
        last, best = (Checkpoints(store, called, identity) for called in checkpoint_names(kind, name))
        with store.create(kind, name, inputs=inputs, config=config) as draft:
            if not draft.complete:
                assert places is not None
                maker, loop, notes = prepare()
                draft.note(**notes)
                task = TrainingTask(draft=draft, last=last, best=best, loop=loop, maker=maker, dtype=self.dtype,
                                    places=places)  # fmt: skip
                draft.note(**self.carry_out(task, draft.key))
        last.clear()
        best.clear()
        return store.open(kind, name)

    def drawing(self, title: str) -> Curves | None:
        """Where --curves asks for that."""
        return Curves(Path(self.curves), title=title, quality=QUALITY) if self.curves else None

    def carry_out(self, task: TrainingTask, key: str) -> dict[str, Any]:
        """Train with progress on stderr; what `run_training` returns. key: of what is made."""
        curves = self.drawing(key)
        with Stage("train", task.loop.steps, "steps") as stage:

            def attempt(write: Callable[[], object]) -> bool:
                """What cannot be written ends the picture, not the training."""
                try:
                    write()
                except (InputError, OSError) as error:
                    stage.say(f"--curves {self.curves}: {error}")
                    return False
                return True

            def note(message: dict[str, Any]) -> None:
                nonlocal curves
                stage.remark = f"loss {message['loss']:.4f}"
                if (judged := message["quality"]) is not None:
                    stage.say(f"step {message['step']:,}: {stage.remark}, {QUALITY} {judged:.4f}")
                if curves and not attempt(partial(curves.note, message)):
                    attempt(curves.close)
                    curves = None

            try:
                return run_training(task, stage.count, note, stage.say)
            except BaseException:
                if curves:
                    attempt(curves.draw_heard)
                raise
            finally:
                if curves:
                    attempt(curves.close)

    def draw(self, artifact: Artifact) -> None:
        """The whole course of what has been made, of all runs that it took."""
        if (curves := self.drawing(artifact.key)) and (picture := curves.draw(artifact.notes["curve"])):
            say(str(picture))


@dataclass(frozen=True, kw_only=True)
class Contrastive(Training):
    """Of those whose loss is over the vectors of the whole batch."""

    grad_cache: Literal["auto", "on", "off"] = "auto"


def count_steps(steps: int | None, epochs: float, rows: int, batch: int) -> int:
    """The steps that were asked for, or else those of so many epochs. Raises InputError."""
    if not (epochs > 0 and math.isfinite(epochs)):
        raise InputError(f"--epochs {epochs}: expected more than 0")
    return math.ceil(epochs * rows / batch) if steps is None else steps


def check_name(kind: str, name: str) -> None:
    """Raises InputError for a name that an artifact without generations cannot have."""
    if not name or "/" in name:
        raise InputError(f"name {name!r}: expected one, and without '/', for {kind}/NAME")
    artifact_key(kind, name)
