"""Runs a training job with its workers, checkpoints, progress lines and curves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from riptide.base.cuts import SPLIT, Cuts
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.model_artifacts import StoredCheckpoint, training_checkpoints
from riptide.indexing.store.store import Store
from riptide.indexing.training.cluster import run_on_ray
from riptide.indexing.training.dev_splits import DevSplit
from riptide.indexing.training.local import plan_local_worker, run_local
from riptide.indexing.training.messages import Shown, TrainingResult
from riptide.indexing.training.worker import SystemMaker, TrainingTask, abandoned_after_s
from riptide.indexing.training.workers import WorkerGroup, plan_workers
from riptide.indexing.work.work import RESUME, ArtifactTarget, complete_target, target_draft
from riptide.jobs.commands.stopping import deferred_signals
from riptide.jobs.common.printing import print_complete, say
from riptide.jobs.common.session import cluster_reports, join_cluster
from riptide.jobs.common.stage_progress import StageProgress
from riptide.jobs.training.curves import CurveWriter
from riptide.jobs.training.run_options import Training
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.hooks import NodeDraining, StartMeasured

QUALITY = "dev MRR@10"  # the measure by which the best weights are selected


def dev_split_of(options: Training, queries: Queries) -> DevSplit | None:
    """Returns the dev split of the options, or None without --dev-split.

    Raises:
        InputError: If the query set has no such split.
    """
    if options.dev_split is None:
        return None
    queries.require_split(options.dev_split)
    return DevSplit(queries.artifact.name, options.dev_split, options.dev_limit, options.dev_passages.size)


def make_artifact(
    options: Training,
    store: Store,
    target: ArtifactTarget,
    *,
    prepare: Callable[[bool], tuple[SystemMaker, LoopOptions, dict[str, Any]]],
    max_length: int | None,
) -> Artifact:
    """Returns the artifact of a target; trains it unless it is complete.

    Args:
        options: The options of the job.
        store: The store.
        target: The prompts or the model to make.
        prepare: Called as prepare(on_ray) before a training run; returns the SystemMaker, the options of the loop, and
            notes for the artifact.
        max_length: The largest length limit that the backbone allows; None: any.

    Raises:
        InputError: If the input is bad. The store then holds no draft that was not there before, unless training
            has begun; without a checkpoint, that draft does not block the corrected command.
    """
    draft = target_draft(store, target)
    last, best = open_checkpoints(store, target)
    # Raises InputError for a name with other options before anything is opened.
    draft.check(abandoned_s=abandoned_after_s(last))
    if not draft.is_complete:
        with note_checkpoint(draft, last):
            on_ray = join_cluster(store, private=options.ray or options.workers > 1)
            group = plan_group(options, on_ray)
            maker, loop, notes = prepare(on_ray)
            task = TrainingTask(
                draft=draft,
                last_checkpoint=last,
                best_checkpoint=best,
                loop=loop,
                maker=maker,
                dtype=options.dtype,
                group=group,
            )
            result = train_task(options, task, on_ray, max_length)
            draft.begin()  # joins the draft if a worker has already begun it
            draft.add_notes(**notes, **result.notes())
            if not draft.is_complete:
                draft.finish()
    last.clear()
    best.clear()
    return store.open(target.kind, target.name)


def open_checkpoints(store: Store, target: ArtifactTarget) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Returns handles to the last and the best checkpoint of a target, which need not exist."""
    fingerprints = {role: artifact.fingerprint for role, artifact in target.inputs.items()}
    return training_checkpoints(store, target.kind, target.name, fingerprints, target.config)


def report_if_complete(options: Training, store: Store, target: ArtifactTarget) -> bool:
    """Returns whether the artifact of a target is complete, and then prints that for --plan.

    Raises:
        InputError: If other inputs or settings have the target's name.
    """
    last, _ = open_checkpoints(store, target)
    target_draft(store, target).check(abandoned_s=abandoned_after_s(last))
    artifact = complete_target(store, target)
    if artifact is not None:
        print_complete(artifact.url, options.curves)
    return artifact is not None


