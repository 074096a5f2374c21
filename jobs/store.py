"""List the artifacts of a store; show, remove or export one; remove unused files.

riptide store list --store data/squad
riptide store show index/minilm --store data/squad
riptide store show runs/minilm --query-id 56be4db0acb8001400a502ec --store data/squad
riptide store remove index/minilm --store data/squad
riptide store remove embeddings/minilm --with-dependents --plan --store data/squad
riptide store export prompts/legal --to legal --store data/squad
riptide store gc --store data/squad
"""

from __future__ import annotations

from riptide.jobs.common.cli import run

import contextlib
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from riptide.base.errors import InputError, shorten
from riptide.base.memory import format_bytes
from riptide.base.option_fields import option
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.hit_tables import hit_table, style_for
from riptide.indexing.search.judgements import read_run_query
from riptide.indexing.store.artifact import ABANDONED_S, Artifact
from riptide.indexing.store.cache import CorruptError
from riptide.indexing.store.keys import Key
from riptide.indexing.store.live_release import CURRENT
from riptide.indexing.store.model_artifacts import abandoned_checkpoints, model_folder
from riptide.indexing.store.retention import expired_prompts, expired_releases, remove_prompt, remove_release
from riptide.indexing.store.sealed_json import MANIFEST, PROVENANCE, check_own_hash, seconds_since_work
from riptide.indexing.store.store import Store
from riptide.jobs.common.cut_counts import stored_counts
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say

SERVING = "serving"  # key that stands for the record of the live release
SHOWN_HITS = 10  # default of --k: hits of a query that are shown


@dataclass(frozen=True, kw_only=True)
class StoreJob(Common):
    GROUP: ClassVar = "artifact"

    action: Literal["list", "show", "remove", "export", "gc"] = option(positional=True)
    """What to do; gc removes files, checkpoints, old releases and their prompts over HTTP that nothing names."""
    key: str | None = option(None, positional=True, metavar="KEY")
    """The artifact, as list prints it (show, remove, export). Without a generation, index/minilm for example, it is the
    newest complete one, or for remove all of them. "serving" is the record of the live release, without which the
    release and its artifacts can be removed; end the servers first; tasks over HTTP are forgotten (remove)."""
    to: str | None = option(None, metavar="FOLDER")
    """Folder for the files of a model or a prompt, which keep their names (export)."""
    query_id: str | None = None
    """A query of runs/NAME: print its text, hits and judgements, and the relevant passages that the run misses
    (show)."""
    with_dependents: bool = False
    """Also remove everything that was made from the artifact; --plan lists it (remove)."""
    yes: bool = False
    """Remove without a question what is complete, or what a command is making; without a terminal, these need --yes
    (remove)."""
    k: int | None = option(None, minimum=1)
    """Hits that --query-id prints; default: 10."""
    limit: int | None = None
    """List at most N artifacts, show N parts, or remove N items (gc)."""


def main(options: StoreJob) -> None:
    store = Store(options.store).require_not_empty()
    if options.action in ("show", "remove", "export") and options.key is None:
        listing = f"{Command('store', 'list', store=shlex.quote(options.store))}"
        raise InputError(f"{options.action}: expected an artifact; {listing} shows what there is")
    if options.key is not None and options.action in ("list", "gc"):
        raise InputError(f"{options.action} {options.key}: takes no artifact, it is for the whole store")
    if options.limit is not None and options.action in ("remove", "export"):
        raise InputError(f"{options.action} {Parameter('limit', options.limit)}: an artifact is taken whole")
    if options.to is not None and options.action != "export":
        raise InputError(f"{options.action} {Parameter('to', options.to)}: only export takes a folder")
    if options.with_dependents and options.action != "remove":
        raise InputError(
            f"{options.action} {Parameter('with_dependents')}: only remove takes the artifacts that need another one"
        )
    if options.yes and options.action != "remove":
        raise InputError(f"{options.action} {Parameter('yes')}: only remove asks a question")
    key = (options.key or "").strip("/")
    check_query_id_options(options, key)
    if options.action == "list":
        list_artifacts(store, options.limit)
    elif options.action == "show" and options.query_id is not None:
        show_query(store, key, options.query_id, options.k or SHOWN_HITS)
    elif options.action == "show":
        print_artifact(store, newest_key(store, key), options.limit)
    elif options.action == "remove" and key == SERVING:
        remove_live_record(store, options)
    elif options.action == "remove":
        remove_artifact(store, key, options)
    elif options.action == "export":
        export_artifact(store, newest_key(store, key), options)
    else:
        collect_garbage(store, options)


