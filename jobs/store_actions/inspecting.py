"""Lists the artifacts of a store, and prints one of them or a query of a run."""

from __future__ import annotations

import contextlib
import json
import time

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.judgements import read_run_query
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import Key
from riptide.indexing.store.sealed_json import MANIFEST, PROVENANCE, check_own_hash
from riptide.indexing.store.store import Store
from riptide.jobs.common.cut_counts import stored_counts
from riptide.jobs.common.printing import say, say_hits
from riptide.jobs.store_actions.removing import raise_for_problems
from riptide.jobs.store_actions.store_options import StoreJob
from riptide.process.memory import format_bytes


def list_artifacts(store: Store, limit: int | None) -> None:
    """Prints a line for each artifact (key, size, rows, time, inputs), then the totals."""
    problems: list[str] = []
    table: list[tuple[str, ...]] = [("artifact", "size", "rows", "made", "from")]
    manifests, total = store.storage.find("", {MANIFEST}), 0
    written = {file.removesuffix(f"/{MANIFEST}"): seconds for file, seconds in manifests.items()}
    keys, corpus = list(written), open_corpus(store)
    known = {artifact.key: artifact for artifact in corpus.generations} if corpus else {}
    unfinished = unfinished_artifacts(store, limit)
    for key in keys[:limit]:
        try:
            artifact = known.get(key) or Artifact(store.storage, store.cache, key)
        except FileNotFoundError:  # removed after the keys were listed
            continue
        except CorruptError as error:
            problems.append(f"{error}")
            unfinished = {key: "damaged: its manifest cannot be read"} | unfinished
            continue
        size = sum(part.bytes for part in artifact.parts)
        total += size
        written_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(written[key]))
        parents = ", ".join(entry["artifact"] for entry in artifact.inputs.values()) or "-"
        table.append((key, format_bytes(size), f"{artifact.rows:,}", written_at, parents))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for key, size_text, rows, written_at, parents in table:
        say(f"{key:{widths[0]}}  {size_text:>{widths[1]}}  {rows:>{widths[2]}}  {written_at:{widths[3]}}  {parents}")
    for key, state in unfinished.items():
        say(f"{key:{widths[0]}}  {state}")
    shown = f"{len(table) - 1} of {len(keys)}" if len(table) - 1 < len(keys) else f"{len(keys)}"
    corpus_size = f"; corpus: {corpus.describe_size()}" if corpus else ""
    say(f"{shown} artifacts, {format_bytes(total)}{corpus_size}")
    raise_for_problems(store, problems, "restore them, or remove their artifacts and make them again")


def open_corpus(store: Store) -> Corpus | None:
    """Opens the corpus of a store; returns None if it cannot be read."""
    with contextlib.suppress(InputError):
        return Corpus.open(store)
    return None


def unfinished_artifacts(store: Store, limit: int | None) -> dict[str, str]:
    """Returns the state of each incomplete artifact, by key."""
    superseded, failed = store.superseded_drafts(), store.failed_drafts()
    states = {}
    for key in store.incomplete_keys()[:limit]:
        if key in failed:
            states[key] = f"failed: the next command replaces it, gc removes it after an hour; {failed[key]}"
        elif key in superseded:
            states[key] = "superseded: a later generation has its rows; gc removes it a day after its last change"
        else:
            states[key] = "incomplete: the command that makes it resumes it"
    return states


def newest_key(store: Store, key: str) -> str:
    """Returns the key of an artifact, or of its newest generation; complete generations are preferred to drafts."""
    keys = store.find_keys(key)
    return max(set(keys).intersection(store.keys(key)), default=keys[-1])


def print_artifact(store: Store, key: str, limit: int | None) -> None:
    """Prints the lineage, configuration, notes and parts of an artifact."""
    artifact = store.open(*Key.parse(key))
    file = f"{key}/{PROVENANCE}"
    try:
        provenance = check_own_hash(store.storage.read(file), f"{store.url}/{file}")
    except FileNotFoundError as error:
        raise InputError(f"{store.url}/{file}: the file is missing; restore it, or remove {key}") from error
    say(f"{artifact.url}\nfingerprint  {artifact.fingerprint}")
    for role, entry in artifact.inputs.items():
        say(f"input        {role}: {entry['artifact']} {entry['fingerprint'][:12]}")
    for needed_by in store.dependents(key):
        say(f"needed by    {needed_by}")
    say(f"made         {provenance['finished']} on {provenance['host']} by {' '.join(provenance['command'])}")
    say(f"versions     {', '.join(' '.join(pair) for pair in provenance['versions'].items())}")
    say(f"config       {json.dumps(artifact.config, indent=1, ensure_ascii=False)}")
    say(f"notes        {json.dumps(artifact.notes, indent=1, ensure_ascii=False)}")
    if Key.parse(key).kind == "corpus":
        say(f"corpus       {Corpus.open(store).describe_size()}, of all generations")
    for counts in stored_counts(artifact):
        say(f"cuts         {counts}")
    for part in artifact.parts[:limit]:
        say(f"part         {part.file:44} {part.rows:>12,} rows {format_bytes(part.bytes):>10}  {part.sha256[:12]}")


def check_query_id_options(options: StoreJob, key: str) -> None:
    """Raises InputError if --query-id or --k does not fit the other options."""
    if options.query_id is None:
        if options.k is not None:
            raise InputError(
                f"{options.action} {Parameter('k', options.k)}: only show with {Parameter('query_id')} prints hits"
            )
        return
    if options.action != "show" or not key.startswith("runs/"):
        raise InputError(f"{options.action} {key} {Parameter('query_id', options.query_id)}: expected show runs/NAME")
    if options.limit is not None:
        raise InputError(
            f"{Parameter('query_id')} with {Parameter('limit', options.limit)}: "
            f"{Parameter('k', 'N')} sets the number of hits"
        )


def show_query(store: Store, key: str, query_id: str, k: int) -> None:
    """Prints a query of a run: its metrics, the first k hits, deeper judged hits, and missed relevant passages."""
    run_artifact = store.open(*Key.parse(key))
    query = read_run_query(store, run_artifact, query_id)
    text = query.text or ""
    config = run_artifact.config
    values = "".join(f", {metric} {value:.4f}" for metric, value in query.metrics.items())
    say(f"{query_id}  {' '.join(text.split()) or '-'}")
    say(f"{key}: {len(query.hits):,} hits in {config['source']}, split {config['split']}{values}")
    for remark in query.remarks:
        say(f"  {remark}")
    tables = {
        "": query.hits[:k],
        f"judged, below rank {k}:": [hit for hit in query.hits[k:] if hit.relevance is not None],
        "missing from the run:": query.missed,
    }
    for title, hits in tables.items():
        if hits:
            say(f"\n{title}".rstrip() if title else "")
            say_hits(hits, text, with_judgements=True)
    if query.num_missed_irrelevant:
        say(f"\n{query.num_missed_irrelevant:,} more judged passages are missing, with relevance 0 or less")
