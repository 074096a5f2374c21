r"""Encode a corpus with a pool of encoders, part by part.

    riptide encode-corpus --store data/squad --encoder sentence-transformers/all-MiniLM-L6-v2
    ray job submit --working-dir . -- python -m riptide encode-corpus --store s3://bucket/squad \
        --encoder intfloat/e5-large --max-workers 8
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.corpus_encoding import (
    CALLS,
    EncodeCorpusWork,
    PartDone,
    count_pending,
    describe_broken,
    find_equal_embeddings,
    is_encoded,
    numerics_of,
    similarity_of,
)
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import EncoderSpec, find_encoder_spec
from riptide.indexing.embeddings.vector_kind import VectorKind
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import sum_cuts
from riptide.indexing.store.store import Store, artifact_key, check_name, generation
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.ray_actors import RayActors, choose_pool
from riptide.indexing.work.required_device import pinned_gpus
from riptide.indexing.work.work import WorkUnit, check_targets, run_work
from riptide.indexing.work.worker_tasks import Runner, WorkerResources
from riptide.jobs.common.job_options import EstimatedJob, GpuWorkers, chosen_task
from riptide.jobs.common.printing import WARNING, print_complete, print_stages, say
from riptide.jobs.common.session import cluster_reports, find_cluster, join_cluster, num_gpus
from riptide.jobs.common.stage_progress import StageProgress
from riptide.process.memory import format_bytes
from riptide.retriever.model.model_folder import find_model_folder, weight_files
from riptide.retriever.options import EncoderOptions


@dataclass(frozen=True, kw_only=True)
class EncodeCorpus(GpuWorkers, EstimatedJob):
    GROUP: ClassVar = "encoder"
    MAKES: ClassVar = ("embeddings",)
    NAMED_BY: ClassVar = ("name", "task")
    READS: ClassVar = {"encoder": "models", "task": "tasks"}

    encoder: str | None = None
    """A Hugging Face name, a folder (transformers or sentence-transformers), models/NAME of the store, or
    STORE/models/NAME of another store."""
    task: str | None = None
    """A tuned task in place of an encoder; its own options apply. A sweep stands for the task that it chose."""
    name: str | None = None
    """The name of the embeddings; default: the task's name, or the last component of the encoder's."""
    allow_unknown_tokens: bool = False
    """Encode parts in which more than half of the tokens are unknown to the tokenizer; by default such a part ends the
    job, because its vectors say little about the texts. Not part of the fingerprint."""
    vectors: EncoderOptions = field(default_factory=EncoderOptions)


def main(options: EncodeCorpus) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: EncodeCorpus) -> Artifact | None:
    """Encodes the corpus. Returns the newest generation of the embeddings, or None with --plan."""
    store.require_not_empty()
    options = replace(options, task=chosen_task(store, options.task))
    encoder_options = options.vectors
    spec = find_encoder_spec(store, options.encoder, options.task, encoder_options)
    if spec.query_model:
        raise InputError(
            f"{Parameter('task', options.task)}: {spec.query_model} is an encoder of queries only, and the backbone "
            f"encodes its passages: give {Parameter('encoder', spec.name)}"
        )
    name = options.name or options.task or spec.name.rstrip("/").rpartition("/")[2]
    check_name("embeddings", name)
    encoder_settings = spec.settings("passage")
    reader = find_index_kind(encoder_settings).reader
    kind = reader.kind
    is_already_encoded = is_encoded(store, name, encoder_settings, options.limit)
    if options.plan and is_already_encoded:
        print_complete(store.generations("embeddings", name)[-1].url)
        return None
    equal = () if options.name else find_equal_embeddings(store, encoder_settings, options.limit)
    if equal and name not in equal:
        say(
            f"{WARNING}embeddings/{equal[0]} has the same encoder and settings; this command makes embeddings/{name} "
            f"too: give {Parameter('name', equal[0])} to extend that one instead"
        )
    if not is_already_encoded:
        work = plan_work(store, options, spec, reader, name)
        if options.plan:
            print_plan(options, work, expected_numerics(store, options, spec, kind, name))
            return None
        say_speed(encode(store, options, spec, reader, name))
    generations = store.generations("embeddings", name)
    for artifact in generations:
        say(
            f"{artifact.url}: {artifact.rows:,} {kind.describe_vectors(encoder_settings)}, "
            f"{artifact.config['numerics']}"
        )
    print_cuts(options, spec, generations)
    if warning := describe_broken([part for artifact in generations for part in artifact.numbered_parts("part")]):
        say(f"{WARNING}{warning}")
    return generations[-1]


def say_speed(speed: EncodingSpeed) -> None:
    """Prints the speed of an encoding, and how many vectors it has copied."""
    if speed.tokens:
        say(
            f"  an encoder starts in {speed.startup:.1f} s, then {speed.rows / speed.seconds:,.0f} passages/s, "
            f"{speed.tokens / speed.seconds:,.0f} tokens/s"
        )
    if speed.copied:
        say(f"  {speed.copied:,} vectors were copied from deleted passages with the same text")


def print_cuts(options: EncodeCorpus, spec: EncoderSpec, generations: Sequence[Artifact]) -> None:
    """Prints how many passages were cut, including those of earlier runs; prints nothing if none was."""
    cuts = sum_cuts(part for artifact in generations for part in artifact.numbered_parts("part"))
    if cuts.cut_texts:
        step = f"give a larger {Parameter('passage_length')} under another {Parameter('name')}"
        if options.task is not None:
            step = f"train the task under another name with a larger {Parameter('passage_length')}"
        say(cuts.line("passages", step, spec.length_limit("passage")))


@dataclass
class EncodingSpeed:
    """Measures the speed of an encoding.

    Attributes:
        startup: Seconds that an encoder takes to start.
        rows, tokens: What was encoded now.
        copied: Number of vectors that were copied now.
        ready, last: When the first encoder was ready and the last part was committed, in seconds since the epoch.
    """

    startup: float = 0.0
    rows: int = 0
    tokens: int = 0
    copied: int = 0
    ready: float = float("inf")
    last: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the time at which the first encoder was ready to the last part."""
        return max(self.last - self.ready, 1e-9)

    def add(self, done: PartDone) -> None:
        """Records a part that this run has encoded."""
        self.startup, self.ready, self.last = done.startup, min(self.ready, done.ready), time.time()
        self.rows, self.tokens = self.rows + done.rows - done.copied, self.tokens + done.tokens
        self.copied += done.copied


