"""The result of a training job."""

from __future__ import annotations

from dataclasses import dataclass

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store


@dataclass(frozen=True)
class Trained:
    """The artifact that a training job made, with its quality on the dev split (MRR@10).

    Attributes:
        key: Key of the artifact: prompts/NAME, models/NAME, or sweeps/NAME.
        before: The quality before the first step; None without a dev split, or if an earlier release trained it.
        after: The best quality, which is that of the artifact; None without a dev split.
        steps: The number of steps.
        chosen: Key of what a sweep chose, whose figures these are; otherwise `key`.
    """

    key: str
    before: float | None
    after: float | None
    steps: int
    chosen: str

    @property
    def name(self) -> str:
        """The name of the artifact, which other methods take as an argument."""
        return self.key.partition("/")[2]


def read_trained(store: Store, artifact: Artifact) -> Trained:
    """Returns the result of a training job from the artifact that it made."""
    chosen = artifact
    if artifact.key.startswith("sweeps/"):
        chosen = store.open(*artifact.notes["chosen"].split("/", 1))
    notes = chosen.notes
    return Trained(str(artifact.key), notes.get("start"), notes["best"], notes["steps"], str(chosen.key))
