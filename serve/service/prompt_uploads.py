"""Adds prompts that are uploaded over HTTP to the store as artifacts, and to a new release as tasks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from riptide.base.errors import InputError
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.named_encoders import EncoderSpec, describe_differences
from riptide.indexing.hit_sources.dense import SearchSpace
from riptide.indexing.maintenance.retention import GIVEN
from riptide.indexing.storage.cache import file_sha256
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.process.memory import free_memory
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.model.json_fields import field_errors, format_json
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.model.recipe import describe, read_recipe, settings_of
from riptide.retriever.options import SIDES, EncoderOptions
from riptide.retriever.prompts.prompt_table import task_config
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.task_prompt import (
    SETTINGS,
    WEIGHTS,
    TaskPrompt,
    check_prompt_backbone,
    load_prompt,
)
from riptide.serve.parts.part import check_deadline
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.planning import BASE, TASK_NAME, check_passages, open_space
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask
from riptide.serve.service_errors import MemoryShortageError, RequestError, request_errors

MAX_TOKENS = 1_024  # maximum tokens of a prompt
# Limits of a network that computes the prompts of queries. Without them, a small file could make the service keep
# gigabytes, as the memory grows with products of the sizes.
MAX_BASIC = 1_024  # maximum number of basic prompts
MAX_HIDDEN = 16_384  # maximum size of hidden layers
MAX_KEPT = 1 << 28  # maximum number of parameters in memory per task: 1 GiB in float32
MAX_SETTINGS = 256 << 10  # maximum bytes of a prompt's settings
MAX_HEADER = 256 << 10  # maximum bytes of the header of prompt.safetensors, whose parsing holds the GIL
# Maximum number of JSON objects and lists in settings and header, which the garbage collector visits.
MAX_CONTAINERS = 32_768
CHECKS = 2  # uploads that are checked at the same time and share the free memory
# Copies of prompt.safetensors in memory during a check: the file, its stacked prompts, and one of these in float32.
COPIES = 3
RESERVE = 64 << 20  # bytes of memory for other data of a check


@dataclass(frozen=True)
class PromptUpload:
    """A prompt that a client uploads.

    Attributes:
        name: Name of the task.
        weights: prompt.safetensors.
        settings: prompt.json.
        index: Name of the index of its passages, or of embeddings, of which every vector is scored; None: the space of
            the backbone's own task.
    """

    name: str
    weights: BinaryIO
    settings: BinaryIO
    index: str | None


@dataclass(frozen=True)
class CheckedPrompt:
    """A checked upload, whose files are in a temporary folder until they are committed.

    Attributes:
        upload: The upload.
        files: The temporary folder of its two files.
        prompt: The prompt.
        fit: The encoder and the embeddings that it was checked against.
    """

    upload: PromptUpload
    files: TemporaryFolder
    prompt: TaskPrompt
    fit: Any

    def close(self) -> None:
        """Removes the temporary folder."""
        self.files.close()


def check_upload(store: Store, artifacts: ReleaseArtifacts, upload: PromptUpload, deadline: float) -> CheckedPrompt:
    """Checks an uploaded prompt and copies it to a temporary folder; the caller must call close().

    Every step takes time and memory linear in the bytes of the prompt.

    Args:
        store: The store.
        artifacts: The artifacts of the release that the prompt must fit.
        upload: The prompt.
        deadline: Time of `time.monotonic()` in seconds, after which the next step does not begin.

    Raises:
        InputError: If the prompt is damaged, if it is for another backbone or other settings, if the index holds other
            vectors than those of its passages.
        MemoryShortageError: If the free memory does not suffice at the moment.
        ExpiredError: If the deadline has passed.
    """
    name, weights, settings = upload.name, upload.weights, upload.settings
    if not TASK_NAME.fullmatch(name) or name == BASE:
        raise RequestError(
            f"task {format_json(name)}: expected up to 100 letters, digits, '.', '_' and '-', and not {BASE!r}"
        )
    if (size := _size_and_rewind(settings)) > MAX_SETTINGS:
        raise RequestError(f"{SETTINGS}: {size:,} bytes, expected up to {MAX_SETTINGS:,}")
    if (size := int.from_bytes(weights.read(8), "little")) > MAX_HEADER:
        raise RequestError(f"{WEIGHTS}: a header of {size:,} bytes, expected up to {MAX_HEADER:,}")
    for file, text in ((SETTINGS, settings.read()), (WEIGHTS, weights.read(size))):
        if (number := text.count(b"[") + text.count(b"{")) > MAX_CONTAINERS:
            raise RequestError(f"{file}: {number:,} JSON objects and lists, expected up to {MAX_CONTAINERS:,}")
    needed, free = COPIES * _size_and_rewind(weights) + RESERVE, free_memory()
    if needed > free // CHECKS:
        raise MemoryShortageError(
            f"task {name}: the check of {WEIGHTS} needs {needed >> 20:,} MiB of memory, and may use "
            f"{free // CHECKS >> 20:,} of the {free >> 20:,} MiB that are free: try again later, use fewer or shorter "
            "prompts, or serve with more memory"
        )
    spec, space = _find_target(store, artifacts, upload)
    files = TemporaryFolder("task")
    try:
        for file, stream in ((WEIGHTS, weights), (SETTINGS, settings)):
            check_deadline(deadline)
            stream.seek(0)
            with open(files.path / file, "wb") as target:
                shutil.copyfileobj(stream, target)
        check_deadline(deadline)
        prompt = _load_upload(files.path)
        check_deadline(deadline)
        check_prompt(name, prompt, spec, space.embeddings)
        return CheckedPrompt(upload, files, prompt, _prompt_requirements(artifacts.release, space))
    except BaseException:
        files.close()
        raise


def add_task(store: Store, artifacts: ReleaseArtifacts, checked: CheckedPrompt) -> Release:
    """Commits a prompt to the store, and returns the release with a task for that prompt.

    Args:
        store: The store.
        artifacts: The artifacts of the release to start from; a task of the same name is replaced.
        checked: The prompt. It is checked again if the release has another encoder or other embeddings than the
            release that it was checked against.

    Raises:
        InputError: If the prompt does not fit the release.
    """
    release, name = artifacts.release, checked.upload.name
    spec, space = _find_target(store, artifacts, checked.upload)
    if _prompt_requirements(release, space) != checked.fit:
        check_prompt(name, checked.prompt, spec, space.embeddings)
    digest = fingerprint_of([file_sha256(checked.files.path / file) for file in (WEIGHTS, SETTINGS)])
    artifact = _commit_prompt(store, f"{name}.{digest[:12]}", checked, spec)
    bm25 = min((task.bm25 for task in release.tasks if task.bm25), default=None)  # a release has one BM25 index at most
    # All tasks have the same sources.
    task = ServedTask(name, artifact.name, *space.names, bm25, release.tasks[0].sources)
    return release.with_task(task, [artifact, *space.generations])


def _load_upload(folder: Path) -> TaskPrompt:
    """Loads the prompt in a temporary folder. Raises RequestError, as the folder holds only what the client sent."""
    try:
        return load_prompt(folder)
    except InputError as error:
        # Messages begin with the path that was read. The folder has a random name, which no other text has.
        raise RequestError(f"{error}".replace(f"{folder}/", "")) from error


def _find_target(store: Store, artifacts: ReleaseArtifacts, upload: PromptUpload) -> tuple[EncoderSpec, SearchSpace]:
    """Returns the encoder of a release and the space that the task of an upload searches. Raises InputError."""
    if artifacts.spec is None:
        raise RequestError(f"task {upload.name}: this release has no dense embeddings, over which prompts are served")
    return artifacts.spec, _named_space(store, artifacts, upload.index)


def _size_and_rewind(stream: BinaryIO) -> int:
    """Returns the size of a file in bytes, and sets its position to the start."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def _prompt_requirements(release: Release, space: SearchSpace) -> Any:
    """Returns a value to compare: the encoder, its options and the embeddings that a prompt has to fit."""
    encoder = None if release.encoder is None else release.fingerprints.get(release.encoder)
    embeddings_fingerprints = [artifact.fingerprint for artifact in space.generations]
    return release.encoder, encoder, release.encoder_options, embeddings_fingerprints


