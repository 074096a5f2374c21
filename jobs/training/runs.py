"""Options and the course of all training jobs: batches, workers, checkpoints, curves."""

from __future__ import annotations

from jobs.common.cli import ClusterJob, Stage, say, say_complete

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jobs.common.session import join_cluster
from jobs.common.stopping import deferred_signals
from jobs.common.workers import say_line

from indexing.corpus.queries import Queries
from indexing.store.artifact import Artifact, Draft, Reference, begun_document, fingerprint_of
from indexing.store.models import Checkpoints, checkpoint_names
from indexing.store.store import Store, artifact_key
from indexing.training.cluster import run_on_ray
from indexing.training.curves import Curves
from indexing.training.dev import DevSplit
from indexing.training.local import plan_local_worker, run_local
from indexing.training.messages import StartMeasured, StepDone, TrainingResult
from indexing.training.worker import Maker, TrainingTask, abandoned_s
from indexing.training.workers import WorkerGroup, plan_workers
from indexing.work.work import RESUME, Target, complete_target
from retriever.cuts import SPLIT, Cuts
from retriever.errors import InputError
from retriever.training.loop import LoopOptions

QUALITY = "dev MRR@10"  # the measure that selects the best weights
ADAFACTOR_LR = 1e-3  # of T5 and GTR; relative to the size of the weights


