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
from serve.release import BASE, GIVEN, TASK_NAME, Opened, Release, Task, check_passages

MOST_TOKENS = 1_024  # of a prompt


def take_prompt(
    store: Store, release: Release, name: str, weights: bytes, settings: bytes, index: str | None
) -> Release:
    """The release with a task more (or another one of that name): its prompt checked, and kept in the store.

    index: that of its passages; may be left out where the release has one. Raises InputError where the prompt is
    damaged, for another backbone or other settings, or where the index holds other vectors than its passages have.
    """
    if not TASK_NAME.fullmatch(name) or name == BASE:
        raise InputError(f"task {name!r}: expected up to 100 letters, digits, '.', '_' and '-', and not {BASE!r}")
    opened = Opened(store, release)
    embeddings, index, bm25 = _place(release, index)
    with tempfile.TemporaryDirectory(prefix="riptide-task-") as folder:
        Path(folder, WEIGHTS).write_bytes(weights)
        Path(folder, SETTINGS).write_bytes(settings)
        try:
            prompt = load_prompt(Path(folder))
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "")) from error
        check_prompt(name, prompt, opened.spec, opened.embeddings[embeddings])
        digest = fingerprint_of([file_sha256(Path(folder, file)) for file in (WEIGHTS, SETTINGS)])
        artifact = keep_prompt(store, f"{name}.{digest[:12]}", Path(folder), opened.spec, prompt)
    kept = artifact.key.partition("/")[2]
    return release.with_task(Task(name, kept, embeddings, index, bm25), [artifact])


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


def _place(release: Release, index: str | None) -> tuple[str, str | None, str | None]:
    """(embeddings, index, bm25) of the task over an index, or over embeddings named in its place."""
    places = {(task.embeddings, task.index, task.bm25) for task in release.tasks}
    found = [place for place in places if index in (None, place[0], place[1])]
    if len({place[:2] for place in found}) != 1:
        have = ", ".join(sorted({place[1] or place[0] for place in places}))
        raise InputError(f"index {index!r}: expected one of this release's: {have}")
    return min(found, key=str)
