"""Erases passages from every artifact of a store, for import-corpus with the option erase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from riptide.base.memory import format_bytes
from riptide.indexing.corpus.importing import read_ids
from riptide.indexing.erasure.erasing import erase, erased_before, interrupted_erasure, plan_erasure
from riptide.indexing.erasure.receipts import receipt_file
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import resumable
from riptide.jobs.common.printing import print_complete, say


def erase_passages(store: Store, file: str, *, plan_only: bool) -> None:
    """Erases the passages of the ids in a file, after an erasure that was interrupted; or prints what it would do.

    Args:
        store: The store.
        file: The file of ids, one per line.
        plan_only: Print the plan and change nothing.
    """
    interrupted = interrupted_erasure(store)
    if interrupted:
        say(f"resume   erasure {interrupted['erasure']}, which was interrupted")
        _carry_out(store, interrupted, plan_only=plan_only)
        ids = [id for lines in read_ids(file) for _, id in lines]
        if plan_only or erased_before(store, ids) == receipt_file(interrupted["erasure"]):
            return
    plan = plan_erasure(store, file)
    if plan:
        _carry_out(store, plan, plan_only=plan_only)
    else:
        ids = [id for lines in read_ids(file) for _, id in lines]
        print_complete(f"{store.url}/{erased_before(store, ids)}")


def _carry_out(store: Store, plan: Mapping[str, Any], *, plan_only: bool) -> None:
    """Prints a plan and, unless `plan_only`, carries it out."""
    say(f"erase    {len(plan['rows']):,} passages, with earlier versions of them")
    if not plan_only:
        with resumable():
            erase(store, dict(plan))
    verbs = {"rewritten": "rewrite", "removed": "remove"}
    for entry in plan["artifacts"]:
        line = (
            f"{verbs[entry['action']]:8} {entry['artifact']}: {entry['parts']:,} parts, {format_bytes(entry['bytes'])}"
        )
        say(line + (f"; make it again: {entry['command']}" if "command" in entry else ""))
    sizes = [
        format_bytes(sum(entry["bytes"] for entry in plan["artifacts"] if entry["action"] == action))
        for action in verbs
    ]
    say(f"total    {sizes[0]} written again, {sizes[1]} removed")
    for key, count in plan["judgements"].items():
        say(f"keep     {key}: {count:,} judgements name erased passages, which count as deleted ones")
    for line in plan["remains"]:
        say(f"remains  {line}")
    if not plan_only:
        say(f"erased   {store.url}/{receipt_file(plan['erasure'])} is the receipt; verify checks it")