def encode(
    store: Store, options: EncodeCorpus, spec: EncoderSpec, reader: type[EmbeddingsReader], name: str
) -> EncodingSpeed:
    """Encodes the pending parts of the corpus, completes its generations, and returns the speed."""
    kind = reader.kind
    model_type = kind.batched_model_type(spec.settings("passage"))
    runner, resources = open_encoders(store, options, spec, model_type, name)
    numerics = choose_numerics(store, options, spec, model_type, name, runner, resources)
    if isinstance(runner, LocalRunner):
        say_dtype_choice(spec.options, numerics)
    work = EncodeCorpusWork(
        store,
        spec,
        reader,
        name,
        resources=resources,
        numerics=numerics,
        limit=options.limit,
        allow_unknown_tokens=options.allow_unknown_tokens,
    )
    print_topics(work)
    speed = EncodingSpeed()
    stages: list[StageProgress] = []
    has_warned_of_drift = False

    def open_stage(name: str, total: int | None, noun: str, artifact: str) -> StageProgress:
        stages.append(StageProgress(name, total, noun, artifact))
        return stages[-1]

    def observe(unit: WorkUnit, result: PartDone | dict[str, Any]) -> None:
        done = result if isinstance(result, PartDone) else PartDone(**result)
        nonlocal has_warned_of_drift
        is_first = not speed.last
        speed.add(done)
        stages[-1].add("tokens", done.tokens)
        if is_first and (warning := kind.warning(done.rows, done.size_bytes)):
            stages[-1].say(f"warning: {warning}")
        if done.drift and not has_warned_of_drift:  # all workers compare their encoders with the same vectors
            has_warned_of_drift = True
            stages[-1].say(f"warning: {done.drift}")

    run_work(store, work, runner, open_stage, observe=observe)
    return speed


def choose_numerics(
    store: Store,
    options: EncodeCorpus,
    spec: EncoderSpec,
    model_type: str | None,
    name: str,
    runner: Runner,
    resources: WorkerResources,
) -> str:
    """Returns the numerics class of the embeddings: that with which they were begun, or that of the first worker."""
    count = count_pending(store, name, options.limit)
    per_encoder = WorkerResources(resources.cores, resources.gpus)
    return numerics_of(runner, spec.options, model_type, per_encoder, count, pinned_numerics(store, name))


def say_dtype_choice(options: EncoderOptions, numerics: str) -> None:
    """Prints a line if the dtype of a numerics class may surprise on this machine; see `describe_dtype_choice`."""
    from riptide.retriever.forward.numerics import describe_dtype_choice

    if line := describe_dtype_choice(options, numerics):
        say(line)


