"""GTR's loss, compared with a loop in float64 that is written from its definition, and with finite differences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_checks import assert_gradients, log_sum_exp, random
from t5_folders import save_t5
from training_cases import CPU, make_data

from riptide.retriever.objectives.pair_term import BatchLabels, batch_loss
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.training_data import batch_at

B = 5
# relevant[i, j]: passage j, the positive of query j, or from B on the hard negative of query j - B, answers query i.
RELEVANT = np.zeros((B, 2 * B), bool)
RELEVANT[np.arange(B), np.arange(B)] = True
RELEVANT[0, 3] = RELEVANT[2, 1] = RELEVANT[1, B + 4] = True


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    product = sum(float(x) * float(y) for x, y in zip(left, right, strict=True))
    return product / math.sqrt(sum(float(x) ** 2 for x in left) * sum(float(y) ** 2 for y in right))


def expected_loss(
    queries: np.ndarray, positives: np.ndarray, negatives: np.ndarray, relevant: np.ndarray, scale: float = 100.0
) -> float:
    """The mean over pairs of the sum of both directions.

    Question -> passage: the softmax of a query over all 2B passages, without its other known positives. Passage ->
    question: the softmax of a positive over all B queries, without the other queries that it answers.

    Args:
        queries: [B, d].
        positives: [B, d].
        negatives: The hard negatives, [B, d].
        relevant: As RELEVANT.
        scale: The inverse temperature.
    """
    size = len(queries)
    passages = [*positives, *negatives]
    total = 0.0
    for i in range(size):
        to_passages = [
            scale * cosine(queries[i], passages[j]) for j in range(len(passages)) if j == i or not relevant[i, j]
        ]
        to_queries = [scale * cosine(queries[j], positives[i]) for j in range(size) if j == i or not relevant[j, i]]
        positive = scale * cosine(queries[i], positives[i])
        total += log_sum_exp(to_passages) - positive + log_sum_exp(to_queries) - positive
    return total / size


def labels(relevant: np.ndarray) -> BatchLabels:
    ignored = torch.from_numpy(relevant.copy())
    ignored[torch.arange(B), torch.arange(B)] = False
    return BatchLabels(torch.arange(B), ignored)


def loss_of(
    queries: torch.Tensor, passages: torch.Tensor, given: BatchLabels, temperature: float = 0.01
) -> torch.Tensor:
    queries, passages = (torch.nn.functional.normalize(vectors, dim=-1) for vectors in (queries, passages))
    return batch_loss("symmetric-sum", queries, passages, given, temperature)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_equals_a_loop_over_cosines(dtype: torch.dtype, masked: bool) -> None:
    relevant = RELEVANT if masked else np.eye(B, 2 * B, dtype=bool)
    queries, passages = random(B, 6).to(dtype), random(2 * B, 6, seed=1).to(dtype)
    arrays = queries.double().numpy(), passages[:B].double().numpy(), passages[B:].double().numpy()
    expected = expected_loss(*arrays, relevant)
    assert expected > 1
    actual = loss_of(queries, passages, labels(relevant))
    assert actual.item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12)


def test_a_known_positive_is_masked_in_both_directions() -> None:
    """Passage 3 answers query 0: neither is a negative of the other."""
    queries, passages = random(B, 6), random(2 * B, 6, seed=1)
    passages[3] = queries[0] + 0.1 * passages[3]  # a large score
    arrays = queries.numpy(), passages[:B].numpy(), passages[B:].numpy()
    without = expected_loss(*arrays, np.eye(B, 2 * B, dtype=bool))
    assert expected_loss(*arrays, RELEVANT) < without - 1
    assert loss_of(queries, passages, labels(RELEVANT)).item() == pytest.approx(expected_loss(*arrays, RELEVANT))


def test_hard_negatives_count_from_questions_to_passages_alone() -> None:
    """From a passage to the questions, [B, B], a hard negative has no term."""
    queries, passages = random(B, 6), random(2 * B, 6, seed=1)
    eye = labels(np.eye(B, 2 * B, dtype=bool))
    both = loss_of(queries, passages, eye) - loss_of(
        queries, passages[:B], BatchLabels(eye.positives, eye.ignored[:, :B])
    )
    q, p = (torch.nn.functional.normalize(vectors, dim=-1) for vectors in (queries, passages))
    one = batch_loss("contrastive", q, p, eye, 0.01)
    one -= batch_loss("contrastive", q, p[:B], BatchLabels(eye.positives, eye.ignored[:, :B]), 0.01)
    assert both.item() == pytest.approx(one.item(), rel=1e-9)


def test_the_gradient_equals_finite_differences() -> None:
    """At temperature 0.1: at 0.01 nearly all probabilities of random vectors are 0 or 1."""
    queries, passages = random(B, 4), random(2 * B, 4, seed=1)
    assert_gradients(lambda left, right: loss_of(left, right, labels(RELEVANT), 0.1), queries, passages)
    arrays = queries.numpy(), passages[:B].numpy(), passages[B:].numpy()
    expected = expected_loss(*arrays, RELEVANT, scale=10.0)
    assert loss_of(queries, passages, labels(RELEVANT), 0.1).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_batch_of_a_t5_has_one_hard_negative_for_each_pair(tmp_path: Path, step: int) -> None:
    """The system's loss is that of the loop over its own vectors. A passage that is drawn twice is one column."""
    data = make_data(60)
    options = TuneOptions(
        method="finetune", batch=B, negatives_per_query=1, loss="symmetric-sum", temperature=0.01, projection=48
    )
    encoder = EncoderOptions(
        pooling="mean", normalize=True, query_length=24, passage_length=24, dtype="float32", compile="never"
    )
    system = DualEncoderSystem(save_t5(tmp_path / "t5"), encoder, options, data, device=CPU, dtype=torch.float32)
    system.module.eval()
    queries, rows = batch_at(data, options, step)
    assert rows.shape == (B, 2)
    batch = system.batch(step, 0, 1)
    vectors = torch.zeros(batch.outputs["dense"].rows, 48)
    for chunk in batch.chunks:
        vectors[chunk.rows["dense"]] = system.forward(chunk)[0]["dense"].detach()
    assert vectors.shape == (B + len(np.unique(rows)), 48)
    drawn = rows.T.ravel()  # the positives, then the hard negatives
    encoded = system.encode(system.compose(drawn), "passage")
    relevant = np.array([[row in data.relevant_rows(query) for row in drawn] for query in queries])
    relevant |= np.array([row in drawn[:place] for place, row in enumerate(drawn)])  # the passage has a column already
    expected = expected_loss(
        system.encode([data.queries[query] for query in queries], "query"), encoded[:B], encoded[B:], relevant
    )
    assert system.loss({"dense": vectors}, batch).item() == pytest.approx(expected, rel=1e-4)