def newest_key(store: Store, key: str) -> str:
    """Returns the key of an artifact, or of its newest generation; complete generations are preferred to drafts."""
    keys = store.find_keys(key)
    return max(set(keys).intersection(store.keys(key)), default=keys[-1])


def remove_artifact(store: Store, key: str, options: StoreJob) -> None:
    """Removes an artifact and the checkpoints of its training; with --plan, prints what would be removed."""
    freed: list[tuple[str, int]] = []
    artifacts = store.files_to_remove(key, with_dependents=options.with_dependents)
    uses = {each: use for each in artifacts if (use := describe_use(store, each))}
    confirm_removal(store, uses, options)
    for each, files in artifacts.items():
        delete_files(store, files, options)
        print_removal(each, files, options)
        freed += files
    if len(artifacts) > 1:
        say(f"{removal_verb(options)} {len(artifacts)} artifacts, {count_and_bytes(freed)}")


def describe_use(store: Store, key: str) -> str:
    """Returns the reason why others may need an artifact; "" for a draft that no command works on."""
    if key in store.keys(key):
        with contextlib.suppress(CorruptError, FileNotFoundError):
            file = f"{key}/{PROVENANCE}"
            made = check_own_hash(store.storage.read(file), f"{store.url}/{file}")
            return f"complete, made {made['finished']} on {made['host']} by {shorten(' '.join(made['command']), 80)}"
        return "complete"
    idle_s = seconds_since_work(store.storage, key)
    if idle_s is not None and idle_s <= ABANDONED_S:
        return f"a command worked on it {max(0, idle_s):.0f} s ago"
    return ""


def confirm_removal(store: Store, uses: Mapping[str, str], options: StoreJob) -> None:
    """Asks for confirmation before artifacts that others may need are removed, unless --yes or --plan is set.

    Args:
        store: The store.
        uses: Why others may need each of these keys.
        options: The options of the job.

    Raises:
        InputError: If the answer is not yes, or without a terminal.
    """
    if options.yes or options.plan or not uses:
        return
    if not sys.stdin.isatty():
        key, use = next(iter(uses.items()))
        more = f", and {len(uses) - 1} more like it" if len(uses) > 1 else ""
        raise InputError(f"{store.url}/{key}: {use}{more}; others may need it: add {Parameter('yes')} if nobody does")
    for key, use in uses.items():
        print(f"{key}: {use}", file=sys.stderr)
    print(f"Others may need this. Remove it from {store.url}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError(f"{options.key}: not confirmed, so nothing was removed")


def remove_live_record(store: Store, options: StoreJob) -> None:
    """Removes the record of the live release, so that the release and its artifacts can be removed."""
    if options.with_dependents:
        raise InputError(
            f"remove {SERVING} {Parameter('with_dependents')}: it is one file; remove the artifacts after it"
        )
    files = list(store.storage.list(SERVING))
    if not files:
        raise InputError(f"{store.url}: no release is live")
    confirm_removal(store, {CURRENT: "the record of the live release, which servers read"}, options)
    delete_files(store, files, options)
    print_removal(CURRENT, files, options)


def delete_files(store: Store, files: list[tuple[str, int]], options: StoreJob) -> None:
    """Deletes files in the given order, unless --plan is set."""
    for file, _ in files:
        if not options.plan:
            store.storage.delete(file)


def removal_verb(options: StoreJob) -> str:
    """Returns "removed", or "would remove" with --plan."""
    return "would remove" if options.plan else "removed"


def count_and_bytes(files: list[tuple[str, int]]) -> str:
    """Returns the number and the total size of files: `3 files, 1.2 MB`."""
    return f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {format_bytes(sum(size for _, size in files))}"


def collect_garbage(store: Store, options: StoreJob) -> None:
    """Removes files, checkpoints and releases that nothing refers to, and the uploaded prompts of these releases.

    Damaged documents are reported at the end, and nothing that they may name is removed.
    """
    freed = [*store.garbage_files(), *abandoned_checkpoints(store)][: options.limit]
    for file in freed:
        delete_files(store, [file], options)
        print_removal(file[0], [file], options)
    rest = None if options.limit is None else options.limit - len(freed)
    problems = store.describe_damaged()
    try:
        releases = expired_releases(store)[:rest]
        prompts = expired_prompts(store, releases)[: None if rest is None else rest - len(releases)]
        for key, take in [*((key, remove_release) for key in releases), *((key, remove_prompt) for key in prompts)]:
            files = store.files_in_removal_order(key) if options.plan else take(store, key)
            print_removal(key, files, options)
            freed += files
    except CorruptError as error:
        problems.append(f"{error}")
    if freed or not problems:
        say(f"{removal_verb(options)} {count_and_bytes(freed)} in total" if freed else "nothing to remove")
    raise_for_problems(store, problems, "nothing that these documents may name was removed")


def print_removal(key: str, files: list[tuple[str, int]], options: StoreJob) -> None:
    """Prints what is removed. Without files prints nothing: another process needs the artifact now."""
    if files:
        say(f"{removal_verb(options)} {key}, {format_bytes(sum(size for _, size in files))}")


def raise_for_problems(store: Store, problems: list[str], note: str) -> None:
    """Prints damaged documents, and raises InputError with their number if there are any."""
    for problem in problems:
        say(f"bad: {problem}")
    if problems:
        verify_command = f"{Command('verify', store=shlex.quote(store.url))}"
        raise InputError(f"{len(problems)} damaged documents; {note}; {verify_command} names every damaged file")


def list_artifacts(store: Store, limit: int | None) -> None:
    """Prints a line for each artifact (key, size, rows, time, inputs), then the totals."""
    problems: list[str] = []
    table: list[tuple[str, ...]] = [("artifact", "size", "rows", "made", "from")]
    keys, written, total = store.keys(), store.storage.write_times(""), 0
    unfinished = unfinished_artifacts(store, limit)
    for key in keys[:limit]:
        try:
            artifact = Artifact(store.storage, store.cache, key)
        except FileNotFoundError:  # removed after the keys were listed
            continue
        except CorruptError as error:
            problems.append(f"{error}")
            unfinished = {key: "damaged: its manifest cannot be read"} | unfinished
            continue
        size = sum(part.bytes for part in artifact.parts)
        total += size
        written_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(written.get(f"{key}/{MANIFEST}", 0)))
        parents = ", ".join(entry["artifact"] for entry in artifact.inputs.values()) or "-"
        table.append((key, format_bytes(size), f"{artifact.rows:,}", written_at, parents))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for key, size_text, rows, written_at, parents in table:
        say(f"{key:{widths[0]}}  {size_text:>{widths[1]}}  {rows:>{widths[2]}}  {written_at:{widths[3]}}  {parents}")
    for key, state in unfinished.items():
        say(f"{key:{widths[0]}}  {state}")
    shown = f"{len(table) - 1} of {len(keys)}" if len(table) - 1 < len(keys) else f"{len(keys)}"
    say(
        f"{shown} artifacts, {format_bytes(total)}; {describe_corpus(store)}"
        f"all files of the store: {count_and_bytes(list(store.storage.list('')))}"
    )
    raise_for_problems(store, problems, "restore them, or remove their artifacts and make them again")


