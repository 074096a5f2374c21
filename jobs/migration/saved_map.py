"""Saves the map of queries to the old space, together with the new encoder, as a model of queries only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.drift import write_query_canaries
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import ABANDONED_S
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.work.work import ArtifactTarget, target_draft
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.forecasting import Forecast
from riptide.jobs.migration.migrate_options import Migrate
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.model.model_folder import find_model_folder


def plan_map(both: BothEncoders, options: Migrate) -> ArtifactTarget:
    """Returns the specification of the model that a forecast saves with `save_map`; writes nothing.

    Raises:
        InputError: If another model has the name, or if one of the encoders has a prompt, or the old one a separate
            encoder of each side.
    """
    assert options.save_map is not None
    if both.spec.task is not None:
        raise InputError(
            f"{Parameter('task', both.spec.task)}: is a prompt; expected an encoder, to save a map with it"
        )
    spec = both.old.encoder_spec(both.store)
    if spec.task is not None or spec.is_untied:
        what = f"with the prompt of {spec.task}" if spec.task else "by an encoder for each side"
        raise InputError(
            f"{Parameter('save_map', options.save_map)}: embeddings/{both.old.name} were made {what}; expected "
            "embeddings of one encoder without a prompt"
        )
    config = {
        "backbone": both.old.config["encoder"],
        "map": {
            "encoder": both.spec.settings("query"),
            "embeddings": [each.fingerprint for each in both.old.generations],
            "queries": Queries.open(both.store, options.queries).artifact.fingerprint,
            "split": options.split,
            "limit": options.limit,
            "sample": options.sample,
            "seed": options.seed,
        },
    }
    models = {"backbone": ("embeddings", both.old.name), "map": ("to", both.spec.named_by[1])}
    target = ArtifactTarget("models", options.save_map, both.spec.inputs(), config, models=models)
    target_draft(both.store, target).check(abandoned_s=ABANDONED_S)
    return target


def map_memory(both: BothEncoders) -> int:
    """Returns the size in bytes of the float32 encoder that `save_map` holds in memory; loads no weights."""
    from riptide.retriever.encoding.backbones import encoder_bytes
    from riptide.retriever.model.recipe import read_recipe

    return encoder_bytes(read_recipe(find_model_folder(both.spec.folder_of("query")), both.spec.options_of("query")))


def save_map(both: BothEncoders, target: ArtifactTarget, forecast: Forecast, canaries: np.ndarray) -> Artifact:
    """Saves the best map of a forecast with the new encoder, unless the model exists; returns its artifact.

    It loads the model of the encoder in float32.

    Args:
        both: The encoders.
        target: The model, as `plan_map` returns it.
        forecast: The forecast.
        canaries: Mapped vectors of CANARY_QUERIES, float32 [n, dimensions of the old encoder].
    """
    from riptide.retriever.encoding.saving import save_mapped_encoder

    options, best = both.spec.options_of("query"), forecast.best_map
    with target_draft(both.store, target).begin(abandoned_s=ABANDONED_S) as draft:
        if not draft.is_complete:
            [choice] = [each for each in forecast.choices if each.name == f"map ({best.name})"]
            draft.add_notes(
                backbone=both.old.encoder_name,
                options=both.old.encoder_options,
                query_options=replace(options, normalize=None, dimension=None).to_dict(),
                map={
                    "encoder": both.spec.named_by[1],
                    "embeddings": both.old.name,
                    "kind": best.name,
                    "cosine": best.cosine,
                    "neighbours": best.neighbours,
                    "texts": forecast.num_fitted,
                    "metric": forecast.metric,
                    "value": choice.value,
                    "difference": list(choice.difference or ()),
                },
            )
            with TemporaryFolder("map") as folder:
                name = both.spec.folder_of("query")
                save_mapped_encoder(Path(folder) / "query", name, options, best.weights, best.offset)
                write_query_canaries(Path(folder), canaries)
                commit_files(draft, Path(folder))
    return both.store.open(target.kind, target.name)
