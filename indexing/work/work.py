"""The interface of a work, which describes artifacts to make, and `run_work`, which makes or resumes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from riptide.base.errors import InputError, StorageError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import split_range
from riptide.indexing.store.conflicts import TakenNameError, describe_changes
from riptide.indexing.store.draft import ABANDONED_S, Draft, keep_alive
from riptide.indexing.store.sealed_json import ArtifactPart, ArtifactReference, begun_document
from riptide.indexing.store.store import Store, artifact_key, new_artifact_key
from riptide.indexing.work.worker_tasks import Runner, WorkerTask

WORKER_SETTINGS = ("numerics", "lucene", "anserini")  # settings of a target that a worker reports
RESUME = "run the same command again to resume"  # the note that is added to a KeyboardInterrupt


@dataclass(frozen=True)
class ArtifactTarget:
    """The specification of an artifact to make, or of the next generation of one.

    Attributes:
        kind, name: Its key in the store.
        inputs: The artifacts that it is made from, by role.
        config: The settings that shape its content.
        by_content: The fingerprint depends on the parts only; see Store.create.
        models: The parameter and the name of the model that some settings describe by hashes: {"encoder": ("encoder",
            "minilm")}. Only messages contain it.
        fails_whole: After bad input, no part counts: the next command begins again. Otherwise its parts are kept.
        replaces: A setting; a draft with another value of it is replaced with its parts if no command works on it.
    """

    kind: str
    name: str
    inputs: Mapping[str, Artifact | ArtifactReference]
    config: Mapping[str, Any]
    by_content: bool = False
    models: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fails_whole: bool = False
    replaces: str | None = None


@dataclass(frozen=True)
class WorkUnit:
    """A unit of work: the parts that one call of a worker makes.

    Attributes:
        names: Names of the parts that it commits; the unit is done if all are committed.
        rows: Rows (passages, queries, vectors), for progress.
        payload: What the worker needs to know.
        target: Number of the artifact that the parts belong to.
        size_bytes: Bytes of the payload if it is large; runners draw few such units ahead.
    """

    names: tuple[str, ...]
    rows: int
    payload: Any
    target: int = 0
    size_bytes: int = 0


Committed = Sequence[Mapping[str, ArtifactPart]]
"""The committed parts by name, for each target."""


class WorkStage(Protocol):
    """A stage of a work: units that may be made in any order and concurrently."""

    @property
    def title(self) -> str:
        """The name of the stage in lines of progress."""

    @property
    def noun(self) -> str:
        """The plural noun for the stage's rows in lines of progress."""

    @property
    def total(self) -> int | None:
        """The number of rows of the stage; None if it is unknown."""

    def units(self, committed_parts: Committed) -> Iterable[WorkUnit]:
        """Returns all units, also committed ones. committed_parts: the parts of earlier stages and runs."""

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Raises InputError if the committed parts of a unit differ from the parts that the unit would make now."""


class SpreadStage(WorkStage, Protocol):
    """A stage whose units are made by workers, with one call per unit."""

    def task(self, drafts: Sequence[Draft]) -> WorkerTask:
        """Returns the task whose workers take a WorkUnit and commit its parts to the drafts."""

    def count_rows(self, unit: WorkUnit, result: Any) -> int:
        """Returns the number of rows that a worker has made for a unit. result: the worker's result."""


@runtime_checkable
class DriverStage(WorkStage, Protocol):
    """A stage whose units are made by the driver one after the other, each by several tasks."""

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Makes and commits the parts of a unit with the names in `missing_names`."""


class BaseStage:
    """The base class of stages without a check of committed parts, whose units know their number of rows."""

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Does nothing: all committed parts are accepted."""

    def count_rows(self, unit: WorkUnit, result: Any) -> int:
        """Returns the number of rows of the unit, regardless of the result."""
        return unit.rows


