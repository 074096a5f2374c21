"""Opens an encoder or a task of a store for the package mteb."""

from __future__ import annotations

from typing import Any

from riptide.indexing.embeddings.named_encoders import find_encoder_spec
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store
from riptide.process.extras import require
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.mteb_encoder import MtebEncoder
from riptide.retriever.options import DEFAULT_OPTIONS, EncoderOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt


def open_mteb_encoder(
    store: Store,
    *,
    encoder: str | None = None,
    task: str | None = None,
    options: EncoderOptions = DEFAULT_OPTIONS,
    device: str | None = None,
    threads: int | None = None,
    **settings: Any,
) -> MtebEncoder:
    """Opens an encoder or a task of a store, as the options `--encoder` and `--task` name it, for `mteb.evaluate`.

    Its name in mteb's results is riptide/TASK, or riptide/NAME for models/NAME.

    Args:
        store: The store.
        encoder: A Hugging Face name, a folder, or models/NAME of the store.
        task: prompts/TASK or models/TASK of the store, which may have an encoder of each side.
        options: The options of the encoder. A task has its own, except for dtype and compile.
        device: As in Encoder.
        threads: As in Encoder.
        **settings: Further arguments of MtebEncoder, except `task` and `passage_encoder`.

    Raises:
        InputError: If mteb is not installed, if not exactly one of encoder and task is named, if it does not exist, or
            if it cannot be opened.
    """
    require("MtebEncoder", "mteb")
    spec = find_encoder_spec(store, encoder, task, options)
    spec.settings("passage")  # raises InputError if the encoder of queries has another backbone
    prompt = spec.prompt()
    tasks: dict[str, TaskPrompt] | None = None if prompt is None else {}

    def open_folder(folder: str) -> Encoder:
        return Encoder(folder, spec.options, device=device, threads=threads, tasks=tasks)

    query = open_folder(spec.folder_of("query"))
    passage = open_folder(spec.folder_of("passage")) if spec.is_untied else None
    kind, name = Key.parse(spec.name)
    in_store = task or (name if kind == "models" else None)
    names = {"name": f"riptide/{in_store}"} if in_store else {}
    return MtebEncoder(query, task=prompt, passage_encoder=passage, **{**names, **settings})
