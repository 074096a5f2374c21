"""Describes in one line how an existing artifact differs from the requested one, and what the user can do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from riptide.base.errors import InputError
from riptide.base.wording import Parameter, shorten

_HASH = re.compile(r"[0-9a-f]{32,}")
# Settings that no option sets.
_NO_OPTIONS = ("numerics", "lucene", "anserini", "tomotopy", "training_threads", "title", "copies", "pool_draws")
# Nested settings that an option sets -> the option.
_NESTED_OPTIONS = {
    "search_parameters.nprobe": "nprobe",
    "search_parameters.ef_search": "ef_search",
    "search_parameters.depth": "depth",
    "reranker.dtype": "rerank_dtype",
    "split.words": "split_words",
    "split.overlap": "overlap",
}
# Values that settings have in early artifacts, which do not store them.
_UNSTORED = {"loop.optimizer": "adamw"}
_OTHER_NAMES = {  # kind -> what an error suggests in place of another --name; a store has one corpus
    "corpus": "another store",
    "scores": "",
    "candidates": f"another name ({Parameter('candidates')})",
    "queries": f"another name ({Parameter('queries')})",
    "prompts": f"another name ({Parameter('task')})",
    "sweeps": f"another name ({Parameter('task')})",
    "models": "another name",
}
# Setting with a hash -> name of the hashed file, if it is not the name of the setting.
_HASHED_FILES = {"backbone": "config.json", "model": "config.json"}
_DERIVED_HASHES = ("prompt", "query_encoder")  # hashes that also change with other settings
_GROWING = ("corpus", "index", "bm25", "topics", "scores")  # kinds for which a job can add a generation
MAX_SHOWN = 6  # maximum number of differences that a message names


class TakenNameError(InputError):
    """Raised if an artifact with other settings has the name, so that waiting for other inputs cannot help."""


class Conflict(NamedTuple):
    """The differences between an existing artifact and the one that a command requests under the same name.

    Attributes:
        differences: `parameter k 100, now 50`.
        remedies: What to give: `parameter k 100, or another name (parameter name)`.
        makes_next_generation: Whether the same command makes the next generation once this one is complete. Generations
            of a corpus may have different options, those of other kinds may not.
    """

    differences: str
    remedies: str
    makes_next_generation: bool


def find_conflict(pinned: Mapping[str, Any], requested: Mapping[str, Any]) -> Conflict:
    """Compares two documents of manifest.begun.json; returns the differences and the remedies.

    Args:
        pinned: The document that is in the store.
        requested: The document of the command.
    """
    changed = list(_changed_settings(_first_config(pinned), _first_config(requested)))
    models = list(_changed_models(pinned, requested, changed))
    explained = {name for model in models for name in (*model.settings, *model.inputs)}
    settings = [setting for setting in changed if setting.path not in explained]
    differences = list(dict.fromkeys(model.description for model in models if model.description))
    differences += [_describe_change(setting) for setting in settings]
    differences += changed_inputs(pinned["inputs"], requested["inputs"], explained)
    if pinned.get("format") != requested.get("format"):
        differences.append(f"format {pinned.get('format')}, now {requested.get('format')}")
    more = f" and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
    options = list(dict.fromkeys(model.remedy for model in models if model.remedy))
    options += [
        f"{Parameter(each.option, format_value(each.old))}"
        for each in settings
        if each.option and each.old is not None and not isinstance(each.old, bool)
    ]
    remedies = [_OTHER_NAMES.get(pinned["kind"], f"another name ({Parameter('name')})")]
    if changed:
        remedies.insert(0, " ".join(options) if len(options) == len(differences) else "the same options")
    elif any(_is_renamed(pinned["inputs"], requested["inputs"], role) for role in pinned["inputs"]):
        remedies.insert(0, "the same inputs")
    return Conflict(
        differences=f"{', '.join(differences[:MAX_SHOWN])}{more}",
        remedies=", or ".join(each for each in remedies if each) or "the same inputs",
        makes_next_generation=pinned["kind"] == "corpus" or (pinned["kind"] in _GROWING and not changed),
    )


class _ModelChange(NamedTuple):
    """A change of a model, reported in place of the changes of the settings that describe the model.

    Attributes:
        description: The change in words; empty if the change of an input or of another setting says it.
        remedy: What to give; empty if it is unknown.
        settings: Names of the settings that it stands for.
        inputs: Keys of the artifacts whose change it stands for.
    """

    description: str
    remedy: str
    settings: Sequence[str]
    inputs: Sequence[str] = ()


def _changed_models(
    pinned: Mapping[str, Any], requested: Mapping[str, Any], changed: Sequence[_Setting]
) -> Iterator[_ModelChange]:
    """Yields the changes of models (`ArtifactTarget.models`) between two documents. changed: the changed settings."""
    old_models, new_models = (document.get("models", {}) for document in (pinned, requested))
    for path in {**old_models, **new_models}:
        settings = [each for each in changed if each.path.startswith(f"{path}.")]
        hashed = [each.path for each in settings if _has_hash(each.old, each.new)]
        old, new = old_models.get(path), new_models.get(path)
        if hashed and old == new:
            files = [name.removeprefix(f"{path}.") for name in hashed]
            is_said = _is_changed_input(pinned["inputs"], requested["inputs"], _keys_of(old))
            if is_said or (len(changed) > len(hashed) and set(files) <= set(_DERIVED_HASHES)):
                yield _ModelChange("", "", hashed)
                continue
            others = ", ".join(f"other {_HASHED_FILES.get(file, file)}" for file in files)
            remedy = f"the former files of {old[1]}" if len(changed) == len(hashed) else ""
            yield _ModelChange(f"{_shown_model(old)} has changed since ({others})", remedy, hashed)
        elif hashed:
            names = [each.path for each in settings]
            if old is None and path in _first_config(pinned):  # an earlier release of riptide did not store the name
                yield _ModelChange(f"another model than {_shown_model(new)}", "", names)
                continue
            before = f"{Parameter(new[0], 'unset')}" if old is None else _shown_model(old)
            is_same_option = old is not None and new is not None and old[0] == new[0]
            now = "unset" if new is None else shlex.quote(new[1]) if is_same_option else _shown_model(new)
            keys = [key for model in (old, new) if model for key in _keys_of(model)]
            yield _ModelChange(f"{before}, now {now}", "" if old is None else before, names, keys)


def _shown_model(model: Sequence[str]) -> str:
    """Returns the parameter that names a model with its value, not shortened, as users copy it from the remedy."""
    return f"{Parameter(model[0], shlex.quote(model[1]))}"


def _keys_of(model: Sequence[str]) -> list[str]:
    """Returns the keys of the artifacts that a model's name may refer to."""
    return [model[1], f"prompts/{model[1]}", f"models/{model[1]}"]


