"""Describes in one line why a name of the store is taken, and what the user can do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from retriever.errors import shorten

_HASH = re.compile(r"[0-9a-f]{32,}")
# Settings without an option.
_NO_OPTIONS = ("numerics", "lucene", "anserini", "tomotopy", "training_threads", "title", "copies", "pool_draws")
# Nested settings with an option.
_NESTED_OPTIONS = {
    "search_parameters.nprobe": "nprobe",
    "search_parameters.depth": "depth",
    "split.words": "split_words",
    "split.overlap": "overlap",
}
# Values of settings that the first artifacts do not store, because the settings are newer.
_UNSTORED = {"loop.optimizer": "adamw"}
_OTHER_NAMES = {  # what an error suggests in place of another --name; a store has one corpus
    "corpus": "another store",
    "scores": "",
    "candidates": "another name (parameter candidates)",
    "queries": "another name (parameter queries)",
    "prompts": "another name (parameter task)",
    "sweeps": "another name (parameter task)",
    "models": "another name",
}
_GROWING = ("corpus", "index", "bm25", "topics", "scores")  # kinds whose jobs make the generation after the last one
MAX_SHOWN = 6  # differences that a message names


class Conflict(NamedTuple):
    """The conflict of a command with the artifact that has its name.

    Attributes:
        differences: `parameter k 100, now 50`. Jobs turn `parameter NAME` into the option.
        remedies: What to give: `parameter k 100, or another name (parameter name)`.
        makes_next_generation: Whether the same command makes the next generation once this one is complete. Generations
            of a corpus may have different options, those of other kinds may not.
    """

    differences: str
    remedies: str
    makes_next_generation: bool


def find_conflict(pinned: Mapping[str, Any], requested: Mapping[str, Any]) -> Conflict:
    """Returns the differences between two documents of manifest.begun.json, and how to resolve them.

    Args:
        pinned: The document that is in the store.
        requested: The document of the command.
    """
    settings = list(changed_settings(pinned["config"], requested["config"]))
    differences = [_describe_change(*setting) for setting in settings]
    differences += changed_inputs(pinned["inputs"], requested["inputs"])
    if pinned.get("format") != requested.get("format"):
        differences.append(f"format {pinned.get('format')}, now {requested.get('format')}")
    more = f" and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
    known = [(name, old) for name, old, _ in settings if name.startswith("parameter ") and old is not None]
    options = [f"{name} {shown_value(old)}" for name, old in known if not isinstance(old, bool)]
    remedies = [_OTHER_NAMES.get(pinned["kind"], "another name (parameter name)")]
    if settings:
        remedies.insert(0, " ".join(options) if len(options) == len(differences) else "the same options")
    elif any(_is_renamed(pinned["inputs"], requested["inputs"], role) for role in pinned["inputs"]):
        remedies.insert(0, "the same inputs")
    return Conflict(
        differences=f"{', '.join(differences[:MAX_SHOWN])}{more}",
        remedies=", or ".join(each for each in remedies if each) or "the same inputs",
        makes_next_generation=pinned["kind"] == "corpus" or (pinned["kind"] in _GROWING and not settings),
    )


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the settings that differ, with both values: `parameter k 100, now 50`; empty if none differs."""
    return ", ".join(_describe_change(*setting) for setting in changed_settings(old, new))


def _describe_change(name: str, old: Any, new: Any) -> str:
    """Returns a difference in words; a hash means nothing to a reader."""
    if _has_hash(old, new) or shown_value(old) == shown_value(new):
        return f"another {name}"
    return f"{name} {shown_value(old)}, now {shown_value(new)}"


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, old value, new value) of each setting that differs; None for a missing one without a default."""
    old_leaves, new_leaves = dict(_leaf_values(old)), dict(_leaf_values(new))
    for path in {**old_leaves, **new_leaves}:
        if old_leaves.get(path) != new_leaves.get(path):
            option = _NESTED_OPTIONS.get(path) or (path if "." not in path and path not in _NO_OPTIONS else None)
            value = old_leaves.get(path, new_leaves.get(path))
            named = f"parameter {option}" if option and _is_plain(value) else path
            default = _UNSTORED.get(path)
            yield named, old_leaves.get(path, default), new_leaves.get(path, default)


def changed_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns a line for each input that differs between two documents; lines have no fingerprints."""
    differences = []
    for role in {**old, **new}:
        before, now = (inputs.get(role, {}).get("artifact") for inputs in (old, new))
        if _is_renamed(old, new, role):
            differences.append(f"its input {before} is now {now}, with the same content")
        elif before != now:
            differences.append(f"it was made from {before or f'no {role}'}, now {now or f'no {role}'}")
        elif old[role]["fingerprint"] != new[role]["fingerprint"]:
            differences.append(f"it was made from another {before} than the present one")
    return differences


def _is_renamed(old: Mapping[str, Any], new: Mapping[str, Any], role: str) -> bool:
    """Whether an input has the same content under another name, or in a store that is now in another place."""
    if role not in old or role not in new:
        return False
    before, now = old[role], new[role]
    return bool(before["artifact"] != now["artifact"] and before["fingerprint"] == now["fingerprint"])


def shown_value(value: Any) -> str:
    """Returns a value as messages show it."""
    if value is None:
        return "unset"
    if isinstance(value, list) and value and all(isinstance(each, dict) and "file" in each for each in value):
        value = [f"{each['file']} of {each['bytes']:,} bytes" for each in value]
    text = value if isinstance(value, str) and re.fullmatch(r"[\w.:/+*-]+", value) else json.dumps(value)
    return shorten(text, 60)


def _leaf_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaf_values(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _has_hash(*values: Any) -> bool:
    return any(isinstance(value, str) and _HASH.fullmatch(value) for value in values)
