r"""Forecast what another encoder gains; switch to it only if it is good enough.

    riptide migrate --store data/squad --to models/better --split dev

encodes a sample of the passages with the new encoder, and prints the quality, the bytes and the time of three choices:
keep the old encoder; encode only queries with the new one, and map their vectors to the old space; encode all. With
`--save-map mapped`, the new encoder with its map becomes `models/mapped`, and

    riptide migrate --store data/squad --task mapped --split dev \
        --require 'nDCG@10 >= -0.005' --switch

serves its queries over the existing embeddings, if they are good enough. After `riptide encode-corpus --encoder
models/better`,

    riptide migrate --store data/squad --to models/better --split dev \
        --require 'nDCG@10 >= -0.005' --switch

compares both on the whole corpus, and makes a release with the new embeddings live if the lower end of the interval of
the difference is at least -0.005. Otherwise it ends with status 1, as for bad input, and switches nothing. The runs of
both embeddings stay in the store.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import json
import re
from functools import partial

from riptide.base.errors import InputError
from riptide.base.wording import Command
from riptide.indexing.embeddings.drift import CANARY_QUERIES
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.result_files import check_result_file, write_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.migration.both_encoders import BothEncoders, open_both
from riptide.jobs.migration.cluster_cost import estimate_encoding_cost
from riptide.jobs.migration.forecast_report import forecast_document, forecast_lines, forecast_page
from riptide.jobs.migration.forecasting import VECTOR_BYTES, make_forecast, open_encoder, read_judged
from riptide.jobs.migration.gating import decide_all, find_new_embeddings, open_comparison, plan_switch
from riptide.jobs.migration.migrate_options import Migrate
from riptide.jobs.migration.saved_map import map_memory, plan_map, save_map
from riptide.process.memory import format_bytes


def main(options: Migrate) -> None:
    run_job(Store(options.store).require_not_empty(), options, has_default_file=True)


def run_job(store: Store, options: Migrate, *, has_default_file: bool = False) -> dict[str, object] | None:
    """Makes the forecast, or passes the gate.

    Args:
        store: The store.
        options: The options of the job.
        has_default_file: Whether the values of a forecast are also written to a file if `json` names none.

    Returns:
        The forecast as JSON values, or of the gate the means and intervals by requirement, {} if the new encoder is
        live already; None with --plan.

    Raises:
        InputError: If an artifact is missing, or if a requirement is not met: then nothing is switched.
    """
    both = open_both(store, options)
    if both.is_switched and both.live is not None:
        say(f"live     release {both.live.id}, embeddings/{both.old.name}: is live already")
        return None if options.plan else {}
    say(both.describe())
    return pass_gate(both, options) if options.require else forecast(both, options, has_default_file)


def forecast(both: BothEncoders, options: Migrate, has_default_file: bool) -> dict[str, object] | None:
    """Makes, prints and writes the forecast."""
    path = options.json or (default_results_path(both, options) if has_default_file else None)
    files = [file for file in (path, options.html) if file]
    for file in files:
        check_result_file(file, overwrite=options.overwrite)
    saved = plan_map(both, options) if options.save_map else None
    if options.plan:
        _, ids, _, judged = read_judged(both, options)
        num_judged = len({row for query in judged for row in query.rows.tolist() if row >= 0})
        most = min(len(both.corpus), options.sample + num_judged + 2 * options.hard * len(ids))
        size = format_bytes(len(both.corpus) * both.settings["dim"] * VECTOR_BYTES)
        memory = format_bytes(most * (both.settings["dim"] + both.old.dim) * 4)
        say(f"encodes  up to {most:,} of {len(both.corpus):,} passages and {len(ids):,} judged queries")
        say(f"holds    {memory} of their vectors in memory")
        say(f"forecast of {options.metric} and of {size} of vectors", *(f"writes   {file}" for file in files))
        if cost := estimate_encoding_cost(both, options):
            say(f"cluster  a whole encoding takes {cost.text} on {cost.machine}")
        if saved:
            size = format_bytes(map_memory(both))
            say(f"writes   models/{saved.name}, with {size} in memory, after the encoders of the forecast are closed")
        return None
    encoder = open_encoder(both)
    result = make_forecast(both, options, both.old.encoder(), encoder)
    canaries = result.best_map.apply(encoder.encode(CANARY_QUERIES)) if saved else None
    del encoder  # save_map loads its model again
    document = forecast_document(result)
    contents = [(path, json.dumps(document, indent=1) + "\n")] if path else []
    if options.html:
        contents.append((options.html, forecast_page(result)))
    # A repeat finds the map complete; it would be refused if the files were written before a failed save.
    artifact = save_map(both, saved, result, canaries) if saved and canaries is not None else None
    write_files(contents, overwrite=options.overwrite)
    say(*forecast_lines(result), *(f"written  {file}" for file in files))
    if artifact:
        source = f"exact:{both.old.name}"
        command = Command("evaluate", store=both.store.url, source=source, task=artifact.name, split=options.split)
        say(f"map      {artifact.key} ({artifact.notes['map']['kind']}); measure it with {command}")
    return document


def pass_gate(both: BothEncoders, options: Migrate) -> dict[str, object] | None:
    """Decides on the requirements, and switches if that is requested and all are met."""
    new = None if both.spec.query_model else find_new_embeddings(both, options)
    release = plan_switch(both, new) if options.switch else None
    comparison = open_comparison(both, options, new)
    compared = [f"{each}" for each in comparison.compared]
    if options.plan:
        say(f"compares {' and '.join(compared)}", *(f"requires {each}" for each in options.require))
        say(f"release  {release.id}" if release else "switches nothing")
        return None
    decisions = decide_all(both.store, comparison)
    served = f"embeddings/{new.name}" if new else compared[-1]
    say(*(each.describe() for each in decisions if each.is_met))
    if refused := [each for each in decisions if not each.is_met]:
        raise InputError(f"{'; '.join(each.describe() for each in refused)}: nothing was switched")
    if release is not None and both.live is not None and both.live.id == release.id:
        say(f"live     release {release.id}, {served}: is live already")
    elif release is not None:
        from riptide.jobs.serve_search import ChosenRelease, make_live
        from riptide.serve.release.artifacts import ReleaseArtifacts

        make_live(
            both.store, ChosenRelease(release, True, both.tag, None), partial(ReleaseArtifacts, both.store, release)
        )
        say(f"live     release {release.id}, {served}")
        if both.live is not None:
            say(f'back     PUT /v1/release with {{"release": "{both.live.id}"}} to a server of the store')
        else:
            say(f"serve it with {Command('serve-search')}")
    return {str(each.requirement): {"mean": each.mean, "low": each.low, "high": each.high} for each in decisions}


def default_results_path(both: BothEncoders, options: Migrate) -> str:
    """Returns a results path that is unique to the forecast: its digits depend on both encoders and all settings."""
    names = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{both.old.name}-{both.new_name}-{options.split}")
    queries = Queries.open(both.store, options.queries).artifact.fingerprint
    old = [generation.fingerprint for generation in both.old.generations]
    numbers = [options.metric, options.sample, options.hard, options.seed, options.limit]
    others = [options.cluster, options.save_map]
    digits = fingerprint_of([old, both.settings, both.spec.task, queries, options.split, numbers, others])[:8]
    return f"results/migration-{names}-{digits}.json"


if __name__ == "__main__":
    run(main, Migrate)
