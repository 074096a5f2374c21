"""Warns of artifacts that one server cannot serve together with a new prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.named_encoders import describe_differences, differing_settings, find_closest
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.training.opening import RetrieverSetup
from riptide.jobs.training.training_options import TrainRetriever


def serving_warnings(store: Store, options: TrainRetriever, setup: RetrieverSetup) -> list[str]:
    """Returns warnings about artifacts of the same backbone that one server cannot serve together with the prompt.

    A server has one encoder with one set of settings, so embeddings and prompts that were made with other settings need
    a separate server. Embeddings come first; prompts count where embeddings with the same settings exist.
    """
    if options.train != "prompts":
        return []
    backbone_settings = setup.spec.settings("passage")
    shared = {name: backbone_settings[name] for name in ("model_type", "backbone", "weights", "tokenizer")}

    def others(kind: str, key: str) -> dict[str, dict[str, Any]]:
        """Returns the settings of each artifact of a kind with the same backbone; damaged artifacts are skipped."""
        known = {}
        for name in store.names(kind):
            with contextlib.suppress(InputError):
                artifact = store.generations(kind, name)[-1] if kind == "embeddings" else store.open(kind, name)
                settings = artifact.config.get(key)
                if isinstance(settings, dict) and settings.items() >= shared.items():
                    # A server chooses its own dtype, so dtypes are not compared.
                    known[name] = {**settings, "dtype": backbone_settings["dtype"]}
        return known

    encoders = others("embeddings", "encoder")
    embeddings = {name: settings for name, settings in encoders.items() if "prompt" not in settings}
    same = [name for name, settings in embeddings.items() if not differing_settings(settings, backbone_settings)]
    if embeddings and not same:
        name = find_closest(embeddings, backbone_settings)
        settings = embeddings[name]
        changes = describe_differences(settings, backbone_settings)
        return [
            f"the prompt cannot be served with embeddings/{name}: it would have {changes}; "
            f"{_suggest_options(settings, backbone_settings)}, or encode the corpus with the prompt's settings under "
            "another name"
        ]
    return [
        f"one server cannot serve the prompt and prompts/{name}: "
        f"it would have {describe_differences(settings, backbone_settings)}; "
        f"{_suggest_options(settings, backbone_settings)} to serve both"
        for name, settings in others("prompts", "backbone").items()
        if name != options.task and differing_settings(settings, backbone_settings)
    ]


def _suggest_options(settings: Mapping[str, Any], backbone_settings: Mapping[str, Any]) -> str:
    """Returns advice: the options with which a prompt would have the settings of an artifact."""
    flags = []
    for name in differing_settings(settings, backbone_settings):
        if name == "head":
            flags.append(f"{Parameter('normalize', 'normalize' in settings[name])}")
        elif name == "append_eos":
            flags.append(f"{Parameter('append_eos', bool(settings[name]))}")
        elif name in options_by_name(TrainRetriever):
            flags.append(f"{Parameter(name, repr(settings[name]))}")
    return f"give {' '.join(flags)}" if flags else "choose another backbone"
