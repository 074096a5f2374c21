"""Opens the prompt of --init, and checks that training can start from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store
from riptide.indexing.training.retriever_data import open_prompt
from riptide.jobs.training.training_options import TrainRetriever
from riptide.retriever.options import SIDES
from riptide.retriever.prompts.task_prompt import TaskPrompt, check_initial_prompt, load_prompt


@dataclass(frozen=True)
class StartPrompt:
    """The prompt of --init, opened.

    Attributes:
        prompt: The prompt.
        name: The name by which the workers open it.
        artifact: Its artifact, or a reference to an artifact of another store.
    """

    prompt: TaskPrompt
    name: str
    artifact: Artifact | ArtifactReference


def open_start(store: Store, options: TrainRetriever, name: str) -> StartPrompt:
    """Opens the prompt of --init from this store or another one.

    Raises:
        InputError: If there is no such prompt, or if training with these options starts from the backbone alone.
    """
    if options.train != "prompts":
        trained = "LoRA" if options.train == "lora" else "fine-tuning"
        raise InputError(
            f"{Parameter('init', name)} {Parameter('train', options.train)}: {trained} starts from the backbone alone"
        )
    artifact = open_prompt(store, name)
    prompt = load_prompt(model_folder(artifact))
    if "/prompts/" in name:  # a path or URL of a prompt in another store
        return StartPrompt(prompt, artifact.url, ArtifactReference(artifact.url, artifact.fingerprint))
    return StartPrompt(prompt, artifact.key, artifact)


def check_start(options: TrainRetriever, prompt: TaskPrompt, backbone_settings: Mapping[str, Any], length: int) -> None:
    """Raises InputError, before the backbone is loaded, unless training can start from the prompt of --init.

    Args:
        options: The options of the job.
        prompt: The prompt of --init.
        backbone_settings: The settings of the backbone.
        length: Tokens of the trained prompt.

    Raises:
        InputError: If the prompt is for another backbone, or does not fit the options.
    """
    init = f"{Parameter('init', options.init)}"
    try:
        check_initial_prompt(prompt, backbone_settings)
    except InputError as error:
        raise InputError(f"{init} {Parameter('backbone', options.backbone)}: {error}") from None
    if prompt.topics is not None:
        raise InputError(f"{init}: its prompts are those of topics, from which training cannot start; give another one")
    if options.prompt == "topics":
        raise InputError(
            f"{init} {Parameter('prompt', 'topics')}: the prompts of topics are made from their words; leave out "
            f"{Parameter('init')}, or give {Parameter('prompt', 'matrix')}"
        )
    if (prompt.synthesis is not None) != (options.prompt == "synthesised"):
        kind, expected = (
            ("computed from each query", "synthesised") if prompt.synthesis else ("the same for all queries", "matrix")
        )
        raise InputError(
            f"{init} {Parameter('prompt', options.prompt or 'matrix')}: its prompt is {kind}; give "
            f"{Parameter('prompt', expected)}, or another prompt"
        )
    if prompt.synthesis is not None:
        return
    if options.prompt in ("mlp", "per-task"):
        raise InputError(
            f"{init} {Parameter('prompt', options.prompt)}: the parameters of the network cannot be found from the "
            f"prompt that it computes; give {Parameter('prompt', 'matrix')}"
        )
    for side in SIDES if options.weights.sides == "untied" else SIDES[:1]:
        matrix = prompt.fixed_matrix(side)
        if matrix is None:
            raise InputError(
                f"{init} {Parameter('sides', options.weights.sides)}: it has no prompt for the {side} side, which "
                f"training starts from; give another prompt, or other {Parameter('sides')}"
            )
        if matrix.shape[3] != length:
            raise InputError(
                f"{init} {Parameter('length', length)}: its prompt of the {side} side has {matrix.shape[3]} "
                f"tokens; give {Parameter('length', matrix.shape[3])}, or another prompt"
            )
    if prompt.position_offset and not options.prompts.position_offset:
        raise InputError(
            f"{init} {Parameter('position_offset', False)}: it was trained with texts whose positions start after the "
            f"prompt; give {Parameter('position_offset')}"
        )
