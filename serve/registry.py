"""Which tasks there are: prompts that come in over HTTP become artifacts, and tasks of a new release."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from indexing.artifact import Artifact, fingerprint_of
from indexing.cache import file_sha256
from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differing
from indexing.models import commit_files
from indexing.store import Store
from retriever.encoder import describe
from retriever.errors import InputError
from retriever.options import SIDES
from retriever.prompt_table import task_config
from retriever.prompts import SETTINGS, WEIGHTS, TaskPrompt, check_backbone, load_prompt
from serve.release import BASE, GIVEN, TASK_NAME, Opened, Release, Space, Task, check_passages, open_space

MOST_TOKENS = 1_024  # of a prompt
MOST_SETTINGS = 1 << 20  # bytes


def take_prompt(
    store: Store, release: Release, name: str, weights: bytes, settings: bytes, index: str | None
) -> Release:
    """The release with a task more (or another one of that name): its prompt checked, and kept in the store.

    index: that of its passages, or the name of embeddings, of which every vector is scored then; by default what the
    backbone's own task is searched in. Raises InputError where the prompt is damaged, for another backbone or other
    settings, or where the index holds other vectors than its passages have.
    """
    if not TASK_NAME.fullmatch(name) or name == BASE:
        raise InputError(f"task {name!r}: expected up to 100 letters, digits, '.', '_' and '-', and not {BASE!r}")
    if len(settings) > MOST_SETTINGS:
        raise InputError(f"{SETTINGS}: {len(settings):,} bytes, expected up to {MOST_SETTINGS:,}")
    opened = Opened(store, release)
    space = _named_space(store, opened, index)
    with tempfile.TemporaryDirectory(prefix="riptide-task-") as folder:
        Path(folder, WEIGHTS).write_bytes(weights)
        Path(folder, SETTINGS).write_bytes(settings)
        try:
            prompt = load_prompt(Path(folder))
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "")) from error
        check_prompt(name, prompt, opened.spec, space.embeddings)
        digest = fingerprint_of([file_sha256(Path(folder, file)) for file in (WEIGHTS, SETTINGS)])
        artifact = keep_prompt(store, f"{name}.{digest[:12]}", Path(folder), opened.spec, prompt)
    kept = artifact.key.partition("/")[2]
    words = min((task.bm25 for task in release.tasks if task.bm25), default=None)  # of a release, which has one
    return release.with_task(Task(name, kept, *space.names, words), [artifact, *space.generations])


def check_prompt(name: str, prompt: TaskPrompt, spec: EncoderSpec, vectors: Embeddings) -> None:
    """Raises InputError where a prompt does not fit a backbone and its settings, or its passages are not those that
    were encoded."""
    described = describe(spec.folder, spec.options)
    check_backbone(prompt, described)
    for matrix in map(prompt.of, SIDES):
        if matrix is not None and not 1 <= matrix.shape[3] <= MOST_TOKENS:
            raise InputError(f"task {name}: a prompt of {matrix.shape[3]} tokens, expected 1 to {MOST_TOKENS}")
    own = describe(spec.folder, replace(prompt.options, dtype=spec.options.dtype, compile=spec.options.compile))
    if differ := differing(described, own):
        raise InputError(f"task {name}: its prompt was trained with other settings than the release's "
                         f"({', '.join(differ)} differ)")  # fmt: skip
    check_passages(name, task_config(own, prompt, "passage"), vectors)


def keep_prompt(store: Store, name: str, folder: Path, spec: EncoderSpec, prompt: TaskPrompt) -> Artifact:
    """prompts/NAME, of a folder with a prompt's two files."""
    with store.create("prompts", name, config={GIVEN: name}, inputs=spec.inputs()) as draft:
        if not draft.complete:
            draft.note(backbone=spec.name, options=asdict(prompt.options))
            commit_files(draft, folder)
    return store.open("prompts", name)


def _named_space(store: Store, opened: Opened, name: str | None) -> Space:
    """What a task is searched in, by the name of an index or of embeddings; the backbone's own where none is given.

    Raises InputError where there is no such name, or where what has it is not of the release's corpus.
    """
    spaces = {task.space for task in opened.release.tasks}
    if name is None:
        base = opened.release.task(BASE)
        chosen = {base.space} if base else spaces
        if len(chosen) > 1:
            have = ", ".join(sorted(index or embeddings for embeddings, index in spaces))
            raise InputError(f"index: this release has several; name one of them: {have}")
        [(embeddings, index)] = chosen
        return Space(opened.embeddings[embeddings], opened.indexes[index] if index else None)
    for embeddings, index in spaces:
        if name == index:
            return Space(opened.embeddings[embeddings], opened.indexes[index])
    if name in store.names("index"):
        return open_space(store, str(store.generations("index", name)[-1].config["embeddings"]), name, opened.corpus)
    if name in opened.embeddings:
        return Space(opened.embeddings[name], None)
    if name in store.names("embeddings"):
        return open_space(store, name, None, opened.corpus)
    have = ", ".join(sorted({*store.names("index"), *store.names("embeddings")}))
    raise InputError(f"index {name!r}: {store.url} has no index or embeddings of that name; it has {have}")
