"""Options of `store`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import option
from riptide.jobs.common.job_options import Common

SERVING = "serving"  # key that stands for the record of the live release
SHOWN_HITS = 10  # default of --k: hits of a query that are shown


@dataclass(frozen=True, kw_only=True)
class StoreJob(Common):
    GROUP: ClassVar = "artifact"

    action: Literal["list", "show", "remove", "export", "copy", "import-model", "gc"] = option(positional=True)
    """What to do. copy copies complete artifacts to another store and checks every byte; the same command continues
    after an interruption. import-model stores a model as models/NAME, so that nodes need no hub. gc removes files,
    checkpoints, old releases and their prompts over HTTP that nothing names."""
    key: str | None = option(None, positional=True, metavar="KEY")
    """The artifact, as list prints it (show, remove, export, copy). Without a generation, index/minilm for example, it
    is the newest complete one, or for remove and copy all of them. copy takes what it was made from too; without a key
    it copies the whole store and, unless the other store has one, the record of the live release. "serving" is this
    record, without which the release and its artifacts can be removed; end the servers first; tasks over HTTP are
    forgotten (remove)."""
    to: str | None = option(None, metavar="FOLDER")
    """Folder for the files of a model or a prompt, which keep their names (export); the other store (copy)."""
    verify: bool = False
    """Also hash the artifacts that the other store has already; without it, only their manifests are read (copy)."""
    model: str | None = None
    """A Hugging Face name, or a folder that save_pretrained wrote (import-model)."""
    name: str | None = None
    """Name of the stored model: jobs and servers take it as models/NAME, or from another store as STORE/models/NAME
    (import-model)."""
    query_id: str | None = None
    """A query of runs/NAME: print its text, hits and judgements, and the relevant passages that the run misses
    (show)."""
    with_dependents: bool = False
    """Also remove everything that was made from the artifact; --plan lists it (remove)."""
    yes: bool = False
    """Remove complete artifacts, and those that a command is making, without asking; required without a
    terminal (remove)."""
    k: int | None = option(None, minimum=1)
    """Hits that --query-id prints; default: 10."""
    limit: int | None = None
    """List at most N artifacts, show N parts, or remove N items (gc)."""