def _is_changed_input(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Returns whether one of the keys is a new or changed input."""
    return any(entry["artifact"] in keys and old.get(role) != entry for role, entry in new.items())


def _first_config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the configuration of a document; for a sweep, that of its first run plus `runs`, those of all runs."""
    config: Mapping[str, Any] = document["config"]
    return {**config["configs"][0], "runs": config["runs"]} if "configs" in config else config


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the changed settings with both values as text: `parameter k 100, now 50`; empty if none changed."""
    return ", ".join(_describe_change(setting) for setting in _changed_settings(old, new))


class _Setting(NamedTuple):
    """A setting that differs between two configurations.

    Attributes:
        path: Where it is in the configurations.
        option: The option that sets it; empty: none does.
        old: The former value; None for a missing one without a default.
        new: The present value, likewise.
    """

    path: str
    option: str
    old: Any
    new: Any


def _describe_change(setting: _Setting) -> str:
    """Describes a changed setting in words; a changed hash is described without its values."""
    old, new = format_value(setting.old), format_value(setting.new)
    if _has_hash(_named_files(setting.old), _named_files(setting.new)) or old == new:
        return f"another {Parameter(setting.option) if setting.option else setting.path}"
    return f"{Parameter(setting.option, old)}, now {new}" if setting.option else f"{setting.path} {old}, now {new}"


def _changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[_Setting]:
    """Yields the settings that differ between two configurations."""
    old_leaves, new_leaves = dict(_leaf_values(old)), dict(_leaf_values(new))
    for path in {**old_leaves, **new_leaves}:
        if old_leaves.get(path) != new_leaves.get(path):
            option = _NESTED_OPTIONS.get(path) or (path if "." not in path and path not in _NO_OPTIONS else None)
            value = old_leaves.get(path, new_leaves.get(path))
            default = _UNSTORED.get(path)
            named = option if option and _is_plain(value) else ""
            yield _Setting(path, named, old_leaves.get(path, default), new_leaves.get(path, default))


def changed_inputs(old: Mapping[str, Any], new: Mapping[str, Any], explained: Set[str] = frozenset()) -> list[str]:
    """Returns a phrase for each input that differs between two documents, without fingerprints.

    explained: keys of artifacts that the message names already.
    """
    differences = []
    for role in {**old, **new}:
        before, now = (inputs.get(role, {}).get("artifact") for inputs in (old, new))
        if before in explained or now in explained:
            continue
        if _is_renamed(old, new, role):
            differences.append(f"its input {before} is now {now}, with the same content")
        elif before != now:
            differences.append(f"it was made from {before or f'no {role}'}, now {now or f'no {role}'}")
        elif old[role]["fingerprint"] != new[role]["fingerprint"]:
            differences.append(f"it was made from another {before} than the present one")
    return differences


def _is_renamed(old: Mapping[str, Any], new: Mapping[str, Any], role: str) -> bool:
    """Returns whether an input has the same content under another name, or in a store that was moved."""
    if role not in old or role not in new:
        return False
    before, now = old[role], new[role]
    return bool(before["artifact"] != now["artifact"] and before["fingerprint"] == now["fingerprint"])


def format_value(value: Any) -> str:
    """Formats a value for a message: "unset" for None, JSON if it is not plain text, at most 60 characters."""
    if value is None:
        return "unset"
    value = _named_files(value)
    text = value if isinstance(value, str) and re.fullmatch(r"[\w.:/+*-]+", value) else json.dumps(value)
    return shorten(text, 60)


def _named_files(value: Any) -> Any:
    """Replaces a list of imported files by their names and sizes; returns any other value unchanged."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "file" in each for each in value):
        return [f"{each['file']} of {each['bytes']:,} bytes" for each in value]
    return value


def _leaf_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaf_values(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _has_hash(*values: Any) -> bool:
    """Returns whether any value is a hash, or a list or dictionary that contains one."""
    return any(
        _has_hash(*value)
        if isinstance(value, list)
        else _has_hash(*value.values())
        if isinstance(value, dict)
        else isinstance(value, str) and _HASH.fullmatch(value) is not None
        for value in values
    )
