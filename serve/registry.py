"""Adds prompts that come over HTTP to the store as artifacts, and to a new release as tasks."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from indexing.artifact import Artifact, fingerprint_of
from indexing.cache import file_sha256
from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differences
from indexing.models import commit_files
from indexing.store import Store
from retriever.encoder import describe
from retriever.errors import InputError
from retriever.files import resolve
from retriever.options import SIDES
from retriever.prompt_table import task_config
from retriever.prompts import SETTINGS, WEIGHTS, TaskPrompt, check_backbone, check_offsets, load_prompt
from retriever.recipe import read_recipe
from retriever.synthesis.saved import SavedSynthesis
from serve.release import BASE, GIVEN, TASK_NAME, Opened, Release, Space, Task, check_passages, open_space

MOST_TOKENS = 1_024  # tokens of a prompt
# Limits of what computes the prompts of queries: without them, a small file could make the service keep many gigabytes,
# since what is kept grows with products of the sizes.
MOST_BASIC = 1_024  # basic prompts
MOST_HIDDEN = 16_384  # sizes of the hidden layers
MOST_KEPT = 1 << 28  # numbers that the service keeps of a task: 1 GiB in float32
MOST_SETTINGS = 1 << 20  # bytes of a prompt's settings


def take_prompt(
    store: Store, release: Release, name: str, weights: bytes, settings: bytes, index: str | None
) -> Release:
    """Checks a prompt, commits it to the store, and returns the release with a task of that prompt.

    Args:
        store: The store.
        release: The release to start from; a task of the same name is replaced.
        name: Name of the task.
        weights: Content of prompt.safetensors.
        settings: Content of prompt.json.
        index: Name of the index of its passages, or of embeddings, of which every vector is scored; None: the space of
            the backbone's own task.

    Raises:
        InputError: If the prompt is damaged, if it is for another backbone or other settings, or if the index holds
            other vectors than those of its passages.
    """
    if not TASK_NAME.fullmatch(name) or name == BASE:
        raise InputError(f"task {name!r}: expected up to 100 letters, digits, '.', '_' and '-', and not {BASE!r}")
    if len(settings) > MOST_SETTINGS:
        raise InputError(f"{SETTINGS}: {len(settings):,} bytes, expected up to {MOST_SETTINGS:,}")
    artifacts = Opened(store, release)
    if artifacts.spec is None:
        raise InputError(f"task {name}: this release has no dense embeddings, over which prompts are served")
    space = _named_space(store, artifacts, index)
    with tempfile.TemporaryDirectory(prefix="riptide-task-") as folder:
        Path(folder, WEIGHTS).write_bytes(weights)
        Path(folder, SETTINGS).write_bytes(settings)
        try:
            prompt = load_prompt(Path(folder))
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "")) from error
        check_prompt(name, prompt, artifacts.spec, space.embeddings)
        digest = fingerprint_of([file_sha256(Path(folder, file)) for file in (WEIGHTS, SETTINGS)])
        artifact = keep_prompt(store, f"{name}.{digest[:12]}", Path(folder), artifacts.spec, prompt)
    prompt_name = artifact.key.partition("/")[2]
    bm25 = min((task.bm25 for task in release.tasks if task.bm25), default=None)  # a release has one BM25 index at most
    task = Task(name, prompt_name, *space.names, bm25, release.tasks[0].sources)  # all tasks have the same ones
    return release.with_task(task, [artifact, *space.generations])


def check_prompt(name: str, prompt: TaskPrompt, spec: EncoderSpec, vectors: Embeddings) -> None:
    """Checks that a prompt fits a backbone, its settings and the embeddings of the passages.

    Args:
        name: Name of the task.
        prompt: The prompt.
        spec: The release's encoder.
        vectors: The embeddings that the task searches.

    Raises:
        InputError: If the prompt does not fit the backbone or its settings, or if its passages have other vectors.
    """
    folder = spec.folder_for(prompt)
    described = describe(folder, spec.options)
    check_backbone(prompt, described)
    check_offsets(read_recipe(resolve(folder), spec.options), {side: prompt.offset(side) for side in SIDES})
    for matrices in map(prompt.matrices, SIDES):
        if matrices and not 1 <= matrices[0].shape[3] <= MOST_TOKENS:
            raise InputError(f"task {name}: a prompt of {matrices[0].shape[3]} tokens, expected 1 to {MOST_TOKENS}")
        if (numbers := sum(matrix.numel() for matrix in matrices)) > MOST_KEPT:
            raise InputError(
                f"task {name}: {len(matrices):,} prompts of topics with {numbers:,} numbers, expected up to "
                f"{MOST_KEPT:,}: use fewer topics or shorter prompts"
            )
    if prompt.synthesis is not None:
        check_synthesis(name, prompt.synthesis)
    as_served = replace(prompt.options, dtype=spec.options.dtype, compile=spec.options.compile)
    actual = describe(folder, as_served)
    if differ := differences(described, actual):
        raise InputError(f"task {name}: its prompt was trained with other settings than the release's: {differ}")
    of_passages = describe(spec.folder_of("passage"), as_served) if spec.is_untied else actual
    check_passages(name, task_config(of_passages, prompt, "passage"), vectors)


def check_synthesis(name: str, synthesis: SavedSynthesis) -> None:
    """Raises InputError if what computes the prompts of a task's queries is larger than a service takes over HTTP."""
    options = synthesis.options
    limits = {"prompts": MOST_BASIC, "length": MOST_TOKENS, "hidden": MOST_HIDDEN, "bottleneck": MOST_HIDDEN}
    for field, most in limits.items():
        if getattr(options, field) > most:
            raise InputError(
                f"task {name}: {SETTINGS}: synthesis.{field}: {getattr(options, field):,}, expected up to {most:,}"
            )
    if (numbers := synthesis.kept_numbers()) > MOST_KEPT:
        raise InputError(
            f"task {name}: {SETTINGS}: synthesis: with these sizes {numbers:,} numbers are kept, expected up "
            f"to {MOST_KEPT:,}: use fewer or shorter basic prompts"
        )


