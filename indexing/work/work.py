"""The description of an artifact to make (a work), and `run_work`, which begins, resumes and completes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from riptide.base.errors import InputError, StorageError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import ABANDONED_S, Artifact, Draft, keep_alive
from riptide.indexing.store.chain import split_range
from riptide.indexing.store.conflicts import TakenNameError, describe_changes
from riptide.indexing.store.sealed_json import ArtifactPart, ArtifactReference, begun_document
from riptide.indexing.store.store import Store, artifact_key
from riptide.indexing.work.worker_tasks import Runner, WorkerTask

WORKER_SETTINGS = ("numerics", "lucene", "anserini")  # settings of a target that a worker reports
RESUME = "run the same command again to resume"  # a note of an interruption


@dataclass(frozen=True)
class ArtifactTarget:
    """An artifact to make, or the next generation of one.

    Attributes:
        kind, name: Its key in the store.
        inputs: The artifacts that it is made from, by role.
        config: The settings that shape its content.
        by_content: The fingerprint depends on the parts only; see Store.create.
        models: The parameter and the name of the model that some settings describe by hashes: {"encoder": ("encoder",
            "minilm")}. Only messages contain it.
        fails_whole: After bad input, no part counts: the next command begins again. Otherwise its parts are kept.
    """

    kind: str
    name: str
    inputs: Mapping[str, Artifact | ArtifactReference]
    config: Mapping[str, Any]
    by_content: bool = False
    models: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fails_whole: bool = False


@dataclass(frozen=True)
class WorkUnit:
    """What one call of a worker makes.

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
    """Units that may be made in any order and at the same time."""

    @property
    def title(self) -> str:
        """Its name in lines of progress."""

    @property
    def noun(self) -> str:
        """Plural noun for its rows, in lines of progress."""

    @property
    def total(self) -> int | None:
        """The number of its rows, None if unknown."""

    def units(self, committed_parts: Committed) -> Iterable[WorkUnit]:
        """Returns every unit, the committed ones too. `committed_parts`: the parts of earlier stages and runs."""

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Raises InputError if the committed parts of a unit are not what the unit would make now."""


class SpreadStage(WorkStage, Protocol):
    """A stage whose units are made by workers, one call each."""

    def task(self, drafts: Sequence[Draft]) -> WorkerTask:
        """Returns the task of a worker: it takes a WorkUnit and commits its parts to the drafts."""

    def count_rows(self, unit: WorkUnit, result: Any) -> int:
        """Returns the number of rows that a worker has made of a unit; `result` is the worker's."""


@runtime_checkable
class DriverStage(WorkStage, Protocol):
    """A stage whose units are made one after the other, each by several tasks."""

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Makes and commits the missing parts of a unit, which have these names."""


class BaseStage:
    """Base of stages whose committed parts need no check, and whose units have as many rows as they say."""

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Accepts the committed parts of a unit: they are as they would be made now."""

    def count_rows(self, unit: WorkUnit, result: Any) -> int:
        """Returns the rows of the unit."""
        return unit.rows


@dataclass(frozen=True)
class TaskStage(BaseStage):
    """A stage whose units are known when it begins, and which workers make by one task.

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
        """The number of rows of all units."""
        return sum(unit.rows for unit in self.all_units)

    def units(self, committed_parts: Committed) -> Sequence[WorkUnit]:
        """Returns all units."""
        return self.all_units

    def task(self, drafts: Sequence[Draft]) -> WorkerTask:
        """Returns the task of a worker."""
        return self.make_task(drafts)


def shard_units(first_row: int, end: int, num_shards: int) -> list[WorkUnit]:
    """Returns a unit for each of the shards of nearly equal length into which the rows [first_row, end) are cut.

    The payload of a unit is (first row, end).
    """
    ranges = enumerate(split_range(first_row, end, num_shards))
    return [WorkUnit((f"shard-{number:05d}",), end - first, (first, end)) for number, (first, end) in ranges]


class Work(Protocol):
    """One artifact to be made, or several generations of one. Constructing it writes nothing."""

    @property
    def targets(self) -> Sequence[ArtifactTarget]:
        """Returns the artifacts to make; an empty list if all are complete."""

    @property
    def stages(self) -> Sequence[SpreadStage | DriverStage]:
        """Returns the stages, in order."""

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Does what follows the stages, before the drafts are completed: adds measured notes, or raises InputError."""