def check_prompt(name: str, prompt: TaskPrompt, spec: EncoderSpec, vectors: Embeddings) -> None:
    """Raises InputError unless a prompt fits a backbone, its settings and the embeddings of the passages.

    Args:
        name: Name of the task.
        prompt: The prompt.
        spec: The release's encoder.
        vectors: The embeddings that the task searches.

    Raises:
        InputError: If the prompt does not fit the backbone or its settings, or if its passages have other vectors.
    """
    folder = spec.folder_for_prompt(prompt)
    recipe = read_recipe(find_model_folder(folder), spec.options)
    described = settings_of(recipe, spec.options)
    with request_errors(f"task {name}: "), field_errors(SETTINGS, "", TaskPrompt):
        check_prompt_backbone(prompt, recipe, described)
    for matrices in map(prompt.matrices, SIDES):
        if matrices and not 1 <= matrices[0].shape[3] <= MAX_TOKENS:
            raise RequestError(f"task {name}: a prompt of {matrices[0].shape[3]} tokens, expected 1 to {MAX_TOKENS}")
        if (numbers := sum(matrix.numel() for matrix in matrices)) > MAX_KEPT:
            raise RequestError(
                f"task {name}: {len(matrices):,} prompts of topics with {numbers:,} numbers, expected up to "
                f"{MAX_KEPT:,}: use fewer topics or shorter prompts"
            )
    if prompt.synthesis is not None:
        check_synthesis(name, prompt.synthesis)
    as_served = replace(prompt.options, dtype=spec.options.dtype, compile=spec.options.compile)
    with field_errors(SETTINGS, "options.", EncoderOptions):
        actual = describe(folder, as_served)
        of_passages = describe(spec.folder_of("passage"), as_served) if spec.is_untied else actual
    if differ := describe_differences(described, actual):
        raise RequestError(f"task {name}: its prompt was trained with other settings than the release's: {differ}")
    with request_errors(f"task {name}: "):
        check_passages(task_config(of_passages, prompt, "passage"), vectors)


