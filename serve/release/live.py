"""A release while it is being served."""

from __future__ import annotations

import json

from indexing.corpus.filters import filter_columns
from indexing.store.models import model_folder
from indexing.store.store import Store
from retriever.model.files import PROMPT_SETTINGS
from serve.release.release import Opened, Release, Task


class Live:
    """A release that is being served, and what requests are checked against."""

    def __init__(self, store: Store, release: Release):
        self.release = release
        self.tasks = {task.name: task for task in release.tasks}
        self.opened = Opened(store, release)
        self.columns = filter_columns(self.opened.corpus)
        self.lengths = {task.name: _lengths(store, task) for task in release.tasks if task.prompt}


def _lengths(store: Store, task: Task) -> dict[str, int]:
    """Tokens of a task's prompt, by side; of each query's own prompt where it is computed, and of those of topics."""
    file = model_folder(store.open("prompts", task.prompt or "")) / PROMPT_SETTINGS
    settings = json.loads(file.read_text(encoding="utf-8"))
    if "topics" in settings:
        return dict.fromkeys(settings["sides"], settings["topics"]["length"])
    computed = {"query": settings["synthesis"]["length"]} if "synthesis" in settings else {}
    return computed | {side: place["length"] for side, place in settings["sides"].items() if place}
