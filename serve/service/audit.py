"""The audit log: one line per administrative change of a server, with who made it, and the state before and after.

Lines contain names of releases, tasks and artifacts, and never tokens or texts of requests.
"""

from __future__ import annotations

import logging

from riptide.base.wording import list_first
from riptide.serve.callers import Caller
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask

log = logging.getLogger("riptide.audit")


def show_audit_lines() -> None:
    """Enables the audit lines, which go to stderr if the program has not configured logging."""
    log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        log.addHandler(handler)


def log_change(caller: Caller, action: str, before: Release, after: Release, *, is_confirmed: bool = True) -> None:
    """Logs that a caller made another release live.

    Args:
        caller: Who made the change.
        action: The requested change, for example "put task legal".
        before: The release that was live.
        after: The release that is live now.
        is_confirmed: Whether the store has confirmed that it is live.
    """
    names = sorted({task.name for release in (before, after) for task in release.tasks})
    changes = [
        f"task {name}: {_describe(before.task(name))} -> {_describe(after.task(name))}"
        for name in names
        if before.task(name) != after.task(name)
    ]
    if before.reranker != after.reranker:
        changes.append(f"re-ranker: {before.reranker} -> {after.reranker}")
    if changed := sorted(key for key, _ in before.fingerprints.items() ^ after.fingerprints.items()):
        changes.append(f"artifacts: {list_first(list(dict.fromkeys(changed)))}")
    details = "; ".join(changes) or "the same artifacts"
    action += "" if is_confirmed else " (not confirmed by the store)"
    log.info("%s: %s: release %s -> %s: %s", caller.name, action, before.id, after.id, details)


def _describe(task: ServedTask | None) -> str:
    """Returns the artifacts of a task: `prompt legal.3f2a, index idx`; "none" without a task."""
    if task is None:
        return "none"
    parts = {"prompt": task.prompt, "embeddings": task.embeddings, "index": task.index, "bm25": task.bm25}
    return ", ".join(f"{kind} {name}" for kind, name in parts.items() if name) or "no artifacts"