@dataclass(frozen=True)
class TaskStage(BaseStage):
    """A stage with a list of units that the workers of one task make.

    Attributes:
        title: Its name in lines of progress.
        noun: Plural noun for its rows.
        all_units: Its units.
        make_task: Returns the task of a worker that commits to some drafts.
    """

    title: str
    noun: str
    all_units: Sequence[WorkUnit]
    make_task: Callable[[Sequence[Draft]], WorkerTask]

    @property
    def total(self) -> int:
        """The total number of rows of all units."""
        return sum(unit.rows for unit in self.all_units)

    def units(self, committed_parts: Committed) -> Sequence[WorkUnit]:
        """Returns all units of the stage."""
        return self.all_units

    def task(self, drafts: Sequence[Draft]) -> WorkerTask:
        """Returns the task whose workers make the units, by `make_task`."""
        return self.make_task(drafts)


def shard_units(first_row: int, end: int, num_shards: int) -> list[WorkUnit]:
    """Splits the rows [first_row, end) into shards of nearly equal length, and returns a unit for each shard.

    The payload of a unit is (first row, end).
    """
    ranges = enumerate(split_range(first_row, end, num_shards))
    return [WorkUnit((f"shard-{number:05d}",), end - first, (first, end)) for number, (first, end) in ranges]


class Work(Protocol):
    """The interface of a work: artifacts to make, and the stages that make them. Its constructor writes nothing."""

    @property
    def targets(self) -> Sequence[ArtifactTarget]:
        """Returns the artifacts to make; an empty list if all are complete."""

    @property
    def stages(self) -> Sequence[SpreadStage | DriverStage]:
        """Returns the stages in the order in which they run."""

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Called after the stages and before the drafts are completed: adds measured notes, or raises InputError."""

    def has_checkpoint(self, drafts: Sequence[Draft]) -> bool:
        """Returns whether the same command continues within a part that is not committed yet."""


class BaseWork:
    """The base class of works: they do nothing after their stages, and keep no checkpoints of parts."""

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Does nothing; a subclass may override it."""

    def has_checkpoint(self, drafts: Sequence[Draft]) -> bool:
        """Returns False; a subclass may override it."""
        return False


class ProgressCounter(Protocol):
    """The interface of an object that receives the progress of a stage."""

    def count(self, amount: int, is_kept: bool = False) -> None:
        """Adds finished rows. is_kept: whether an earlier run has made them."""

    def show(self, unfinished: int) -> None:
        """Sets the number of processed rows within unfinished units."""

    def add(self, figure: str, amount: int, **tags: str) -> None:
        """Adds to a figure other than rows: parts (with tag outcome: made or kept), tokens or pairs."""


Progress = Callable[[str, int | None, str, str], contextlib.AbstractContextManager[ProgressCounter]]
"""progress(title, total, noun, artifact's key) is called for each stage, and left when the stage has ended."""


class _HiddenProgress:
    """A ProgressCounter that shows nothing."""

    def count(self, amount: int, is_kept: bool = False) -> None: ...

    def show(self, unfinished: int) -> None: ...

    def add(self, figure: str, amount: int, **tags: str) -> None: ...


def hide_progress(
    title: str, total: int | None, noun: str, artifact: str
) -> contextlib.AbstractContextManager[ProgressCounter]:
    """A Progress that shows nothing."""
    return contextlib.nullcontext(_HiddenProgress())


