"""Plans a release: its tasks, and the artifacts of the store that they use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.dense.index import Index
from riptide.indexing.embeddings.dense_embeddings import DENSE, Embeddings
from riptide.indexing.embeddings.named_encoders import (
    EncoderSpec,
    check_prompt_settings,
    describe_differences,
    differing_settings,
)
from riptide.indexing.hit_sources.dense import SearchSpace
from riptide.indexing.hit_sources.grammar import parse_source
from riptide.indexing.hit_sources.modes import dense_names, find_index_over, has_dense
from riptide.indexing.hit_sources.registry import open_source
from riptide.indexing.hit_sources.source_kind import SearchContext
from riptide.indexing.lucene.bm25_index import Bm25
from riptide.indexing.maintenance.retention import GIVEN
from riptide.indexing.search.rescoring import reranker_inputs
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.retriever.options import EncoderOptions
from riptide.serve.release.release import Release, fingerprints_of
from riptide.serve.release.release_tasks import ServedTask

TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# The kinds of sources that a task has without `sources`, with the parameter that names each of them.
TASK_PARAMETERS = {"bm25": "bm25", "exact": "embeddings", "index": "index"}
BASE = "default"  # name of the task that encodes with the backbone alone, without a prompt
NO_EMBEDDINGS = "none"  # value of `embeddings` for a release without dense search
_NO_DENSE = "a prompt is one of an encoder of dense vectors, and the release has no dense embeddings"
_PUT_INSTEAD = "remove all but one of them, or put the task over HTTP, naming one"


def plan_release(
    store: Store,
    *,
    embeddings: str | None = None,
    index: str | None = None,
    bm25: str | None = None,
    tasks: Iterable[str] | None = None,
    reranker: str | None = None,
    live: Release | None = None,
    sources: Iterable[str] | None = None,
    query_model: str | None = None,
) -> tuple[Release, dict[str, str]]:
    """Plans a release of artifacts of a store, without loading a model.

    Args:
        store: The store.
        embeddings: Name of the backbone's embeddings; None: the only dense ones. With NO_EMBEDDINGS, or if the store
            has no dense embeddings, but BM25 or `sources`, the release has one task, without dense search.
        index: Name of the index over them; None: the only one, or exact search without any.
        bm25: Name of the BM25 index; None: the only one, if any.
        tasks: The tasks to serve; None: the bare backbone and every prompt that fits. A prompt for passages is served
            over the embeddings that were made with it.
        reranker: The re-ranker, None for none.
        live: The live release. Its tasks that came over HTTP are kept; other prompts that came over HTTP belong to
            deleted tasks and are not served.
        sources: Sources of other kinds that every task serves, in the grammar of sources; None: those of the live
            release.
        query_model: models/NAME that encodes queries for the dense embeddings; None: their own encoder.

    Returns:
        The release, and for each prompt that it excludes the reason, in one line that starts with the task's name.

    Raises:
        InputError: If a name is unknown, or if the named artifacts do not fit together.
    """
    corpus = Corpus.open(store)
    lexical = Bm25.open(store, bm25, corpus) if bm25 or store.names("bm25") else None
    names, artifacts = (
        open_sources(store, sources, corpus) if sources is not None else _live_sources(store, live, corpus)
    )
    artifacts += [*corpus.generations, *(lexical.generations if lexical else [])]
    artifacts += reranker_inputs(store, reranker or "").values()
    searched: dict[str, Any] = {"bm25": lexical.name if lexical else None, "sources": names}  # what every task searches
    if not _has_dense_search(store, embeddings, index, has_others=bool(lexical or names)):
        if prompted := [name for name in tasks or () if name != BASE]:
            raise InputError(f"task {prompted[0]}: {_NO_DENSE}")
        excluded = {name: f"task {name}: {_NO_DENSE}" for name in store.names("prompts")}
        return Release(
            None, {}, (ServedTask(BASE, None, None, **searched),), fingerprints_of(artifacts), reranker
        ), excluded
    base_space = open_space(store, *dense_names(store, embeddings, index), corpus)
    options = base_space.embeddings.encoder_options
    name = base_space.embeddings.encoder_name
    spec = EncoderSpec(store, name, EncoderOptions(**options), query_model=query_model)
    artifacts += spec.inputs().values()
    planned, excluded = _plan_tasks(store, spec, base_space, corpus, tasks, live)
    for task, space in planned.items():
        artifacts += [*space.generations, *([store.open("prompts", task.prompt)] if task.prompt else [])]
    served = tuple(sorted((replace(task, **searched) for task in planned), key=lambda task: task.name))
    return Release(name, options, served, fingerprints_of(artifacts), reranker, query_model), excluded


def _plan_tasks(
    store: Store,
    spec: EncoderSpec,
    base_space: SearchSpace,
    corpus: Corpus,
    names: Iterable[str] | None,
    live: Release | None,
) -> tuple[dict[ServedTask, SearchSpace], dict[str, str]]:
    """Returns the tasks with dense search and their spaces, and the reasons why prompts are excluded.

    Args:
        store: The store.
        spec: The release's encoder.
        base_space: The backbone's space.
        corpus: The corpus.
        names: The tasks to serve; None: all that fit.
        live: The live release, None without one.
    """
    planned: dict[ServedTask, SearchSpace] = {}
    excluded: dict[str, str] = {}
    trained, received = _prompts_by_origin(store)
    uploaded = {task.name: task for task in live.tasks if task.prompt in received} if live else {}
    for name in dict.fromkeys([BASE, *trained, *uploaded] if names is None else names):
        prompt = None if name == BASE else uploaded[name].prompt if name in uploaded else name
        try:
            _check_task_name(name)
            space = _find_space(store, replace(spec, task=prompt), base_space, corpus, live, uploaded.get(name))
        except InputError as error:
            excluded[name] = f"task {name}: {error}"
            if names is not None:
                raise InputError(excluded[name]) from error
        else:
            planned[ServedTask(name, prompt, *space.names)] = space
    if not planned:
        raise InputError(
            f"{store.url}: no task fits embeddings/{base_space.embeddings.name}: {'; '.join(excluded.values())}"
        )
    return planned, excluded


def _has_dense_search(store: Store, embeddings: str | None, index: str | None, *, has_others: bool) -> bool:
    """Returns whether a release has dense search.

    Args:
        store: The store.
        embeddings, index: As of `plan_release`.
        has_others: Whether the release has BM25 or other sources.

    Raises:
        InputError: If it has none, but an index is named, or nothing else can be searched, or dense embeddings were
            begun and are not complete: the user may expect to search them.
    """
    if embeddings == NO_EMBEDDINGS:
        if index is not None:
            raise InputError(
                f"{Parameter('index', index)}: expected no index with {Parameter('embeddings', NO_EMBEDDINGS)}"
            )
        if not has_others:
            raise InputError(
                f"{Parameter('embeddings', NO_EMBEDDINGS)}: {store.url} has no BM25 index, and no sources are named, "
                f"so nothing can be searched: build an index ({Command('build-bm25')}), or name {Parameter('sources')}"
            )
        return False
    if embeddings is not None or index is not None or not has_others:
        return True
    if has_dense(store):
        return True
    for key in (key for key in store.incomplete_keys() if key.startswith("embeddings/")):
        manifest = store.manifest(key)
        if manifest is None or DENSE.is_kind_of(manifest["config"]):
            raise InputError(
                f"{store.url}/{key} was begun and is not complete: run the command that makes it again, or give "
                f"{Parameter('embeddings', NO_EMBEDDINGS)} to serve the store without dense search"
            )
    return False


def _live_sources(store: Store, live: Release | None, corpus: Corpus) -> tuple[tuple[str, ...], list[Artifact]]:
    """Returns the sources of the live release and their artifacts, in the form of `open_sources`."""
    try:
        return open_sources(store, [source for task in live.tasks for source in task.sources] if live else [], corpus)
    except InputError as error:
        raise InputError(
            f"{error}; the live release serves this source: name the sources to serve with {Parameter('sources')}"
        ) from error


def _prompts_by_origin(store: Store) -> tuple[list[str], list[str]]:
    """Returns the names of the prompts that were trained in this store, and of those that were uploaded over HTTP.

    A damaged prompt, whose origin is unknown, is among the first, so `plan_release` reports it by name as excluded.
    """
    trained, received = list[str](), list[str]()
    for name in store.names("prompts"):
        try:
            (received if is_uploaded(store, name) else trained).append(name)
        except InputError:
            trained.append(name)
    return trained, received


def _find_space(
    store: Store,
    spec: EncoderSpec,
    base_space: SearchSpace,
    corpus: Corpus,
    live: Release | None,
    uploaded: ServedTask | None,
) -> SearchSpace:
    """Returns the space that a task searches.

    It is the task's previous space, if it was put over HTTP with another one than the backbone's. Otherwise it is
    `base_space` if the passages are encoded without a prompt, else the embeddings that were made with the prompt.
    spec: the release's encoder with the task's prompt.

    Raises InputError if the encoder cannot use the prompt, or unless there is exactly one such space.
    """
    if (prompt := spec.prompt()) is not None:
        check_prompt_settings(prompt, spec)
    base = live.task(BASE) if live else None
    encoder = spec.settings("passage")
    if uploaded is not None and uploaded.space and (base is None or uploaded.space != base.space):
        space = open_space(store, *uploaded.space, corpus)
        check_passages(encoder, space.embeddings)
        return space
    if not differing_settings(base_space.embeddings.config["encoder"], encoder, passages=True):
        return base_space
    candidates, reasons = _find_embeddings(store, encoder, corpus)
    complete_embeddings = [vectors for vectors in candidates if vectors.num_rows >= base_space.embeddings.num_rows]
    if not complete_embeddings and candidates:
        raise InputError(
            f"embeddings/{candidates[0].name} cover {candidates[0].num_rows:,} of the "
            f"{base_space.embeddings.num_rows:,} passages: encode the others for this task"
        )
    if not complete_embeddings and reasons:
        raise InputError(reasons[0])
    if not complete_embeddings:
        check_passages(encoder, base_space.embeddings)
    if len(complete_embeddings) > 1:
        raise InputError(
            f"{store.url} has several embeddings of its passages: "
            f"{', '.join(vectors.name for vectors in complete_embeddings)}; {_PUT_INSTEAD}"
        )
    [vectors] = complete_embeddings
    return open_space(store, vectors.name, find_index_over(store, vectors.name, _PUT_INSTEAD), corpus)


def _find_embeddings(store: Store, encoder: Mapping[str, Any], corpus: Corpus) -> tuple[list[Embeddings], list[str]]:
    """Returns the embeddings that an encoder made of the corpus, and the reasons why others of it cannot be used.

    encoder: The configuration of the encoder of passages.
    """
    embeddings, reasons = list[Embeddings](), list[str]()
    for name in store.names("embeddings"):
        try:
            config = store.generations("embeddings", name)[-1].config
        except InputError:
            continue  # the manifest is damaged, so the encoder of these embeddings is unknown
        if differing_settings(config["encoder"], encoder, passages=True):
            continue
        try:
            embeddings.append(Embeddings.open(store, name, corpus))
        except InputError as error:
            reasons.append(f"{error}")
    return embeddings, reasons


def open_space(store: Store, embeddings: str, index: str | None, corpus: Corpus) -> SearchSpace:
    """Opens a space: embeddings and, if named, the index over them.

    Args:
        store: The store.
        embeddings: Name of the embeddings.
        index: Name of the index over them; None: every vector is scored.
        corpus: The corpus that they must belong to.

    Raises:
        InputError: If they belong to another corpus.
    """
    vectors = Embeddings.open(store, embeddings, corpus)
    if vectors.num_rows > corpus.num_rows:
        raise InputError(
            f"embeddings/{embeddings} cover {vectors.num_rows:,} passages, the release's corpus has "
            f"{corpus.num_rows:,}: make a release of what the store holds now first"
        )
    return SearchSpace(vectors, Index.open(store, index, vectors) if index else None)


def open_sources(store: Store, sources: Iterable[str], corpus: Corpus) -> tuple[tuple[str, ...], list[Artifact]]:
    """Opens sources of kinds that tasks do not have anyway: returns them with names filled in, and their artifacts.

    Raises:
        InputError: If a source is a fusion, is of a kind that tasks have anyway, or does not fit the corpus.
    """
    names, artifacts = dict[str, None](), list[Artifact]()
    for source in dict.fromkeys(sources):  # mostly, the tasks have the same sources
        expression = parse_source(source)
        kind = expression.terms[0].kind
        if len(expression.terms) > 1:
            raise InputError(f"source {source!r}: expected one source; requests may fuse the sources of a task")
        if kind.name in TASK_PARAMETERS:
            raise InputError(
                f"source {source!r}: name it by parameter {TASK_PARAMETERS[kind.name]}, as the tasks have one"
            )
        hit_source = open_source(kind, SearchContext(store, corpus), expression.terms[0].name)
        if hit_source.source_text not in names:
            names[hit_source.source_text] = None
            artifacts += hit_source.inputs().values()
    return tuple(names), artifacts


def _check_task_name(task: str) -> None:
    """Raises InputError if the name of a task is not allowed."""
    if not TASK_NAME.fullmatch(task):
        raise InputError(
            "expected a name of up to 100 letters, digits, '.', '_' and '-', the first a letter or a digit"
        )


def check_passages(encoder: Mapping[str, Any], vectors: Embeddings) -> None:
    """Raises InputError if embeddings were made with other settings than those of the given encoder of a task."""
    if differ := describe_differences(vectors.config["encoder"], encoder, passages=True):
        raise InputError(
            f"its passages' vectors are not those of embeddings/{vectors.name} ({differ}): "
            "encode the corpus for this task, and name an index over those embeddings"
        )


def is_uploaded(store: Store, prompt: str) -> bool:
    """Returns whether prompts/NAME was uploaded to a running service over HTTP; others were trained in this store."""
    return GIVEN in store.open("prompts", prompt).config
