"""Training on pairs with a common category: batches, the loss of a step, chunks, GradCache and two workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases
from category_data import NAMES, category_system, category_table, four_steps_of_categories
from loss_checks import log_sum_exp
from tiny import save_bert
from training_cases import CPU, gradients
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import batch_at


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def sets_of(rows: np.ndarray) -> list[set[int]]:
    table = category_table()
    return [set(table.of_row(row).tolist()) for row in rows.tolist()]


def test_a_batch_holds_the_overlaps_with_each_querys_own_passage(bert: Path) -> None:
    system = category_system(bert)
    batch = system.batch(2, 0, 1)
    data = system.data
    assert data is not None
    _, rows = batch_at(data, system.tuning, 2)
    passages = np.unique(rows)
    expected = [[len(own & other) / len(own | other) for other in sets_of(passages)] for own in sets_of(rows[:, 0])]
    assert rows.shape == (12, 1), "no negatives are mined"
    np.testing.assert_allclose(batch.arguments["rho"].numpy(), expected, rtol=1e-6)
    assert 0 < np.count_nonzero(expected) < np.size(expected)
    assert "rho" not in category_system(bert, terms=()).batch(2, 0, 1).arguments


def expected_loss(system: DualEncoderSystem, step: int, alpha: float, temperature: float) -> float:
    """Topic-DPR, Eq. 3, 4 and 7, from the vectors of single texts: one pair of the batch at a time."""
    data = system.data
    assert data is not None
    numbers, rows = batch_at(data, system.tuning, step)
    passages = np.unique(rows)
    encode = system.encode
    queries = encode([data.queries[number] for number in numbers], "query").astype(np.float64)
    vectors = encode(data.passages(passages)[1], "passage").astype(np.float64)
    own_sets, passage_sets = sets_of(rows[:, 0]), sets_of(passages)
    relevant = [set(data.relevant_rows(number).tolist()) for number in numbers.tolist()]
    totals = [0.0, 0.0]
    for which, (others, of_others, other_rows) in enumerate(
        [(vectors, passage_sets, passages), (queries, own_sets, rows[:, 0])]
    ):
        for place, query in enumerate(queries):
            scores = {other: float(query @ vector) / temperature for other, vector in enumerate(others)}
            if which == 1:
                del scores[place]
            positives = [other for other in scores if own_sets[place] & of_others[other]]
            negatives = [
                score
                for other, score in scores.items()
                if other not in positives and other_rows[other] not in relevant[place]
            ]
            for other in positives:
                overlap = len(own_sets[place] & of_others[other]) / len(own_sets[place] | of_others[other])
                difference = log_sum_exp([scores[other], *negatives]) - scores[other]
                totals[which] += overlap * difference / len(positives) / len(queries)
    return (1 - 2 * alpha) * totals[0] + alpha * totals[1]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_the_loss_of_a_step_equals_a_loop_over_pairs(bert: Path, alpha: float, normalize: bool) -> None:
    system = category_system(bert, normalize=normalize, terms=(CategoryOptions(weight=alpha),), temperature=0.3)
    expected = expected_loss(system, 3, alpha, 0.3)
    assert gradients(system, 3)["loss"] == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01


def test_a_judged_passage_without_a_common_category_is_no_negative(bert: Path) -> None:
    """Some queries have two judged passages, and the second one shares no category with the first one."""
    system = category_system(bert, batch=60)
    batch = system.batch(0, 0, 1)
    apart = batch.arguments["ignored"] & (batch.arguments["rho"] == 0)
    assert apart.any()
    expected = expected_loss(system, 0, CategoryOptions().weight, 1.0)
    assert gradients(system, 0)["loss"] == pytest.approx(expected, rel=1e-4)


SYSTEMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"sides": "untied", "terms": (CategoryOptions(weight=0.0),)},
    "query": {"sides": "query"},
    "mlp": {"parametrisation": "mlp"},
    "lora": {"method": "lora", "lora": LoraOptions(rank=4, alpha=8)},
    "fine-tuned": {"method": "finetune", "learn_temperature": True},
    "fine-tuned-untied": {"method": "finetune", "sides": "untied"},
    "synthesised": {
        "sides": "query",
        "parametrisation": "synthesised",
        "synthesis": SynthesisOptions(prompts=3, length=4, hidden=6, bottleneck=5, temperature=0.2),
    },
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_chunks_and_gradcache_give_the_gradient_of_the_whole_batch(bert: Path, name: str) -> None:
    whole = gradients(category_system(bert, **SYSTEMS[name]), 5)
    assert whole["loss"] > 0
    assert sum(float(value.abs().sum()) for key, value in whole.items() if key != "loss") > 0
    cut = gradients(category_system(bert, chunk=60, **SYSTEMS[name]), 5, grad_cache="on")
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for key in whole.keys() - {"loss"}:
        torch.testing.assert_close(cut[key], whole[key], atol=2e-5, rtol=1e-3)


def test_training_lowers_the_loss(bert: Path) -> None:
    system = category_system(bert, method="finetune", normalize=True)
    batch = system.batch(0, 0, 1)
    system.batch = lambda *_: batch  # type: ignore[method-assign]
    trainer = Trainer(system, LoopOptions(steps=20, lr=1e-3), device=CPU, dtype=torch.float32)
    losses = [trainer.step(number) for number in range(20)]
    assert losses[-1] < 0.7 * losses[0]


def test_two_workers_train_the_weights_of_one(two_workers: TwoWorkers, bert: Path) -> None:
    """The positives of a query are on both workers, and so are the other queries of its loss."""
    expected = four_steps_of_categories(0, pytest.MonkeyPatch(), bert, 1)
    for actual in two_workers.run(four_steps_of_categories, bert, 2):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(actual[name], expected[name], atol=1e-4, rtol=1e-3)


def test_a_run_that_was_killed_ends_with_the_same_weights(bert: Path, tmp_path: Path) -> None:
    def run(checkpoints: cases.Checkpoints) -> dict[str, torch.Tensor]:
        system = category_system(bert)
        cases.train(system, checkpoints)
        return {name: value.clone() for name, value in system.module.state_dict().items() if "prompts" in name}

    whole, resumed = cases.whole_and_resumed(run, tmp_path)
    assert whole.keys() == resumed.keys() != set()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives_per_query": 1}, "negatives_per_query 1: the negatives of a query are the passages of the batch"),
        ({"batch": 1}, "batch 1: expected at least 2 queries"),
        ({"loss": "symmetric"}, "parameter loss symmetric: positives by category have a separate loss"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {"negatives_per_query": 0, "terms": (CategoryOptions(),)}
    assert TuneOptions(**fitting).term_options(CategoryOptions) == CategoryOptions(weight=0.1, field="categories")
    with pytest.raises(InputError, match=message):
        TuneOptions(**{**fitting, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -0.1}, "category_weight -0.1: expected 0 to 0.5"),
        ({"weight": 0.51}, "category_weight 0.51: expected 0 to 0.5"),
        ({"weight": float("nan")}, "category_weight nan: expected 0 to 0.5"),
        ({"field": ""}, "categories_field '': expected the name of a metadata field"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TuneOptions(negatives_per_query=0, terms=(CategoryOptions(**options),))


def test_the_categories_of_the_cases_are_of_all_kinds() -> None:
    """Passages with one category and with several, and pairs with none, one or all of them in common."""
    table = category_table()
    assert table.names == NAMES
    assert set(np.diff(table.offsets).tolist()) >= {1, 2}
    data = replace(cases.make_data(), categories=table)
    assert data.categories is table
    assert table.num_rows == data.num_passages
