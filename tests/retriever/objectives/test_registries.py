"""Names of poolings and kinds of prompts are declared once, as types of options; registries have the same."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from riptide.base.errors import InputError
from riptide.retriever.objectives import pair_losses
from riptide.retriever.objectives.loss_function import LossFunction
from riptide.retriever.objectives.pair_losses import LossOptions
from riptide.retriever.objectives.pair_term import BatchLabels, batch_loss
from riptide.retriever.options import VECTORS, EncoderOptions, Pooling
from riptide.retriever.options.pretraining import PretrainingOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.options.tuning import Parametrisation
from riptide.retriever.systems.prompt_kinds import KINDS


def test_registries_have_the_names_of_the_options() -> None:
    assert [*KINDS] == [*get_args(Parametrisation)]
    assert [*VECTORS] == [*get_args(Pooling)]


def test_a_new_loss_is_a_function_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def distances(
        queries: torch.Tensor,
        passages: torch.Tensor,
        positives: torch.Tensor,
        temperature: float,
        ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        return (queries - passages[positives]).square().sum() / temperature

    monkeypatch.setitem(pair_losses.LOSSES, "distances", LossFunction("distances", "", distances))
    labels = BatchLabels(torch.tensor([1, 0]), torch.zeros(2, 3, dtype=torch.bool))
    queries, passages = torch.eye(3)[:2], torch.eye(3)
    assert batch_loss("distances", queries, passages, labels, 0.5) == 8.0


@pytest.mark.parametrize(
    ("options", "value", "message"),
    [
        (LossOptions, {"loss": "hinge"}, "parameter loss 'hinge': expected one of contrastive, symmetric, "),
        (EncoderOptions, {"dtype": "half"}, "parameter dtype 'half': expected one of auto, float32, bfloat16"),
        (EncoderOptions, {"pooling": "max"}, "parameter pooling 'max': expected one of cls, mean, last, splade"),
        (PretrainingOptions, {"unit": "word"}, "parameter unit 'word': expected one of sentence, span"),
        (SynthesisOptions, {"prompts": 0}, "parameter basic_prompts 0: expected at least 1"),
    ],
)
def test_the_choices_and_the_name_of_an_option_are_those_of_its_field(
    options: type, value: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        options(**value)