@dataclass(frozen=True, kw_only=True)
class Training(ClusterJob):
    """Options of all training jobs."""

    batch: int
    """Rows per step, summed over all workers."""
    seed: int = 0
    """Seed of the batches, of dropout and of new weights."""
    workers: int = 1
    """Number of workers. One worker trains in this process unless there is a Ray cluster; several run on Ray, which is
    started on this machine if there is no cluster."""
    cpus: int = 2
    """CPU cores per worker. The numbers of workers and of cores decide how sums are rounded, so both shape the
    result."""
    gpus: Literal[0, 1] | None = None
    """GPUs per worker. Default: 1 if there is one for each worker, or for --min-workers; otherwise 0."""
    min_workers: int | None = None
    """Continue with at least N workers, on the same batches, if the cluster loses nodes. Default: --workers."""
    checkpoint_every: int = 100
    """Steps between two checkpoints. After SIGINT or SIGTERM the job finishes its step, saves a checkpoint and ends;
    `ray job stop` kills a job on Ray before it can."""
    checkpoint_minutes: float = 5.0
    """Also write a checkpoint after a step if the last one is at least this many minutes old; 0: only every
    --checkpoint-every steps. Increase it if writing a checkpoint takes long."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """adafactor: as T5X has it (T5, GTR): updates are scaled by the size of the weights, and a checkpoint holds little
    more than the weights; not with --zero 1 to 3."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass; auto: bfloat16 if the device computes with it, otherwise float32."""
    zero: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage. Default: plain data parallelism."""
    offload: bool = False
    """Keep the optimizer's state in the memory of the CPU (with --zero 1 to 3)."""
    checkpointing: bool = False
    """Activation checkpointing: recompute activations in the backward pass, which needs less memory and more time."""
    dev_split: str | None = None
    """Measure MRR@10 on this split of the query set during training, and keep the best weights."""
    dev_limit: int | None = 500
    """Use the first N queries of the dev split."""
    dev_passages: int
    """Passages that the dev queries are measured with."""
    evaluate_every: int = 100
    """Steps between two measurements on the dev split."""
    patience: int = 0
    """Stop after N measurements without an improvement; 0: never."""
    curves: str | None = None
    """Write TensorBoard events to this folder during training, and a picture at the end."""

    def check(self, row: str, frozen: str | None = None) -> None:
        """Checks the options of batches and workers.

        Args:
            row: What a row of a batch is, for the error.
            frozen: The option that freezes the backbone; None if the backbone is trained.

        Raises:
            InputError: If an option is out of range, or if options contradict each other.
        """
        if self.workers < 1 or self.cpus < 1 or self.checkpoint_every < 1 or self.batch < self.workers:
            raise InputError(
                f"--workers {self.workers} --cpus {self.cpus} --batch {self.batch} --checkpoint-every "
                f"{self.checkpoint_every}: expected at least 1, and a {row} for each worker"
            )
        if self.patience and not (self.dev_split and self.evaluate_every):
            raise InputError(
                f"--patience {self.patience}: expected --dev-split too, which measures quality, and --evaluate-every"
            )
        if self.dev_passages < 1 or (self.dev_limit is not None and self.dev_limit < 1):
            raise InputError(f"--dev-limit {self.dev_limit} --dev-passages {self.dev_passages}: expected at least 1")
        if self.curves and "://" in self.curves:
            raise InputError(f"--curves {self.curves}: expected a folder that this machine sees")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise InputError(f"--min-workers {self.min_workers}: expected 1 to --workers {self.workers}")
        if frozen and (self.zero or 0) >= 2:
            raise InputError(
                f"--zero {self.zero} {frozen}: stages 2 and 3 are for training the backbone, which is "
                "frozen: give 0 or 1"
            )
        if self.optimizer == "adafactor" and self.zero:
            raise InputError(
                f"--optimizer adafactor --zero {self.zero}: Adafactor needs the rows and columns of whole "
                "matrices, which stages 1 to 3 split: give --zero 0, or leave it out, or --optimizer "
                "adamw"
            )

    def peak_lr(self, lr: float | None, adamw: float) -> float:
        """Returns the learning rate; if it is None, the default of the optimizer, that of AdamW being `adamw`."""
        if lr is not None:
            return lr
        return adamw if self.optimizer == "adamw" else ADAFACTOR_LR

    def decay(self, weight_decay: float | None, adamw: float) -> float:
        """Returns the weight decay; if it is None, that of AdamW, or 0 for Adafactor, as T5X has it."""
        if weight_decay is not None:
            return weight_decay
        return adamw if self.optimizer == "adamw" else 0.0

    def checkpoint_bytes(self, weights: int) -> int:
        """Returns about the size of a checkpoint: trained weights, of a given size, and the optimizer's moments."""
        return 3 * weights if self.optimizer == "adamw" else weights

    @property
    def steps_per_evaluation(self) -> int:
        """Steps between two measurements on the dev split; 0 without one."""
        return self.evaluate_every if self.dev_split else 0

    def dev_split_of(self, queries: Queries) -> DevSplit | None:
        """Returns the dev split, None without --dev-split.

        Raises:
            InputError: If the query set has no such split.
        """
        if self.dev_split is None:
            return None
        queries.qrels(self.dev_split)
        return DevSplit(queries.artifact.name, self.dev_split, self.dev_limit, self.dev_passages)

    def dev_config(self) -> dict[str, Any] | None:
        """Returns the settings of the dev split that shape the best weights, None without --dev-split."""
        if self.dev_split is None:
            return None
        return {"split": self.dev_split, "limit": self.dev_limit, "passages": self.dev_passages}

    def make(
        self,
        store: Store,
        kind: str,
        name: str,
        *,
        inputs: Mapping[str, Artifact | Reference],
        config: dict[str, Any],
        prepare: Callable[[bool], tuple[Maker, LoopOptions, dict[str, Any]]],
        longest: int | None,
    ) -> Artifact:
        """Returns kind/NAME of the store; trains it if it is not complete.

        Args:
            store: The store.
            kind: prompts or models.
            name: Name of the artifact.
            inputs: The artifacts that it is made from.
            config: The settings that shape it.
            prepare: Called as prepare(on_ray) before a training run; returns the Maker, the options of the loop, and
                notes for the artifact.
            longest: The largest length limit that the backbone allows; None: any.

        Raises:
            InputError: If the input is bad. The store then holds no draft that was not there before, unless training
                has begun; without a checkpoint, that draft does not block the corrected command.
        """
        draft = Draft(store.storage, store.cache, artifact_key(kind, name), begun_document(kind, inputs, config, False))
        identity = fingerprint_of([{role: a.fingerprint for role, a in inputs.items()}, config])
        last, best = (Checkpoints(store, checkpoints, identity) for checkpoints in checkpoint_names(kind, name))
        draft.check(abandoned_s=abandoned_s(last))  # refuses other options before anything is opened
        if not draft.complete:
            with note_checkpoint(draft, last):
                on_ray = join_cluster(store, private=self.ray or self.workers > 1)
                group = self.plan_group(on_ray)
                maker, loop, notes = prepare(on_ray)
                task = TrainingTask(
                    draft=draft, last=last, best=best, loop=loop, maker=maker, dtype=self.dtype, group=group
                )
                result = self.run_task(task, on_ray, longest)
                draft.begin()  # joins the draft that the first worker has begun
                draft.note(**notes, **result.notes())
                if not draft.complete:
                    draft.finish()
        last.clear()
        best.clear()
        return store.open(kind, name)

    def plan_complete(
        self, store: Store, kind: str, name: str, inputs: Mapping[str, Artifact | Reference], config: dict[str, Any]
    ) -> bool:
        """Whether kind/NAME is complete with these inputs and settings; prints that for --plan."""
        artifact = complete_target(store, Target(kind, name, inputs, config))
        if artifact is not None:
            say_complete(artifact.url, self.curves)
        return artifact is not None

    def plan_group(self, on_ray: bool) -> WorkerGroup:
        """Returns the workers. Raises InputError if there is no room for them."""
        if not on_ray:
            return plan_local_worker(self.cpus, self.gpus)
        request = self.worker_request()
        return plan_workers(
            self.workers,
            self.cpus,
            say_line,
            gpus=self.gpus,
            min_workers=self.min_workers,
            wait_s=request.wait_s,
            labels=request.labels,
        )

    def length_step(self, noun: str) -> str:
        """Returns how to set a larger length limit for texts of a kind (`retriever.cuts.NOUNS`)."""
        return "give a larger --max-length under another --name"

    def cut_lines(self, cuts: Mapping[str, Mapping[str, int]], longest: int | None) -> dict[str, tuple[Cuts, str]]:
        """Returns the counts and the line for each kind of texts of which some were cut; longest: as of `make`."""
        lines = {}
        for noun, counts in cuts.items():
            if (counted := Cuts(**counts)).cut_texts:
                split = SPLIT if noun in ("passages", "pairs") else f"shorten the {noun}"
                line = counted.line(f"{noun} of the batches", self.length_step(noun), longest, split)
                lines[noun] = (counted, line)
        return lines

    def run_task(self, task: TrainingTask, on_ray: bool, longest: int | None) -> TrainingResult:
        """Trains with progress on stderr and, if --curves is set, with curves; prints how many texts were cut.

        longest: as of `make`.
        """
        curves = self.open_curves(task.draft.key)
        warned: set[str] = set()
        with Stage("train", task.loop.steps, "steps", task.draft.key) as stage:

            def attempt(write: Callable[[], object]) -> bool:
                """Returns whether curves were written. An error ends the curves, not the training run."""
                try:
                    write()
                except (InputError, OSError) as error:
                    stage.say(f"--curves {self.curves}: {error}")
                    return False
                return True

            def show(done: StartMeasured | StepDone) -> None:
                nonlocal curves
                if isinstance(done, StartMeasured):
                    stage.say(f"{QUALITY} {done.quality:.4f} at step 0, before training")
                    return
                for noun, (cuts, line) in self.cut_lines(done.cuts, longest).items():
                    if cuts.are_many and noun not in warned:
                        warned.add(noun)
                        stage.say(line)
                stage.remark = f"loss {done.loss:.4f}"
                stage.add("pairs", self.batch)
                stage.metrics.set("train_loss", done.loss)
                stage.metrics.set("train_lr", done.lr)
                stage.metrics.set("train_steps", done.step)
                if done.quality is not None:
                    stage.say(f"step {done.step:,}: {stage.remark}, {QUALITY} {done.quality:.4f}")
                if curves and not attempt(partial(curves.add, done)):
                    attempt(curves.close)
                    curves = None

            try:
                run = partial(run_on_ray, say=stage.say) if on_ray else run_local
                result = run(task, stage.count, show, stop_requests=deferred_signals)
            except BaseException:
                if curves:
                    attempt(curves.draw_added)
                raise
            finally:
                if curves:
                    attempt(curves.close)
        for noun, (_, line) in self.cut_lines(result.cuts, longest).items():
            if noun not in warned:
                say(line)
        return result

    def open_curves(self, title: str) -> Curves | None:
        """Returns the writer of curves; None without --curves."""
        return Curves(Path(self.curves), title=title, quality=QUALITY) if self.curves else None

    def draw(self, artifact: Artifact) -> None:
        """Draws the whole course of training, over all runs, if --curves is set."""
        if (curves := self.open_curves(artifact.key)) and (picture := curves.draw(artifact.notes["curve"])):
            say(str(picture))


