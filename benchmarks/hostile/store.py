"""A store with tasks of all kinds of prompts, on the backbone and the passages of examples/."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common.files import read_documents, write_documents
from benchmarks.common.program import ROOT, run_job
from benchmarks.query_prompts import computed_prompt, random_topic_model, topic_prompt
from riptide.indexing.store.model_artifacts import commit_files, model_folder
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt
from riptide.retriever.topics.words import topic_words

BACKBONE = str(ROOT / "examples/backbone")
LENGTH = 8  # tokens of a prompt
TOPICS = 100


def make_store(folder: Path) -> str:
    """Makes the store in a folder and returns its URL: tasks `default`, `topical` and `computed`, and BM25.

    Its filter `number` is the place of a passage in the corpus.
    """
    url = str(folder)
    numerics = ("--dtype", "float32", "--compile", "never")
    passages = list(read_documents(ROOT / "examples/squad/corpus.jsonl"))
    with tempfile.TemporaryDirectory() as source:
        numbered = ({**each, "metadata": {"number": number}} for number, each in enumerate(passages))
        write_documents(Path(source, "corpus.jsonl"), numbered)
        run_job(url, "import_corpus", "--source", source, "--filters", "number", "int64")
    run_job(url, "build_bm25")
    run_job(url, "encode_corpus", "--encoder", BACKBONE, "--name", "base", *numerics)
    encoder = Encoder(BACKBONE, EncoderOptions(dtype="float32", compile="never"), tasks={})
    vocabulary = tuple(sorted({word for passage in passages for word in topic_words(passage["text"])}))
    model = random_topic_model(vocabulary, TOPICS, LENGTH, np.random.default_rng(0))
    store = Store(url)
    _commit(store, "topical", topic_prompt(encoder, model, LENGTH, 0))
    _commit(store, "computed", computed_prompt(encoder, LENGTH, "after", 0))
    run_job(url, "encode_corpus", "--task", "topical", *numerics)
    return url


def prompt_folder(url: str) -> Path:
    """Returns a folder with the prompt of the task `computed` of a store."""
    return model_folder(Store(url).open("prompts", "computed"))


def _commit(store: Store, name: str, prompt: TaskPrompt) -> None:
    """Commits prompts/NAME."""
    with (
        store.create("prompts", name, inputs={}, config={"by": "hand", "name": name}) as draft,
        tempfile.TemporaryDirectory() as to,
    ):
        prompt.save(Path(to))
        draft.add_notes(backbone=BACKBONE, options=prompt.options.to_dict())
        commit_files(draft, Path(to))
