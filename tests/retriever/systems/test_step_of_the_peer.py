"""A step of fine-tuning without dropout has the loss and the gradients of sentence-transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tiny import save_bert
from training_cases import CPU, ENCODER, gradients, make_data

from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.training_data import batch_at


@pytest.mark.parametrize("negatives", [0, 1])
def test_a_step_has_the_loss_and_the_gradients_of_sentence_transformers(tmp_path: Path, negatives: int) -> None:
    """The batch has no passage twice and none that answers another query, as sentence-transformers' sampler sees to.

    The layer after the first token, which mean pooling does not use, has no gradient there and zeros here.
    """
    folder, data = save_bert(tmp_path, spread=0.2), make_data()
    options = TuneOptions(method="finetune", batch=6, negatives_per_query=negatives, dropout=False)
    encoder = replace(ENCODER, pooling="mean", normalize=True, query_length=48)
    system = DualEncoderSystem(folder, encoder, options, data, device=CPU, dtype=torch.float32)
    steps = (batch_at(data, options, step) for step in range(100))
    step, (queries, rows) = next(
        (step, batch)
        for step, batch in enumerate(steps)
        if not system.batch(step, 0, 1).arguments["ignored"].any() and len(set(batch[1].flat)) == batch[1].size
    )
    ours = gradients(system, step)

    transformer = Transformer(str(folder), max_seq_length=48)
    model = SentenceTransformer(modules=[transformer, Pooling(32, "mean"), Normalize()], device="cpu").eval()
    columns = [[data.queries[query] for query in queries], *(data.passages(column)[1] for column in rows.T)]
    loss = MultipleNegativesRankingLoss(model)([model.preprocess(texts) for texts in columns], torch.empty(0))
    loss.backward()
    assert ours.pop("loss") == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: each.grad for name, each in transformer.named_parameters() if each.grad is not None}
    assert len(expected) > 30
    for name, gradient in ours.items():
        [peer] = [value for key, value in expected.items() if name.endswith(key.removeprefix("model"))] or [None]
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if peer is None else peer, rtol=1e-3, atol=1e-5)
