"""From mined teacher scores to a distilled prompt; negatives without fitting scores are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mined import mine, weights
from training_commands import COMMON

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.negatives import mined_corpus, read_training_data
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.reranker import Reranker

Done = Callable[..., str]
SMALL = (*COMMON, "--lr", "0.05")
MINING = (
    "--sources",
    "exact:enc",
    "--depth",
    12,
    "--pool-negatives",
    3,
    "--denoised-negatives",
    2,
    "--denoise-threshold",
    "0.5",
)


def mine_with(world, classifier: str, *more: object) -> tuple:
    return ("mine_negatives", "--store", world.store, *MINING, "--reranker", classifier, *more)


def tune(world, negatives: str, *more: object) -> tuple:
    at = ("--store", world.store, "--backbone", world.model, "--task", "t", "--negatives", negatives)
    return ("tune_prompts", *at, *SMALL, *more)


def tables(store: Store, name: str) -> list[pa.Table]:
    """Returns the parts of negatives/NAME."""
    artifact = store.open("negatives", name)
    return [pq.read_table(artifact.local_path(part)) for part in artifact.numbered_parts("part")]


def negatives(store: Store, name: str = "hand") -> list[list[int]]:
    """Returns the negatives of each query."""
    return pa.concat_tables(tables(store, name))["negatives"].to_pylist()


def lists(values: list[list[float | None]]) -> pa.Array:
    return pa.array(values, pa.list_(pa.float32()))


def test_a_prompt_is_distilled_from_the_reranker_that_scored_its_negatives(
    world, classifier: str, done: Done, refused: Done
) -> None:
    done(*mine_with(world, classifier, "--name", "plain"))
    line = refused(*tune(world, "plain", "--loss", "kl", "--steps", 3))
    assert "negatives/plain: has no teacher scores (column positive_probability); mine the negatives with a" in line
    assert line.endswith("--teacher-scores")
    planned = done(*mine_with(world, classifier, "--name", "taught", "--teacher-scores", "--plan"))
    assert "scores   30 pairs at least" in planned
    done(*mine_with(world, classifier, "--name", "taught", "--teacher-scores"))
    assert "nothing to make" in done(*mine_with(world, classifier, "--name", "taught", "--teacher-scores", "--plan"))
    store = Store(str(world.store))
    taught = store.open("negatives", "taught")
    corpus, reranker = Corpus.open(store), Reranker(classifier)
    data = read_training_data(corpus, Queries.open(store), "train", taught, None, teacher=True)
    assert data.teacher is not None
    for query, text in enumerate(data.queries):
        rows = np.concatenate([data.positives[query], data.negatives[query]])
        texts = reranker.compose(*data.passages(rows))
        known = np.concatenate([data.teacher.positives[query], data.teacher.negatives[query]])
        np.testing.assert_allclose(known, reranker.score([text] * len(rows), texts), atol=0.03)
    for one, other in zip(*(tables(store, name) for name in ("plain", "taught")), strict=True):
        assert one["negatives"].equals(other["negatives"]), "the scores do not change the sample"
        assert other["probability"].combine_chunks().flatten().null_count == 0

    out = done(
        *tune(world, "taught", "--loss", "kl", "--contrastive-weight", "0.2", "--learn-temperature", "--steps", 3)
    )
    artifact = store.open("prompts", "t")
    assert (
        artifact.config["tuning"].items()
        >= {"loss": "kl", "contrastive_weight": 0.2, "learn_temperature": True, "temperature_lr": 1e-3}.items()
    )
    learned = artifact.notes["temperature"]
    assert learned > 0
    assert learned != 1.0
    assert f", temperature {learned:.4f}" in out
    settings = json.loads(weights(store, "prompts/t")["prompt.json"])
    assert "temperature" not in settings, "the format for serving does not change"
    store.remove("prompts/t")
    done(*tune(world, "taught", "--loss", "margin-mse", "--steps", 1))
    artifact = store.open("prompts", "t")
    assert "temperature" not in artifact.notes
    assert {"contrastive_weight", "learn_temperature", "temperature_lr"}.isdisjoint(artifact.config["tuning"])


def test_options_that_contradict_each_other_are_refused(
    world, mined: Store, refused: Done, documented: Callable[..., None]
) -> None:
    line = refused("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--teacher-scores")
    documented("Mining", "teacher scores without a re-ranker", line, 1)
    assert mined.names("candidates") == []
    for more, message in (
        (
            ("--loss", "symmetric", "--contrastive-weight", 1),
            "--contrastive-weight 1.0 --loss symmetric: expected a dist",
        ),
        (("--loss", "kl", "--negatives-per-query", 0), "--loss kl, --negatives-per-query 0: expected at least 1"),
        (("--learn-temperature", "--temperature", "0.001"), "--temperature 0.001: expected at least 0.01"),
        (("--temperature-lr", "0.01"), "--temperature-lr 0.01: expected --learn-temperature too"),
        (
            ("--learn-temperature", "--zero", 3, "--method", "finetune"),
            "--learn-temperature --zero 3: DeepSpeed's stage",
        ),
    ):
        assert message in refused(*tune(world, "hand", *more))
    scores = {
        "probability": lists([[0.5] * len(row) for row in negatives(mined)]),
        "positive_probability": lists([[0.9]] * 40),
    }
    mine(mined, "taught", rows=scores)
    line = refused(*tune(world, "taught", "--loss", "kl", "--refresh-epochs", 1))
    documented("Training", "negatives mined again while a re-ranker is distilled", line, 1)
    assert mined.names("prompts") == mined.incomplete_keys() == []


@pytest.mark.parametrize("column", ["probability", "positive_probability"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda scores: [*scores, 0.5],
            "has teacher scores for other pairs: {} scores for the {} {} of the query 'q33'",
        ),
        (
            lambda scores: [None, *scores[1:]],
            "has teacher scores for other pairs: none for the query 'q33' and its {} 'p",
        ),
        (lambda scores: [1.5, *scores[1:]], "to 1.5 for {} of the query 'q33', expected probabilities, 0 to 1"),
    ],
)
def test_teacher_scores_of_other_pairs_are_refused(
    world, mined: Store, refused: Done, column: str, change: Callable, message: str
) -> None:
    rows = negatives(mined)
    scores = {"probability": [[0.5] * len(row) for row in rows], "positive_probability": [[0.9]] * 40}
    scores[column] = [change(row) if number == 33 else row for number, row in enumerate(scores[column])]
    mine(mined, "other", rows={name: lists(values) for name, values in scores.items()})
    side, count = ("negatives", len(rows[33])) if column == "probability" else ("positives", 1)
    expected = message.format(count + 1, count, side) if "{} {}" in message else message.format(side)
    if "none for" in message:
        expected = message.format(side.removesuffix("s"))
    line = refused(*tune(world, "other", "--loss", "margin-mse"))
    assert expected in line
    assert line.endswith("mine the negatives with a re-ranker and --teacher-scores")
    assert mined.names("prompts") == mined.incomplete_keys() == []


def test_teacher_scores_of_two_rerankers_or_of_no_numbers_are_refused(world, mined: Store, refused: Done) -> None:
    scores = {"probability": lists([[0.5] * len(row) for row in negatives(mined)])}
    for name in ("one", "two"):
        with mined.create("scores", f"{name}/g0000", config={"reranker": name}):
            pass
    inputs = {f"scores/{number}": mined.open("scores", f"{name}/g0000") for number, name in enumerate(("one", "two"))}
    mine(mined, "both", rows=scores | {"positive_probability": lists([[0.9]] * 40)}, **inputs)
    line = refused(*tune(world, "both", "--loss", "kl"))
    assert "negatives/both: has teacher scores of several re-rankers, scores/one and scores/two: mine" in line
    mine(mined, "text", rows=scores | {"positive_probability": pa.array(["high"] * 40)})
    line = refused(*tune(world, "text", "--loss", "kl"))
    assert "expected lists of probabilities in the column positive_probability: " in line


def test_scores_of_deleted_passages_are_left_out(world, mined: Store, done: Done, tmp_path: Path) -> None:
    """The other scores stay with their pairs."""
    rows = negatives(mined)
    scores = {
        "probability": lists([[row / 256 for row in own] for own in rows]),
        "positive_probability": lists([[0.9]] * 40),
    }
    mine(mined, "taught", rows=scores)
    (tmp_path / "gone").write_text("".join(f"p{row}\n" for row in range(0, 240, 2)))
    done("import_corpus", "--store", world.store, "--delete", tmp_path / "gone")
    taught = mined.open("negatives", "taught")
    data = read_training_data(mined_corpus(mined, taught), Queries.open(mined), "all", taught, None, teacher=True)
    assert data.teacher is not None
    assert 0 < len(data.queries) < 40
    for query, own in enumerate(data.negatives):
        assert (own % 2 == 1).all()
        assert data.teacher.negatives[query].tolist() == (own / 256).tolist()
        assert len(data.teacher.positives[query]) == len(data.positives[query]) == 1
