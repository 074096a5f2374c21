"""List, show, remove, export or copy artifacts; import models; remove unused files.

riptide store list --store data/squad
riptide store show index/minilm --store data/squad
riptide store show runs/minilm --query-id 56be4db0acb8001400a502ec --store data/squad
riptide store remove index/minilm --store data/squad
riptide store remove embeddings/minilm --with-dependents --plan --store data/squad
riptide store export prompts/legal --to legal --store data/squad
riptide store copy --store data/squad --to s3://bucket/squad
riptide store import-model --model intfloat/e5-large-v2 --name e5 --store data/squad
riptide store gc --store data/squad
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import shlex

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.store.store import Store
from riptide.jobs.store_actions.inspecting import (
    check_query_id_options,
    list_artifacts,
    newest_key,
    print_artifact,
    show_query,
)
from riptide.jobs.store_actions.removing import collect_garbage, remove_artifact, remove_live_record
from riptide.jobs.store_actions.store_options import SERVING, SHOWN_HITS, StoreJob
from riptide.jobs.store_actions.transfer import copy_store, export_artifact, import_model


def main(options: StoreJob) -> None:
    store = Store(options.store)
    if options.action != "import-model":
        store.require_not_empty()
    if options.action in ("show", "remove", "export") and options.key is None:
        listing = f"{Command('store', 'list', store=shlex.quote(options.store))}"
        raise InputError(f"{options.action}: expected an artifact; {listing} shows what there is")
    if options.key is not None and options.action in ("list", "import-model", "gc"):
        raise InputError(f"{options.action} {options.key}: takes no artifact, it is for the whole store")
    if options.limit is not None and options.action in ("remove", "export", "copy", "import-model"):
        raise InputError(f"{options.action} {Parameter('limit', options.limit)}: an artifact is taken whole")
    if options.to is not None and options.action not in ("export", "copy"):
        raise InputError(f"{options.action} {Parameter('to', options.to)}: only export and copy take it")
    for option in ("model", "name"):
        if (value := getattr(options, option)) is not None and options.action != "import-model":
            raise InputError(f"{options.action} {Parameter(option, value)}: only import-model takes it")
    if options.verify and options.action != "copy":
        raise InputError(f"{options.action} {Parameter('verify')}: only copy takes it; the job verify checks a store")
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
    elif options.action == "copy":
        copy_store(store, key, options)
    elif options.action == "import-model":
        import_model(store, options)
    else:
        collect_garbage(store, options)


if __name__ == "__main__":
    run(main, StoreJob)
