"""Removes artifacts, the record of the live release, and what nothing refers to."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter, shorten
from riptide.indexing.maintenance.retention import expired_prompts, expired_releases, remove_prompt, remove_release
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.draft import ABANDONED_S
from riptide.indexing.store.live_release import CURRENT
from riptide.indexing.store.model_artifacts import abandoned_checkpoints
from riptide.indexing.store.sealed_json import PROVENANCE, check_own_hash, seconds_since_work
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.store_actions.store_options import SERVING, StoreJob
from riptide.process.memory import format_bytes


def remove_artifact(store: Store, key: str, options: StoreJob) -> None:
    """Removes an artifact and the checkpoints of its training; with --plan, prints what would be removed."""
    freed: list[tuple[str, int]] = []
    artifacts = store.files_to_remove(key, with_dependents=options.with_dependents)
    uses = {removed: use for removed in artifacts if (use := describe_use(store, removed))}
    if not options.plan:
        confirm_removal(store, uses, is_confirmed=options.yes, subject=key)
    for removed, files in artifacts.items():
        if not options.plan:
            store.delete_files(files)
        print_removal(removed, files, options)
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


def confirm_removal(store: Store, uses: Mapping[str, str], *, is_confirmed: bool, subject: str) -> None:
    """Asks for confirmation before artifacts that others may need are removed.

    Args:
        store: The store.
        uses: Why others may need each of these keys.
        is_confirmed: Whether an option has confirmed it already.
        subject: What the user named, for the error.

    Raises:
        InputError: If the answer is not yes, or without a terminal.
    """
    if is_confirmed or not uses:
        return
    if not sys.stdin.isatty():
        key, use = next(iter(uses.items()))
        more = f", and {len(uses) - 1} more like it" if len(uses) > 1 else ""
        raise InputError(f"{store.url}/{key}: {use}{more}; others may need it: add {Parameter('yes')} if nobody does")
    for key, use in uses.items():
        print(f"{key}: {use}", file=sys.stderr)
    print(f"Others may need this. Remove it from {store.url}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError(f"{subject}: not confirmed, so nothing was removed")


def remove_live_record(store: Store, options: StoreJob) -> None:
    """Removes the record of the live release, so that the release and its artifacts can be removed."""
    if options.with_dependents:
        raise InputError(
            f"remove {SERVING} {Parameter('with_dependents')}: it is one file; remove the artifacts after it"
        )
    files = list(store.storage.list(SERVING))
    if not files:
        raise InputError(f"{store.url}: no release is live")
    if not options.plan:
        uses = {CURRENT: "the record of the live release, which servers read"}
        confirm_removal(store, uses, is_confirmed=options.yes, subject=SERVING)
        store.delete_files(files)
    print_removal(CURRENT, files, options)


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
        if not options.plan:
            store.storage.delete(file[0])
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