def open_encoders(
    store: Store, options: EncodeCorpus, spec: EncoderSpec, model_type: str | None, name: str
) -> tuple[Runner, WorkerResources]:
    """Returns the runner and the resources of an encoder: a pool of encoders on a cluster, otherwise this process.

    Embeddings that are resumed get the kind of device that began them.

    Args:
        store: The store.
        options: The options of the job.
        spec: The encoder.
        model_type: As of `EncoderNumericsTask`.
        name: The name of the embeddings.

    Raises:
        InputError: If the cluster or this machine cannot provide the resources, or for another kind of device.
    """
    request = options.worker_request()
    gpus = choose_gpus(store, options, spec, name)
    if not join_cluster(store, private=options.ray):
        runner = LocalRunner(gpus=num_gpus(), request=request)
        return runner, WorkerResources(cores=options.cpus, gpus=gpus, calls=CALLS)
    from riptide.retriever.forward.numerics import choose_device
    from riptide.retriever.forward.packing import will_pack

    weights = sum(file.stat().st_size for file in weight_files(find_model_folder(spec.folder_of("passage"))))
    reports = cluster_reports()
    pool = choose_pool(
        replace(request, gpus=gpus),
        weights=weights,
        packed=lambda: will_pack(model_type, spec.options, choose_device("cpu")),
        reports=reports,
    )
    return RayActors(pool, reports, store), WorkerResources(cores=pool.cpus, gpus=pool.gpus, calls=CALLS)


def choose_gpus(store: Store, options: EncodeCorpus, spec: EncoderSpec, name: str) -> int | None:
    """Returns the GPUs per encoder: 0 for int8.

    Raises:
        InputError: If the embeddings were begun on another kind of device, or for a GPU with int8.
    """
    place = f"{store.url}/{artifact_key('embeddings', f'{name}/{generation(0)}')}"
    return pinned_gpus(pinned_numerics(store, name), options.gpus, place, spec.options.dtype)


def pinned_numerics(store: Store, name: str) -> str | None:
    """Returns the numerics class with which the embeddings of this name were begun; None: there are none."""
    pinned = store.pinned_config(artifact_key("embeddings", f"{name}/{generation(0)}")) or {}
    return pinned.get("numerics")


def plan_work(
    store: Store, options: EncodeCorpus, spec: EncoderSpec, reader: type[EmbeddingsReader], name: str
) -> EncodeCorpusWork:
    """Returns the work for --plan, without the numerics class of new embeddings, which only a worker determines.

    Raises:
        InputError: If the name is taken by other embeddings.
    """
    choose_gpus(store, options, spec, name)
    work = EncodeCorpusWork(store, spec, reader, name, resources=WorkerResources(), numerics="", limit=options.limit)
    check_targets(store, work)
    return work


def expected_numerics(
    store: Store, options: EncodeCorpus, spec: EncoderSpec, kind: VectorKind, name: str
) -> str | None:
    """Returns the numerics class that the vectors will have; None if a worker of a cluster decides it."""
    if find_cluster(private=options.ray) is not None:
        return pinned_numerics(store, name)
    model_type = kind.batched_model_type(spec.settings("passage"))
    return choose_numerics(
        store, options, spec, model_type, name, *open_encoders(store, options, spec, model_type, name)
    )


def print_plan(options: EncodeCorpus, work: EncodeCorpusWork, numerics: str | None) -> None:
    """Prints the plan of an encoding: what it reads and writes. The time is unknown before a run."""
    spec, kind = work.spec, work.kind
    encoder_settings = work.encoder_settings
    corpus, rows = work.corpus, work.num_rows
    text = sum(part.part.bytes for part in corpus.parts)
    say(f"corpus   {corpus.num_rows:,} passages in {len(corpus.parts):,} parts, {format_bytes(text)}")
    say(
        f"encoder  {options.task or spec.name}: {encoder_settings['dim']} dimensions, {similarity_of(encoder_settings)}"
    )
    say(f"numerics {numerics or 'decided by the first worker of the cluster'}")
    print_topics(work)
    print_stages(work)
    if copied := work.max_copied_vectors():
        say(f"copies   at most {copied:,} vectors of deleted passages, to passages with the same text")
    say(f"writes   {kind.describe_size(encoder_settings, rows)}")
    say(f"tokens   about {text / 4.5 * rows / max(1, corpus.num_rows):,.0f} (4.5 bytes a token), before cutting")


def print_topics(work: EncodeCorpusWork) -> None:
    """Prints the source of the topics of passages, if the encoding uses topics."""
    if work.topics is None:
        return
    rows, fitted = work.num_rows, work.topics.fitted
    stored = 0
    if fitted is not None and work.topics.covers(work.corpus.generations[0]):
        stored = min(rows, work.topics.num_stored)
    key = "" if fitted is None else f" in {fitted.key}"
    say(f"topics   {stored:,} stored{key}, {rows - stored:,} inferred from the texts of the passages")


if __name__ == "__main__":
    run(main, EncodeCorpus)
