"""Erases passages from the artifacts of a store, for import-corpus with the option erase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from riptide.indexing.corpus.importing import read_ids
from riptide.indexing.erasure.erasing import erase, erased_before, interrupted_erasure, plan_erasure
from riptide.indexing.erasure.receipts import receipt_file
from riptide.indexing.store.live_release import read_live_record
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import resumable
from riptide.jobs.common.printing import print_complete, say
from riptide.jobs.common.stage_progress import StageProgress
from riptide.jobs.store_actions.removing import confirm_removal
from riptide.process.memory import format_bytes

_VERBS = {"rewritten": "rewrite", "removed": "remove"}


def erase_passages(store: Store, file: str, *, plan_only: bool, is_confirmed: bool) -> None:
    """Erases the passages of the ids in a file, after an erasure that was interrupted; or prints what it would do.

    Args:
        store: The store.
        file: The file of ids, one per line.
        plan_only: Print the plan and change nothing.
        is_confirmed: Remove artifacts of the live release without asking.
    """
    interrupted = interrupted_erasure(store)
    if interrupted:
        say(f"resume   erasure {interrupted['erasure']}, which is in progress or was interrupted")
        _carry_out(store, interrupted, plan_only=plan_only)
        if plan_only or erased_before(store, _ids(file)) == receipt_file(interrupted["erasure"]):
            return
    plan = plan_erasure(store, file)
    if plan is None:
        print_complete(f"{store.url}/{erased_before(store, _ids(file))}")
        return
    if not plan_only:
        removed = [entry["artifact"] for entry in plan["artifacts"] if entry["action"] == "removed"]
        live = _live_keys(store)
        uses = {key: "the live release needs it" for key in removed if key in live}
        confirm_removal(store, uses, is_confirmed=is_confirmed, subject=file)
    _carry_out(store, plan, plan_only=plan_only)


def _ids(file: str) -> list[str]:
    return [id for lines in read_ids(file) for _, id in lines]


def _live_keys(store: Store) -> set[str]:
    """Returns the keys of the artifacts that the live release needs. Raises CorruptError if CURRENT is damaged."""
    record = read_live_record(store.storage)
    inputs = store.inputs(f"releases/{record.release}") if record else {}
    return {entry["artifact"] for entry in inputs.values()}


def _carry_out(store: Store, plan: Mapping[str, Any], *, plan_only: bool) -> None:
    """Prints a plan and, unless `plan_only`, carries it out."""
    live = _live_keys(store)
    say(f"erase    {len(plan['rows']):,} passages, with earlier versions of them")
    for entry in plan["artifacts"]:
        key, notes = entry["artifact"], []
        if entry["action"] == "removed" and key in live:
            notes.append("the live release needs it")
        if "command" in entry:
            notes.append(f"make it again: {entry['command']}")
        size = f"{entry['parts']:,} parts, {format_bytes(entry['bytes'])}"
        say("; ".join([f"{_VERBS[entry['action']]:8} {key}: {size}", *notes]))
    sizes = [
        format_bytes(sum(entry["bytes"] for entry in plan["artifacts"] if entry["action"] == action))
        for action in _VERBS
    ]
    say(f"total    {sizes[0]} to write again, {sizes[1]} to remove")
    for key, count in plan["judgements"].items():
        say(f"keep     {key}: {count:,} judgements name erased passages, which count as deleted ones")
    if not plan_only:
        num_parts = sum(entry["parts"] for entry in plan["artifacts"])
        with resumable(), StageProgress("erase", num_parts, "parts") as progress:
            plan = erase(store, dict(plan), progress.count)
    for line in plan["remains"]:
        say(f"remains  {line}")
    if not plan_only:
        say(f"erased   {store.url}/{receipt_file(plan['erasure'])} is the receipt; verify checks it")