@dataclass
class _StageRun:
    """The run of one stage: finds the pending units and makes them."""

    stage: SpreadStage | DriverStage
    drafts: Sequence[Draft]
    counter: ProgressCounter
    committed: Committed = field(init=False)
    names: list[set[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.committed = [draft.committed_parts() for draft in self.drafts]
        for draft in self.drafts:
            draft.list_records()
        self.names = [set() for _ in self.drafts]

    def pending(self) -> Iterator[WorkUnit]:
        """Yields the units with a missing part; checks and counts the complete ones."""
        for unit in self.stage.units(self.committed):
            committed = self.committed[unit.target]
            self.names[unit.target].update(unit.names)
            parts = [committed[name] for name in unit.names if name in committed]
            if len(parts) < len(unit.names):
                yield unit
                continue
            self.stage.check(unit, parts)
            self.counter.count(unit.rows, is_kept=True)
            self._count_parts(unit)

    def _finish_unit(self, unit: WorkUnit) -> None:
        """Records that a unit was made."""
        self._count_parts(unit)
        self.drafts[unit.target].list_records(unit.names)

    def _count_parts(self, unit: WorkUnit) -> None:
        """Counts the parts of a finished unit as kept, if they were committed before, or as made."""
        kept = sum(name in self.committed[unit.target] for name in unit.names)
        self.counter.add("parts", kept, outcome="kept")
        self.counter.add("parts", len(unit.names) - kept, outcome="made")

    def run(self, runner: Runner, observe: Callable[[WorkUnit, Any], object]) -> None:
        """Makes all pending units. Raises InputError if a draft was removed meanwhile."""
        if isinstance(self.stage, DriverStage):
            for unit in self.pending():
                missing = [name for name in unit.names if name not in self.committed[unit.target]]
                self.stage.make(unit, missing, self.drafts[unit.target], runner, self.counter)
                self._finish_unit(unit)
        else:
            task = self.stage.task(self.drafts)
            results = runner.run(task, self.pending(), on_progress=self.counter.show)
            try:
                for unit, result in results:
                    observe(unit, result)
                    self.counter.count(self.stage.count_rows(unit, result))
                    self._finish_unit(unit)
            finally:
                if close := getattr(results, "close", None):
                    close()  # ends the workers now; otherwise an exception's traceback would keep them
        for draft, names in zip(self.drafts, self.names, strict=True):
            if names - draft.committed_parts().keys():
                raise draft.removed_error()


@contextlib.contextmanager
def resumable(is_kept: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Adds the note RESUME to a KeyboardInterrupt in the block, if the same command can resume.

    Args:
        is_kept: Whether something is kept from which the command resumes.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        # Without an answer of the store no note is added, as it is unknown whether the command can resume.
        with contextlib.suppress(InputError, OSError):
            if is_kept():
                interruption.add_note(RESUME)
        raise


def _has_parts(drafts: Sequence[Draft]) -> bool:
    return any(draft.is_complete or draft.has_parts() for draft in drafts)


def run_work(
    store: Store,
    work: Work,
    runner: Runner,
    progress: Progress = hide_progress,
    *,
    observe: Callable[[WorkUnit, Any], object] = lambda unit, result: None,
) -> list[Artifact]:
    """Makes the artifacts of a work, or resumes them: makes only pending parts.

    After an error no draft remains that blocks the corrected command. After an input error, a draft that this call
    began and that has no part is removed; of a target that fails whole, the draft is marked and replaced by the next
    command. After an interruption or a failure of the storage, a draft that this call began is marked, and replaced by
    other options if it has no part. After a kill, a draft without parts is replaced once no process has worked on it
    for ABANDONED_S. Parts are kept in all other cases, and an interruption then has the note RESUME.

    Args:
        store: The store.
        work: The work.
        runner: What spreads the units over workers.
        progress: Shows the progress of each stage.
        observe: Called with each unit that was made now, and the worker's result.

    Returns:
        The complete artifacts, one for each target.

    Raises:
        InputError: If other inputs or settings are pinned under a target's name, or for bad input.
        StorageError: If the storage fails.
    """
    drafts: list[Draft] = []
    targets = work.targets
    try:
        with resumable(lambda: _has_parts(drafts) or work.has_checkpoint(drafts)):
            for target in targets:
                drafts.append(target_draft(store, target).begin(abandoned_s=ABANDONED_S))
            if not all(draft.is_complete for draft in drafts):
                with keep_alive(drafts):
                    for stage in work.stages:
                        with progress(stage.title, stage.total, stage.noun, drafts[-1].key) as counter:
                            _StageRun(stage, drafts, counter).run(runner, observe)
                    work.prepare_completion(drafts, runner, progress)
                for draft in drafts:
                    if not draft.is_complete:
                        draft.finish()
    except BaseException as error:
        for target, draft in zip(targets, drafts, strict=False):
            if isinstance(error, InputError) and not isinstance(error, StorageError):
                _clean_up_draft(store, target, draft, error)
            else:
                draft.abandon(error)
        raise
    return [store.open(target.kind, target.name) for target in targets]


def check_targets(store: Store, work: Work) -> None:
    """Raises the InputError of `run_work` if an artifact with other inputs or settings has the name. Writes nothing.

    A setting of WORKER_SETTINGS that no worker has reported yet counts as equal.
    """
    for target in work.targets:
        pinned = store.manifest(artifact_key(target.kind, target.name)) or {"config": {}}
        unknown = {name for name in WORKER_SETTINGS if not target.config.get(name)}
        known = {name: value for name, value in pinned["config"].items() if name in unknown}
        planned = replace(target, config={**target.config, **known})
        target_draft(store, planned).check(abandoned_s=ABANDONED_S)


def target_draft(store: Store, target: ArtifactTarget) -> Draft:
    """Returns the draft of a target without beginning it."""
    document = begun_document(target.kind, target.inputs, target.config, target.by_content)
    if target.models:
        document["models"] = {setting: list(model) for setting, model in target.models.items()}
    return Draft(store.storage, store.cache, new_artifact_key(target.kind, target.name), document, target.replaces)


def plan_stages(work: Work) -> list[str]:
    """Returns a line per stage: name, number of rows and number of units. Writes and computes nothing."""
    lines = []
    for stage in work.stages:
        units = list(stage.units([{} for _ in work.targets]))
        rows = sum(unit.rows for unit in units)
        lines.append(f"{stage.title}: {rows:,} {stage.noun} in {len(units):,} unit{'s' * (len(units) != 1)} of work")
    return lines


def complete_artifact(store: Store, work: Work) -> Artifact | None:
    """Returns the artifact of a work with one target if it is complete with equal inputs and settings; else None."""
    [target] = work.targets
    return complete_target(store, target)


def complete_target(store: Store, target: ArtifactTarget) -> Artifact | None:
    """Returns the artifact of a target if it is complete with equal inputs and settings; otherwise None."""
    document = begun_document(target.kind, target.inputs, target.config, target.by_content)
    with contextlib.suppress(InputError):
        artifact = store.open(target.kind, target.name)
        if {name: document[name] for name in ("inputs", "config")} == {
            "inputs": artifact.inputs,
            "config": artifact.config,
        }:
            return artifact
    return None


def _clean_up_draft(store: Store, target: ArtifactTarget, draft: Draft, error: InputError) -> None:
    """Marks, abandons or removes a draft after an input error, so that the corrected command can run."""
    if target.fails_whole:
        draft.fail(f"{getattr(error, 'cause', None) or error}")  # Ray wraps the exception as `cause`
    elif draft.created and not draft.is_complete:
        with contextlib.suppress(InputError, OSError):  # only the first error is reported
            if draft.has_parts():
                draft.abandon(error)
            elif draft.is_pinned():
                store.remove(draft.key)


def check_same_config(first_generation: Artifact, config: Mapping[str, Any]) -> None:
    """Raises TakenNameError if the next generation of an artifact has other settings than the first one.

    Args:
        first_generation: The first generation.
        config: The settings of the next generation, or some of them.

    Raises:
        TakenNameError: If a setting differs from that of the first generation.
    """
    known = {name: first_generation.config.get(name) for name in config}
    if changes := describe_changes(known, config):
        raise TakenNameError(
            f"{first_generation.url} was built otherwise ({changes}): give the same options, or another name "
            f"({Parameter('name')})"
        )