def keep_prompt(store: Store, name: str, folder: Path, spec: EncoderSpec, prompt: TaskPrompt) -> Artifact:
    """Commits the two files of a prompt from a folder to the store, and returns the artifact prompts/NAME."""
    with store.create("prompts", name, config={GIVEN: name}, inputs=spec.inputs()) as draft:
        if not draft.complete:
            draft.note(backbone=spec.name, options=prompt.options.stored())
            if prompt.synthesis is not None:
                draft.note(synthesis=prompt.synthesis.settings())
            if prompt.topics is not None:
                draft.note(topics=prompt.topics.settings())
            commit_files(draft, folder)
    return store.open("prompts", name)


def _named_space(store: Store, artifacts: Opened, name: str | None) -> Space:
    """Returns the space of an index or of embeddings by name; None: the space of the backbone's own task.

    Raises InputError if the name does not exist, or if it belongs to another corpus than the release's.
    """
    spaces = {task.space for task in artifacts.release.tasks if task.space}
    if name is None:
        base = artifacts.release.task(BASE)
        candidates = {base.space} if base and base.space else spaces
        if len(candidates) > 1:
            names = ", ".join(sorted(index or embeddings for embeddings, index in spaces))
            raise InputError(f"index: this release has several; name one of them: {names}")
        [(embeddings, index)] = candidates
        return Space(artifacts.embeddings[embeddings], artifacts.indexes[index] if index else None)
    for embeddings, index in spaces:
        if name == index:
            return Space(artifacts.embeddings[embeddings], artifacts.indexes[index])
    if name in store.names("index"):
        return open_space(store, str(store.generations("index", name)[-1].config["embeddings"]), name, artifacts.corpus)
    if name in artifacts.embeddings:
        return Space(artifacts.embeddings[name], None)
    if name in store.names("embeddings"):
        return open_space(store, name, None, artifacts.corpus)
    names = ", ".join(sorted({*store.names("index"), *store.names("embeddings")}))
    raise InputError(f"index {name!r}: {store.url} has no index or embeddings of that name; it has {names}")