def describe_corpus(store: Store) -> str:
    """Returns the size of the corpus without deleted rows, followed by `; `; "" if the corpus cannot be read."""
    with contextlib.suppress(InputError):
        return f"corpus: {Corpus.open(store).describe_size()}; "
    return ""


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


def export_artifact(store: Store, key: str, options: StoreJob) -> None:
    """Copies the files of a model or a prompt to a folder, for other libraries or another server."""
    artifact = store.open(*Key.parse(key))
    if options.to is None:
        raise InputError(f"export {key}: expected {Parameter('to')}, the folder for its files")
    if "://" in options.to:
        raise InputError(f"{Parameter('to', options.to)}: expected a folder that this machine sees")
    if not artifact.numbered_parts("file"):
        raise InputError(f"{key}: expected models/NAME or prompts/TASK, whose files have names")
    target, size = Path(options.to).expanduser(), format_bytes(sum(part.bytes for part in artifact.parts))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{Parameter('to', target)}: is there and is no empty folder")
    if options.plan:
        say(f"would copy {key}, {size}, to {target}")
        return
    folder = model_folder(artifact)
    try:
        copy_whole(folder, target.resolve())
    except OSError as error:  # includes shutil.Error, which has no `strerror`
        raise InputError(f"{Parameter('to', target)}: {error.strerror or error}") from error
    say(f"copied {key}, {size}, to {target}")


def copy_whole(folder: Path, target: Path) -> None:
    """Copies a folder so that `target` appears only when it is complete: some libraries open incomplete models."""
    if target.exists():
        target.rmdir()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    text, style = query.text or "", style_for(sys.stdout)
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
            say(*hit_table(hits, text, style, with_judgements=True))
    if query.num_missed_irrelevant:
        say(f"\n{query.num_missed_irrelevant:,} more judged passages are missing, with relevance 0 or less")


if __name__ == "__main__":
    run(main, StoreJob)