@dataclass(frozen=True, kw_only=True)
class Contrastive(Training):
    """Options of jobs whose loss is computed over the vectors of the whole batch."""

    grad_cache: Literal["auto", "on", "off"] = "auto"
    """GradCache computes the vectors of a batch twice, which needs less memory. auto: if the batch is large."""


@contextlib.contextmanager
def note_checkpoint(draft: Draft, last: Checkpoints) -> Iterator[None]:
    """Adds to a KeyboardInterrupt that ends the block the step from which the same command resumes.

    Args:
        draft: What is trained.
        last: Its last checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        with contextlib.suppress(InputError, OSError):  # without an answer of the store, nothing is promised
            step = last.step()
            if step is None:
                interruption.add_note(f"nothing of {draft.key} was saved: the next run starts from the beginning")
            else:
                interruption.add_note(f"{draft.key} is saved at step {step:,}")
                interruption.add_note(RESUME)
        raise


def describe_best(notes: dict[str, Any]) -> str:
    """Returns the best quality of a training run as the end of a phrase, "" if it was not measured."""
    return "" if notes["best"] is None else f", {QUALITY} {notes['best']:.4f} at step {notes['best_step']:,}"


def count_steps(steps: int | None, epochs: float, rows: int, batch: int) -> int:
    """Returns `steps`, or the steps of so many epochs if it is None. Raises InputError if epochs is not positive."""
    if not (epochs > 0 and math.isfinite(epochs)):
        raise InputError(f"--epochs {epochs}: expected more than 0")
    return math.ceil(epochs * rows / batch) if steps is None else steps


def check_name(kind: str, name: str) -> None:
    """Raises InputError if `name` cannot be the name of an artifact without generations."""
    if not name or "/" in name:
        raise InputError(f"name {name!r}: expected one, and without '/', for {kind}/NAME")
    artifact_key(kind, name)