class BaseWork:
    """Base of works that only have stages."""

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Does nothing."""


class ProgressCounter(Protocol):
    """Receives the progress of a stage."""

    def count(self, amount: int, is_kept: bool = False) -> None:
        """Adds rows that are done; `is_kept`: by an earlier run."""

    def show(self, unfinished: int) -> None:
        """Receives the number of rows that are done within units that are not."""

    def add(self, figure: str, amount: int, **tags: str) -> None:
        """Adds to another figure than the rows: parts (outcome: made, kept), tokens or pairs."""


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
    """The Progress of work that is not shown."""
    return contextlib.nullcontext(_HiddenProgress())


@dataclass
class _StageRun:
    """The run of a stage: finds its pending units and makes them."""

    stage: SpreadStage | DriverStage
    drafts: Sequence[Draft]
    counter: ProgressCounter
    committed: Committed = field(init=False)
    names: list[set[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.committed = [draft.committed_parts() for draft in self.drafts]
        self.names = [set() for _ in self.drafts]

    def pending(self) -> Iterator[WorkUnit]:
        """Yields the units with a missing part; counts the others."""
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

    def _count_parts(self, unit: WorkUnit) -> None:
        """Counts the parts of a unit that is done; those that are committed already are kept."""
        kept = sum(name in self.committed[unit.target] for name in unit.names)
        self.counter.add("parts", kept, outcome="kept")
        self.counter.add("parts", len(unit.names) - kept, outcome="made")

    def run(self, runner: Runner, observe: Callable[[WorkUnit, Any], object]) -> None:
        """Makes the pending units. Raises InputError if a draft was removed meanwhile."""
        if isinstance(self.stage, DriverStage):
            for unit in self.pending():
                missing = [name for name in unit.names if name not in self.committed[unit.target]]
                self.stage.make(unit, missing, self.drafts[unit.target], runner, self.counter)
                self._count_parts(unit)
        else:
            task = self.stage.task(self.drafts)
            results = runner.run(task, self.pending(), on_progress=self.counter.show)
            try:
                for unit, result in results:
                    observe(unit, result)
                    self.counter.count(self.stage.count_rows(unit, result))
                    self._count_parts(unit)
            finally:
                if close := getattr(results, "close", None):
                    close()  # ends the workers now, and not when the traceback of an exception is released
        for draft, names in zip(self.drafts, self.names, strict=True):
            if names - draft.committed_parts().keys():
                raise draft.removed_error()


@contextlib.contextmanager
def resumable(is_kept: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Adds the note RESUME to a KeyboardInterrupt that ends the block, if the same command resumes.

    Args:
        is_kept: Whether something is kept from which the command resumes.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        # If the store does not answer, the message does not promise that the command resumes.
        with contextlib.suppress(InputError, OSError):
            if is_kept():
                interruption.add_note(RESUME)
        raise


def run_work(
    store: Store,
    work: Work,
    runner: Runner,
    progress: Progress = hide_progress,
    *,
    observe: Callable[[WorkUnit, Any], object] = lambda unit, result: None,
) -> list[Artifact]:
    """Makes the artifacts of a work, or their pending parts.

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
        with resumable(lambda: any(draft.is_complete or draft.committed_parts() for draft in drafts)):
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
    """Raises the InputError of `run_work` for a name that is taken by other inputs or settings. Writes nothing.

    A setting of WORKER_SETTINGS that no worker has reported yet counts as equal.
    """
    for target in work.targets:
        pinned = store.manifest(artifact_key(target.kind, target.name)) or {"config": {}}
        unknown = {name for name in WORKER_SETTINGS if not target.config.get(name)}
        known = {name: value for name, value in pinned["config"].items() if name in unknown}
        planned = replace(target, config={**target.config, **known})
        target_draft(store, planned).check(abandoned_s=ABANDONED_S)


def target_draft(store: Store, target: ArtifactTarget) -> Draft:
    """Returns the draft of a target, which is not begun."""
    document = begun_document(target.kind, target.inputs, target.config, target.by_content)
    if target.models:
        document["models"] = {setting: list(model) for setting, model in target.models.items()}
    return Draft(store.storage, store.cache, artifact_key(target.kind, target.name), document)


def plan_stages(work: Work) -> list[str]:
    """Returns a line for each stage: its name, its rows and the number of its units. Nothing is written or computed."""
    lines = []
    for stage in work.stages:
        units = list(stage.units([{} for _ in work.targets]))
        rows = sum(unit.rows for unit in units)
        lines.append(f"{stage.title}: {rows:,} {stage.noun} in {len(units):,} unit{'s' * (len(units) != 1)} of work")
    return lines


def complete_artifact(store: Store, work: Work) -> Artifact | None:
    """Returns the artifact of a work with one target if it is complete as the work would make it, else None."""
    [target] = work.targets
    return complete_target(store, target)


def complete_target(store: Store, target: ArtifactTarget) -> Artifact | None:
    """Returns the artifact of a target if it is complete with these inputs and settings, else None."""
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
    """Leaves a draft such that the corrected command can be run."""
    if target.fails_whole:
        draft.fail(" ".join(str(getattr(error, "cause", None) or error).split()))  # Ray's wrapper has a cause
    elif draft.created and not draft.is_complete:
        with contextlib.suppress(InputError, OSError):  # the first error is the one to report
            if draft.committed_parts():
                draft.abandon(error)
            elif draft.is_pinned():
                store.remove(draft.key)


def check_same_config(first_generation: Artifact, config: Mapping[str, Any]) -> None:
    """Checks that the next generation of an artifact has the settings of the first one.

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
