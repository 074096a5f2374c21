"""Training of prompts of topics: the loss of a step, chunks, GradCache, workers, checkpoints and the saved form."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_bert
from topic_cases import ALPHA, TOPICS, WORDS, four_steps_of_topics, random_training_topics, topic_system, unit_vectors
from topic_prompts import small_topics
from training_cases import Checkpoints, dual_system, gradients, train, whole_and_resumed
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.topics.training import TrainingTopics
from riptide.retriever.training.stepping import trained_parameters
from riptide.retriever.training.training_data import batch_at

NAMES = {"prompts.both.residual.0.weight", "prompts.both.residual.2.weight", "prompts.both.out.weight"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def slow_topic_loss(system: DualEncoderSystem, passages: np.ndarray, topics: list[int], margin: float) -> float:
    """Topic-DPR, Eq. 5, one pair at a time; the mean over the topics."""
    vectors = {topic: unit_vectors(system, passages, topic) for topic in topics}
    total = 0.0
    for own, other in itertools.permutations(topics, 2):
        for first, second in itertools.product(range(len(passages)), repeat=2):
            within = float(vectors[own][first] @ vectors[own][second])
            total += max(margin - within + float(vectors[own][first] @ vectors[other][second]), 0.0)
    return total / (len(topics) * (len(topics) - 1) * len(passages) ** 2)


@pytest.mark.parametrize("sample", [None, 2])
def test_the_loss_of_a_step_has_the_loss_of_topics(bert: Path, sample: int | None) -> None:
    options = replace(TOPICS, sample=sample)
    system, without = topic_system(bert, topics=options), topic_system(bert, topics=replace(options, loss=False))
    data = system.data
    assert data is not None
    assert isinstance(system.assignment, TrainingTopics)
    passages = np.unique(batch_at(data, system.tuning, 3)[1])
    batch = system.batch(3, 0, 1)
    topics = system.assignment.sample(options, system.tuning.seed, 3).tolist()
    assert batch.arguments["topics"] == len(topics) == (sample or 3)
    assert batch.outputs["topics"].rows == len(topics) * len(passages)
    assert "topics" not in without.batch(3, 0, 1).outputs
    expected = ALPHA * slow_topic_loss(system, passages, topics, 0.2)
    assert expected > 0.01
    assert gradients(system, 3)["loss"] == pytest.approx(gradients(without, 3)["loss"] + expected, rel=1e-4)


def test_the_texts_of_a_batch_are_read_once_for_all_topics(bert: Path) -> None:
    system = topic_system(bert)
    data, sizes = system.data, list[int]()
    assert data is not None

    def read(rows: np.ndarray) -> tuple[list[str], list[str]]:
        sizes.append(len(rows))
        return data.passages(rows)

    system.data = replace(data, passages=read)
    count = len(np.unique(batch_at(data, system.tuning, 3)[1]))
    assert system.batch(3, 0, 1).outputs["topics"].rows == 3 * count
    assert sizes == [count, count]  # of the batch, and of the loss of topics


def test_topics_are_drawn_anew_in_each_step() -> None:
    topics = random_training_topics()
    options = replace(TOPICS, sample=2)
    draws = {tuple(topics.sample(options, 0, step).tolist()) for step in range(30)}
    assert draws == {(0, 1), (0, 2), (1, 2)}
    assert topics.sample(options, 0, 7).tolist() == topics.sample(options, 0, 7).tolist()
    assert topics.sample(replace(TOPICS, sample=9), 0, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("judged", [False, True])
def test_each_text_of_a_batch_has_its_topic(bert: Path, judged: bool) -> None:
    system = topic_system(bert, chunk=60, judged=judged)
    data, assignment = system.data, system.assignment
    assert data is not None
    assert assignment is not None
    numbers, rows = batch_at(data, system.tuning, 2)
    passages = np.unique(rows)
    batch = system.batch(2, 0, 1)
    assert len(batch.chunks) > 6
    dense, under = {}, {}
    for chunk in batch.chunks:
        [(name, places)] = chunk.rows.items()
        topics = chunk.inputs[3].tolist()
        (dense if name == "dense" else under).update(zip(places.tolist(), topics, strict=False))
    of_queries = assignment.of_passages[rows[:, 0]] if judged else assignment.query_topics[numbers]  # type: ignore[index]
    assert [dense[place] for place in range(len(dense))] == [*of_queries, *assignment.of_passages[passages]]
    assert [under[place] for place in range(len(under))] == [topic for topic in range(3) for _ in passages]


def test_chunks_and_gradcache_give_the_gradient_of_the_whole_batch(bert: Path) -> None:
    whole = gradients(topic_system(bert), grad_cache="off")
    assert {*whole} == {"loss", *NAMES}
    assert all(bool(whole[name].abs().max() > 0) for name in NAMES)
    for choice in ("off", "on"):
        actual = gradients(topic_system(bert, chunk=60), grad_cache=choice)
        assert actual["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        for name in NAMES:
            torch.testing.assert_close(actual[name], whole[name], atol=1e-5, rtol=1e-3)


def test_a_gradient_equals_finite_differences(bert: Path) -> None:
    def loss(change: float) -> float:
        system = topic_system(bert)
        with torch.no_grad():
            system.get_weight().view(-1)[7] += change  # type: ignore[attr-defined]
        return float(gradients(system)["loss"])

    DualEncoderSystem.get_weight = lambda system: system.prompts["both"].out.weight  # type: ignore[attr-defined]
    try:
        gradient = float(gradients(topic_system(bert))["prompts.both.out.weight"].view(-1)[7])
        assert gradient == pytest.approx((loss(1e-2) - loss(-1e-2)) / 2e-2, rel=0.05, abs=1e-4)
    finally:
        del DualEncoderSystem.get_weight  # type: ignore[attr-defined]


def test_two_workers_train_the_weights_of_one(two_workers: TwoWorkers, bert: Path) -> None:
    expected = four_steps_of_topics(0, pytest.MonkeyPatch(), bert, 1)
    for actual in two_workers.run(four_steps_of_topics, bert, 2):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(actual[name], expected[name], atol=1e-4, rtol=1e-2)


def test_a_run_that_was_killed_ends_with_the_same_prompts_and_they_are_served(bert: Path, tmp_path: Path) -> None:
    """The encoder computes the vectors of the trained system, for the same topics."""

    def run(checkpoints: Checkpoints) -> DualEncoderSystem:
        system = topic_system(bert, dropout=0.1)
        train(system, checkpoints)
        return system

    whole, resumed = whole_and_resumed(run, tmp_path)
    for name, system in (("a", whole), ("b", resumed)):
        (tmp_path / name).mkdir()
        system.save(tmp_path / name)
    for file in ("prompt.json", "prompt.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert {*trained_parameters(whole.module)} == NAMES
    prompt = load_prompt(tmp_path / "a")
    encoder = Encoder(str(bert), prompt.options, tasks={"task": prompt})
    assert whole.data is not None
    texts, topics = whole.data.queries[:9], np.arange(9) % 3
    served = encoder.forward(encoder.tokenize(texts, side="query"), task="task", topics=topics)
    np.testing.assert_allclose(served, whole.encode(texts, "query", prompt_numbers=topics), atol=1e-5)
    assert prompt.topics is not None
    assert prompt.topics.model.fingerprint() == small_topics(WORDS).fingerprint()


SYSTEMS: dict[str, dict[str, Any]] = {
    "judged positives": {"terms": (), "topics": replace(TOPICS, loss=False), "negatives_per_query": 2},
    "texts after the prompt": {"position_offset": True},
    "learned temperature": {"learn_temperature": True},
    "fine-tuned": {"method": "finetune"},
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_other_options_train(bert: Path, tmp_path: Path, name: str) -> None:
    system = topic_system(bert, **SYSTEMS[name])
    before = {key: value.clone() for key, value in trained_parameters(system.module).items()}
    train(system, Checkpoints(tmp_path / "checkpoints"), steps=2)
    for key in NAMES:
        assert not torch.equal(before[key], trained_parameters(system.module)[key]), key
    (tmp_path / "saved").mkdir()
    system.save(tmp_path / "saved")
    folder, backbone = tmp_path / "saved", str(bert)
    if name == "fine-tuned":
        folder, backbone = folder / "prompt", str(folder)
    prompt = load_prompt(folder)
    encoder = Encoder(backbone, prompt.options, tasks={"task": prompt})
    texts, topics = ["w1 w2", "w7 w9 w3"], np.array([1, 2])
    served = encoder.forward(encoder.tokenize(texts, side="passage"), side="passage", task="task", topics=topics)
    np.testing.assert_allclose(served, system.encode(texts, "passage", prompt_numbers=topics), atol=1e-4)


def test_texts_outside_of_the_training_data_have_inferred_topics() -> None:
    topics = TrainingTopics(small_topics(), np.zeros(1, np.int64), None)
    assert topics.infer(["the river", "money"], "query").tolist() == [0, 1]
    assert topics.infer(["the river", "beta"], "passage").tolist() == [0, 2]
    with pytest.raises(InputError, match=r"^the query 'beta' has no word that the topics of its task know"):
        topics.infer(["money", "beta"], "query")
    with pytest.raises(InputError, match=r"^the query '' \(and 1 more of 3\) has no word"):
        topics.infer(["", "money", "beta"], "query")
    known = replace(topics, wordless="prior")
    assert known.infer(["", "money", "beta"], "query").tolist() == [2, 1, 2]
    with pytest.raises(InputError, match=r"^topics of passages: -1 to 2, expected 0 to 2$"):
        TrainingTopics(small_topics(), np.array([-1, 2]), None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"sides": "untied"},
            "topics: found method prompt and sides untied, expected method prompt or finetune",
        ),
        (
            {"method": "lora", "lora": LoraOptions()},
            "topics: found method lora and sides tied, expected",
        ),
        ({"topics": None}, "parametrisation topics: found no options of prompts of topics, expected"),
        ({"parametrisation": "embedding"}, "parametrisation embedding: found options of prompts of topics, expected"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], expected: str) -> None:
    values: dict[str, Any] = {"parametrisation": "topics", "topics": TOPICS, "negatives_per_query": 0}
    with pytest.raises(InputError, match=expected):
        TuneOptions(**{**values, "terms": (CategoryOptions(),), **change})


def test_the_loss_of_topics_needs_categories(bert: Path) -> None:
    with pytest.raises(InputError, match="expected positives categories, or no loss of topics"):
        topic_system(bert, terms=())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden": 0}, "parameter prompt_hidden 0: expected at least 1"),
        ({"queries": "all"}, "parameter query_topics 'all': expected one of own, judged"),
        ({"wordless": "ignore"}, "parameter wordless_queries 'ignore': expected one of refuse, prior"),
        ({"margin": -1.0}, "parameter topic_margin -1.0: expected at least 0"),
        ({"sample": 1}, "parameter topic_sample 1: expected at least 2"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        replace(TOPICS, **change)


def test_a_system_needs_the_topics_of_its_texts(bert: Path) -> None:
    system: Callable[..., DualEncoderSystem] = dual_system
    with pytest.raises(InputError, match="parametrisation topics: expected the topics of queries and passages"):
        system(bert, parametrisation="topics", topics=replace(TOPICS, loss=False))
    with pytest.raises(InputError, match="for other parametrisations none"):
        system(bert, given=random_training_topics())
