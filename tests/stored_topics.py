"""topics/NAME of a store by hand, and a task with random prompts of these topics."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from topic_prompts import random_saved_topics, small_topics

from riptide.indexing.corpus.corpus import Corpus, save_array
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topic_model_file import write_topics
from riptide.indexing.topics.tree import TopicTree
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.topics import Wordless
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.topics.model import TopicModel


def model_of_words(words: list[str], topics: int) -> TopicModel:
    """Returns a model in which the words take turns as words of the topics."""
    return small_topics(tuple(tuple(words[topic::topics]) for topic in range(topics)))


def store_topics(store: Store, model: TopicModel, topics: np.ndarray, name: str = "hand") -> Artifact:
    """Commits the first generation of topics/NAME of the corpus, with these topics of its passages, int64 [rows]."""
    corpus = Corpus.open(store)
    inputs = {f"corpus/{number}": made for number, made in enumerate(corpus.generations)}
    key = f"{name}/g{len(corpus.generations) - 1:04d}"
    with store.create("topics", key, inputs=inputs, config={"limit": None}) as draft:
        draft.commit("model", ".safetensors", lambda path: write_topics(TopicTree(model, ()), path), rows=2)
        for number, part in enumerate(corpus.parts):
            own = topics[part.first_row : part.end]
            draft.commit(f"part-{number:05d}", ".npy", lambda path, own=own: save_array(own, path), rows=len(own))
    return store.open("topics", key)


def store_topic_task(
    store: Store,
    backbone: str,
    name: str,
    model: TopicModel,
    options: EncoderOptions,
    *,
    wordless: Wordless = "refuse",
    **inputs: Artifact,
) -> TaskPrompt:
    """Commits prompts/NAME with random prompts of topics; inputs: role `topics` if it was trained with stored ones."""
    spec = EncoderSpec(store, backbone, options)
    topics = random_saved_topics(model=model, wordless=wordless)
    prompt = TaskPrompt(backbone_of(spec.settings("query")), options, None, None, topics=topics)
    config: Mapping[str, object] = {"backbone": spec.settings("query"), "by": "hand", "wordless": wordless}
    with (
        store.create("prompts", name, inputs=inputs, config=config) as draft,
        tempfile.TemporaryDirectory() as folder,
    ):
        prompt.save(Path(folder))
        draft.add_notes(backbone=backbone, options=options.to_dict())
        commit_files(draft, Path(folder))
    return prompt