def plan_group(options: Training, on_ray: bool) -> WorkerGroup:
    """Plans the group of workers: number, cores and GPUs. Raises InputError if there are too few resources."""
    if not on_ray:
        return plan_local_worker(options.worker_cpus, options.gpus)
    request = options.worker_request()
    return plan_workers(
        options.workers,
        options.worker_cpus,
        cluster_reports(),
        gpus=options.gpus,
        min_workers=options.min_workers,
        wait_s=request.wait_s,
        labels=request.labels,
    )


def cut_lines(
    options: Training, cuts: Mapping[str, Mapping[str, int]], max_length: int | None
) -> dict[str, tuple[Cuts, str]]:
    """Returns the counts and a printable line for each kind of texts of which some were cut.

    max_length: as of `make_artifact`.
    """
    lines = {}
    for noun, counts in cuts.items():
        if (counted := Cuts(**counts)).cut_texts:
            split = SPLIT if noun in ("passages", "pairs") else f"shorten the {noun}"
            line = counted.line(f"{noun} of the batches", options.length_advice(noun), max_length, split)
            lines[noun] = (counted, line)
    return lines


def train_task(options: Training, task: TrainingTask, on_ray: bool, max_length: int | None) -> TrainingResult:
    """Trains a task with progress lines and curves, prints how many texts were cut, and returns the result.

    max_length: as of `make_artifact`.
    """
    curves, rows = open_curves(options, task.draft.key), options.rows_per_step
    warned: set[str] = set()
    with StageProgress("train", task.loop.steps, "steps", task.draft.key) as stage:

        def attempt(write: Callable[[], object]) -> bool:
            """Calls a function that writes curves. Returns False after an error, so that only the curves end."""
            try:
                write()
            except (InputError, OSError) as error:
                stage.say(f"warning: {Parameter('curves', options.curves)}: {error}")
                return False
            return True

        def show(done: Shown) -> None:
            nonlocal curves
            if isinstance(done, NodeDraining):
                stage.say(
                    f"step {done.step:,}: a node of the workers is draining; a checkpoint is saved now and every "
                    f"{done.checkpoint_s:.0f} s, and the last one is resumed when the node is gone"
                )
                return
            if isinstance(done, StartMeasured):
                stage.say(f"{QUALITY} {done.quality:.4f} at step 0, before training")
                return
            if done.run_steps is not None and stage.total != done.run_steps:
                stage.total = done.run_steps
                stage.say(
                    f"train: {done.run_steps:,} steps, which take about "
                    f"{Parameter('max_minutes', f'{options.loop.max_minutes:g}')}"
                )
            for noun, (cuts, line) in cut_lines(options, done.cuts, max_length).items():
                if cuts.are_many and noun not in warned:
                    warned.add(noun)
                    stage.say(line)
            stage.remark = f"loss {done.loss:.4f}"
            stage.add("pairs", rows)
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
    for noun, (_, line) in cut_lines(options, result.cuts, max_length).items():
        if noun not in warned:
            say(line)
    return result


def open_curves(options: Training, title: str) -> CurveWriter | None:
    """Opens a writer of training curves; returns None without --curves."""
    return CurveWriter(Path(options.curves), title=title, quality=QUALITY) if options.curves else None


def draw_curves(options: Training, artifact: Artifact) -> None:
    """Draws the curves of the whole training, including earlier runs, if --curves is set."""
    if (curves := open_curves(options, artifact.key)) and (picture := curves.draw(artifact.notes["curve"])):
        say(str(picture))


@contextlib.contextmanager
def note_checkpoint(draft: Draft, last_checkpoint: StoredCheckpoint) -> Iterator[None]:
    """Adds a note to a KeyboardInterrupt in the block: the saved step from which the same command resumes.

    Args:
        draft: What is trained.
        last_checkpoint: Its last checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        # Without access to the store, it is unknown whether a checkpoint exists.
        with contextlib.suppress(InputError, OSError):
            step = last_checkpoint.step()
            if step is None:
                interruption.add_note(f"nothing of {draft.key} was saved: the next run starts from the beginning")
            else:
                interruption.add_note(f"{draft.key} is saved at step {step:,}")
                interruption.add_note(RESUME)
        raise


def describe_best(notes: dict[str, Any]) -> str:
    """Returns the best quality of a run as the end of a phrase; "" if it was not measured."""
    return "" if notes["best"] is None else f", {QUALITY} {notes['best']:.4f} at step {notes['best_step']:,}"