def check_synthesis(name: str, synthesis: SavedSynthesis) -> None:
    """Raises InputError if the network that computes a task's prompts exceeds the limits for uploads."""
    options = synthesis.options
    limits = {"prompts": MAX_BASIC, "length": MAX_TOKENS, "hidden": MAX_HIDDEN, "bottleneck": MAX_HIDDEN}
    for field, most in limits.items():
        if getattr(options, field) > most:
            raise RequestError(
                f"task {name}: {SETTINGS}: synthesis.{field}: {getattr(options, field):,}, expected up to {most:,}"
            )
    if (numbers := synthesis.count_kept_numbers()) > MAX_KEPT:
        raise RequestError(
            f"task {name}: {SETTINGS}: synthesis: with these sizes {numbers:,} numbers are kept, expected up "
            f"to {MAX_KEPT:,}: use fewer or shorter basic prompts"
        )


def _commit_prompt(store: Store, name: str, checked: CheckedPrompt, spec: EncoderSpec) -> Artifact:
    """Commits the two files of a prompt to the store, and returns the artifact prompts/NAME."""
    prompt = checked.prompt
    with store.create("prompts", name, config={GIVEN: name}, inputs=spec.inputs()) as draft:
        if not draft.is_complete:
            draft.add_notes(backbone=spec.name, options=prompt.options.to_dict())
            if prompt.synthesis is not None:
                draft.add_notes(synthesis=prompt.synthesis.settings())
            if prompt.topics is not None:
                draft.add_notes(topics=prompt.topics.settings())
            commit_files(draft, checked.files.path)
    return store.open("prompts", name)


def _named_space(store: Store, artifacts: ReleaseArtifacts, name: str | None) -> SearchSpace:
    """Returns the space of a named index or embeddings; None: the space of the backbone's own task.

    Raises InputError if the name does not exist, or if it belongs to another corpus than the release's.
    """
    spaces = {task.space for task in artifacts.release.tasks if task.space}
    if name is None:
        base = artifacts.release.task(BASE)
        candidates = {base.space} if base and base.space else spaces
        if len(candidates) > 1:
            names = ", ".join(sorted(index or embeddings for embeddings, index in spaces))
            raise RequestError(f"index: this release has several; name one of them: {names}")
        [(embeddings, index)] = candidates
        return SearchSpace(artifacts.embeddings[embeddings], artifacts.indexes[index] if index else None)
    for embeddings, index in spaces:
        if name == index:
            return SearchSpace(artifacts.embeddings[embeddings], artifacts.indexes[index])
    if name in store.names("index"):
        return open_space(store, str(store.generations("index", name)[-1].config["embeddings"]), name, artifacts.corpus)
    if name in artifacts.embeddings:
        return SearchSpace(artifacts.embeddings[name], None)
    if name in store.names("embeddings"):
        return open_space(store, name, None, artifacts.corpus)
    names = ", ".join(sorted({*store.names("index"), *store.names("embeddings")}))
    raise RequestError(f"index {format_json(name)}: the store has no index or embeddings of that name; it has {names}")
