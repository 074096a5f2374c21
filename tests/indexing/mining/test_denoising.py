"""Scores of a pool's pairs: each pair is scored once, and samples depend on their own options only."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from local_cluster import LONG
from runners import InlineRunner, Tally

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.formats.format import QUERIES_SCHEMA
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining import sampling, scoring
from riptide.indexing.mining.candidates import MiningQueries
from riptide.indexing.mining.denoising import SampleTask
from riptide.indexing.mining.sampling import NegativeOptions
from riptide.indexing.mining.scoring import ScoreCandidatesWork, ScoreStage, known_probabilities, score_candidates
from riptide.indexing.search.rescoring import RerankerSpec
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import WorkUnit, run_work
from riptide.indexing.work.worker_tasks import Allocation, ignore_progress
from riptide.retriever.options import RerankerOptions

QUESTIONS, PER_PART, ROWS = 14, 4, 50
IDS = [f"q{number}" for number in range(QUESTIONS)]
SCORES = f"pool-cross-{fingerprint_of({'weights': 'cross'})[:6]}"
Pair = tuple[str, int]


def probability(question: str, row: int) -> np.float32:
    """A re-ranker's: half of the pairs below 0.3."""
    return np.float32((xxhash.xxh3_64_intdigest(f"{question} {row}".encode()) % 1000 / 1000) ** 1.7)


class Loop:
    """A re-ranker that counts what it scored; of each pair of row 0 it cuts 3 of 10 tokens."""

    def __init__(self) -> None:
        self.scored: Counter[Pair] = Counter()

    def score(self, questions: Sequence[str], _: Corpus, rows: np.ndarray) -> tuple[np.ndarray, Cuts]:
        self.scored.update(zip(questions, rows.tolist(), strict=True))
        scores = np.array([probability(text, row) for text, row in zip(questions, rows.tolist(), strict=True)])
        cut = int((rows == 0).sum())
        return scores, Cuts(len(rows), 10 * len(rows), cut, 3 * cut, 7)


def queries_of_part(part: int) -> MiningQueries:
    ids = IDS[part * PER_PART : (part + 1) * PER_PART]
    positives = [np.array([0, 1], np.int64) for _ in ids]
    return MiningQueries(ids, [f"text of {id}" for id in ids], [[] for _ in ids], positives)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """candidates/pool in four parts: questions of 0 to 40 candidates; one of the parts has none at all."""
    store = Store(str(tmp_path / "store"))
    draw = np.random.default_rng(0)
    texts = [f"text of {id}" for id in IDS]
    table = pa.table([IDS, texts, [""] * QUESTIONS], schema=QUERIES_SCHEMA)
    with store.create("queries", "asked", config={}) as draft:

        def write(path: Path) -> None:
            with pa.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)

        draft.commit("part-00000", ".arrow", write, rows=QUESTIONS)
    with store.create("candidates", "pool", inputs={"queries": store.open("queries", "asked")}) as draft:
        for part in range(-(-QUESTIONS // PER_PART)):
            group = queries_of_part(part)
            rows = np.full((len(group.ids), 40), -1, np.int64)
            for number in range(len(group.ids)):
                count = 0 if part == 2 else draw.integers(0, 41)
                rows[number, :count] = draw.choice(ROWS, count, replace=False)
            pool = mining.pool_hits(group.ids, {"a": Hits(np.zeros(rows.shape, np.float32), rows)}, group.positives, 40)
            draft.commit(f"part-{part:05d}", ".parquet", lambda p, t=pool: pq.write_table(t, p), rows=len(pool))
    return store


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A re-ranker that is a function of the pair."""
    worker = Loop()
    monkeypatch.setattr(RerankerSpec, "open", lambda *_: worker)
    monkeypatch.setattr(Corpus, "open", lambda *_: None)
    return worker


def spec_of(store: Store, name: str = "cross", numerics: str = "this") -> RerankerSpec:
    return RerankerSpec(store, name, RerankerOptions(), {"weights": name}, numerics)


def scores_of(
    store: Store, draw: NegativeOptions, reranker: str = "cross", numerics: str = "this"
) -> ScoreCandidatesWork:
    return ScoreCandidatesWork(store, store.open("candidates", "pool"), spec_of(store, reranker, numerics), draw)


def score(
    store: Store, draw: NegativeOptions, reranker: str = "cross", *, parts: int | None = None, numerics: str = "this"
) -> list[tuple[bool, int]]:
    """Makes generations until the options have all scores; returns the counts (kept, pairs).

    parts: After so many parts the work is interrupted.
    """
    tally, runner = Tally(), InlineRunner(fail_after=parts, error=KeyboardInterrupt())
    try:
        while not (work := scores_of(store, draw, reranker, numerics)).is_complete:
            run_work(store, work, runner, tally)
    except KeyboardInterrupt:
        assert parts is not None
    return tally.counts.get("rerank", [])


def needed(store: Store, draw: NegativeOptions) -> set[Pair]:
    """By the definition: each question's pairs in its seeded order, until enough of them are below the threshold."""
    found: set[Pair] = set()
    pool = store.open("candidates", "pool")
    for part in pool.numbered_parts("part"):
        table = pq.read_table(pool.local_path(part))
        ids, rows = table["query_id"].to_pylist(), table["row"].to_numpy()
        keys = mining.seeded_order(draw.seed, ids, rows, mining.SCORING).tolist()
        for id in sorted({*ids}):
            low = 0
            for _, row in sorted(
                (key, row) for key, row, own in zip(keys, rows.tolist(), ids, strict=True) if own == id
            ):
                if low < draw.denoised_negatives or draw.score_all:
                    found.add((f"text of {id}", row))
                    low += bool(probability(f"text of {id}", row) < np.float32(draw.denoise_threshold))
    return found


def sample_negatives_of(store: Store, scores: ScoreCandidatesWork, draw: NegativeOptions, name: str) -> list[dict]:
    """Returns the lines of negatives/NAME, sampled by these scores."""
    pool = store.open("candidates", "pool")
    with store.create("negatives", name) as draft:
        for part in pool.numbered_parts("part"):
            sample_part = SampleTask(draft, pool, scores.generations, draw).open(Allocation(1))
            sample_part(WorkUnit((part.name,), 0, queries_of_part(int(part.name[-5:]))), ignore_progress)
    made = store.open("negatives", name)
    return [line for part in made.numbered_parts("part") for line in pq.read_table(made.local_path(part)).to_pylist()]


@pytest.mark.parametrize("seed", range(6 if LONG else 2))
def test_every_pair_is_scored_once_and_what_is_drawn_hangs_on_no_other_options(
    store: Store, loop: Loop, seed: int
) -> None:
    """Twelve requests at random, one of which scores all, then the same again: each as if it were the only one."""
    dice = random.Random(seed)
    requests = [
        NegativeOptions(
            dice.randint(0, 6), dice.randint(0, 8), dice.choice([0.05, 0.2, 0.5, 1.0]), number == 9, dice.choice([0, 1])
        )
        for number in range(12)
    ]
    everything: set[Pair] = set()
    first: dict[NegativeOptions, list[dict]] = {}
    for number, draw in enumerate([*requests, *requests]):
        scores, before = scores_of(store, draw), loop.scored.copy()
        if scores.is_complete:
            assert needed(store, draw) <= everything
        else:
            counts = score(store, draw)
            assert not any(kept for kept, _ in counts)
            assert sum(pairs for _, pairs in counts) == (loop.scored - before).total()
            everything |= needed(store, draw)
        assert {*loop.scored} == everything, "what is not needed was scored, or the reverse"
        assert max(loop.scored.values(), default=1) == 1, "a pair was scored twice"
        assert scores_of(store, draw).is_complete
        lines = sample_negatives_of(store, scores_of(store, draw), draw, f"drawn{number}")
        assert first.setdefault(draw, lines) == lines
        for line in lines:
            low = [row for row, clean in zip(line["negatives"], line["is_denoised"], strict=True) if clean]
            assert all(
                probability(f"text of {line['query_id']}", row) < np.float32(draw.denoise_threshold) for row in low
            )
            for row, known in zip(line["negatives"], line["probability"], strict=True):
                assert known is None or known == probability(f"text of {line['query_id']}", row)
    assert len(store.generations("scores", SCORES)) > 1


def test_scores_are_found_by_part_and_row(store: Store, loop: Loop) -> None:
    draw = NegativeOptions(denoised_negatives=3, denoise_threshold=0.3)
    score(store, draw)
    scores = scores_of(store, draw)
    num_pairs, cut = loop.scored.total(), sum(count for (_, row), count in loop.scored.items() if row == 0)
    assert scores.count_cuts() == Cuts(num_pairs, 10 * num_pairs, cut, 3 * cut, 7)
    pool = store.open("candidates", "pool")
    for part in pool.numbered_parts("part"):
        table = pq.read_table(pool.local_path(part))
        known = known_probabilities(table, part.name, scores.generations)
        assert (known.dtype, len(known)) == (np.float32, len(table))
        for line, found in zip(table.to_pylist(), known.tolist(), strict=True):
            pair = f"text of {line['query_id']}", line["row"]
            assert (found == probability(*pair)) if pair in loop.scored else np.isnan(found)
    assert not np.isnan(known_probabilities(table, part.name, scores.generations)).all()


def test_what_was_scored_before_an_interruption_is_kept(store: Store, loop: Loop) -> None:
    draw = NegativeOptions(denoised_negatives=4, denoise_threshold=0.2)
    [(was_kept, kept)] = score(store, draw, parts=1)
    assert (was_kept, kept > 0) == (False, True)
    assert store.generations("scores", SCORES) == []
    assert score(store, draw)[0] == (True, kept)
    assert {*loop.scored.values()} == {1}
    assert scores_of(store, draw).is_complete
    assert {*loop.scored} == needed(store, draw)


def test_a_task_that_is_tried_again_scores_nothing(store: Store, loop: Loop) -> None:
    pool = store.open("candidates", "pool")
    draw = NegativeOptions(denoised_negatives=2)
    with store.create("scores", "again/g0000") as draft:
        worker = ScoreStage(scores_of(store, draw)).task([draft]).open(Allocation(1))
        units = [WorkUnit((part.name,), 0, None) for part in pool.numbered_parts("part")]
        made = [worker(unit, ignore_progress) for unit in units]
        before = loop.scored.copy()
        assert [worker(unit, ignore_progress) for unit in units] == made
        assert loop.scored == before


def drawn_by_all(store: Store, draw: NegativeOptions) -> list[dict]:
    """What is drawn where every pair is scored; without the probabilities, of which more are known."""
    pool, lines = store.open("candidates", "pool"), []
    for number, part in enumerate(pool.numbered_parts("part")):
        table, group = pq.read_table(pool.local_path(part)), queries_of_part(number)
        known = [probability(f"text of {line['query_id']}", line["row"]) for line in table.to_pylist()]
        made = sampling.sample_negatives(
            table, np.array(known, np.float32), draw, query_ids=group.ids, positives=group.positives
        )
        lines += made.drop_columns(["probability"]).to_pylist()
    return lines


@pytest.mark.parametrize("seed", range(4))
def test_what_was_abandoned_is_gone_on_with_for_other_options(store: Store, loop: Loop, seed: int) -> None:
    """Three requests are left after a part or none, then each is ended: none is refused, no pair is scored twice."""
    dice = random.Random(seed)
    requests = [
        NegativeOptions(1, 5, 0.2),
        NegativeOptions(1, 2, 0.5),
        NegativeOptions(1, 0, 1.0, True),
        NegativeOptions(1, 7, 0.1),
    ]
    dice.shuffle(requests)
    for number, draw in enumerate(requests[:3]):
        score(store, draw, parts=int(number < 2))
    assert store.incomplete_keys() == [f"scores/{SCORES}/g0000"]
    for number, draw in enumerate(requests):
        score(store, draw)
        scores = scores_of(store, draw)
        assert scores.is_complete
        assert needed(store, draw) <= {*loop.scored}
        lines = sample_negatives_of(store, scores, draw, f"drawn{number}")
        assert [{k: v for k, v in line.items() if k != "probability"} for line in lines] == drawn_by_all(store, draw)
        assert score(store, draw) == [], "pairs are pending"
    assert {*loop.scored.values()} == {1}, "a pair was scored twice"


def test_scores_hang_on_the_reranker_and_not_on_what_its_folder_is_called(store: Store, loop: Loop) -> None:
    draw = NegativeOptions(denoised_negatives=2)
    for reranker in ("here/cross", "there/cross/"):
        score(store, draw, reranker)
    one, other = store.names("scores")
    assert {one[:-6], other[:-6]} == {"pool-cross-"}
    made = [store.open("scores", f"{name}/g0000") for name in (one, other)]
    assert {artifact.config["reranker"]["weights"] for artifact in made} == {"here/cross", "there/cross/"}


def test_another_reranker_pool_or_numerics_class_is_refused_with_both_sides(
    store: Store, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = NegativeOptions(denoised_negatives=2)
    score(store, draw)
    with monkeypatch.context() as alike:
        alike.setattr(scoring, "fingerprint_of", lambda _: SCORES[-6:])
        with pytest.raises(InputError, match=f"{SCORES}/g0000 was scored by another re-ranker than there/"):
            scores_of(store, draw, "there/cross/")
    made = store.open("candidates", "pool")
    with store.create("candidates", "other", config={"other": 1}):
        pass
    other: Artifact = store.open("candidates", "other")
    other.key = made.key
    with pytest.raises(InputError, match=f"scores/{SCORES}/g0000 is of other candidates than"):
        ScoreCandidatesWork(store, other, spec_of(store), draw)
    score(store, NegativeOptions(denoised_negatives=5), parts=1)
    with pytest.raises(InputError, match=r"g0001 was begun otherwise: numerics this, now that; give the same"):
        score(store, NegativeOptions(denoised_negatives=5), numerics="that")


def test_margins_score_every_pair_and_the_positives_once(store: Store, loop: Loop) -> None:
    """After scores for other options; a candidate is dropped by the lowest of its query's positives."""
    score(store, NegativeOptions(denoised_negatives=2))
    before = loop.scored.copy()
    draw = NegativeOptions(100, 3, 0.3, margins=mining.ScoreMargins(relative_margin=0.05))
    pool = store.open("candidates", "pool")
    parts = {part.name: queries_of_part(number) for number, part in enumerate(pool.numbered_parts("part"))}
    for _ in range(2):  # nothing is pending the second time
        scores = score_candidates(store, pool, spec_of(store), draw, InlineRunner(), parts=parts)
    assert {*loop.scored.values()} == {1}
    texts = [f"text of {id}" for id in IDS]
    pairs = {
        (f"text of {line['query_id']}", line["row"])
        for part in pool.numbered_parts("part")
        for line in pq.read_table(pool.local_path(part)).to_pylist()
    }
    assert before.keys() < pairs
    assert {*loop.scored} == pairs | {(text, row) for text in texts for row in (0, 1)}
    dropped = 0
    for line in sample_negatives_of(store, scores, draw, "near"):
        text = f"text of {line['query_id']}"
        limit = min(float(probability(text, row)) for row in (0, 1)) * 0.95
        mine = {row for query, row in pairs if query == text}
        above = {row for row in mine if float(probability(text, row)) > limit}
        assert {*line["dropped"]} == above
        assert {*line["dropped_by"]} <= {"relative_margin:reranker"}
        assert {*line["negatives"]} == mine - above
        dropped += len(above)
    assert dropped > 20
    assert score(store, NegativeOptions(score_all=True)) == [], "scores of all pairs serve other options too"


@pytest.mark.parametrize("before", [None, NegativeOptions(denoised_negatives=2), NegativeOptions(score_all=True)])
def test_teacher_scores_are_those_of_the_sampled_negatives_and_the_positives(
    store: Store, loop: Loop, before: NegativeOptions | None
) -> None:
    """Also after scores for other options, and each pair once; other pairs are not scored."""
    if before:
        score(store, before)
    earlier = {*loop.scored}
    draw = NegativeOptions(5, 3, 0.3, teacher_scores=True)
    pool = store.open("candidates", "pool")
    parts = {part.name: queries_of_part(number) for number, part in enumerate(pool.numbered_parts("part"))}
    for _ in range(2):  # nothing is pending the second time
        scores = score_candidates(store, pool, spec_of(store), draw, InlineRunner(), parts=parts)
    assert {*loop.scored.values()} == {1}
    lines = sample_negatives_of(store, scores, draw, "taught")
    sampled = {(f"text of {line['query_id']}", row) for line in lines for row in line["negatives"]}
    positives = {(f"text of {id}", row) for id in IDS for row in (0, 1)}
    assert {*loop.scored} == earlier | needed(store, draw) | sampled | positives
    assert len({*loop.scored}) < sum(part.rows for part in pool.numbered_parts("part")) or earlier
    for line in lines:
        text = f"text of {line['query_id']}"
        assert line["probability"] == [probability(text, row) for row in line["negatives"]]
        assert line["positive_probability"] == [probability(text, row) for row in line["positives"]]
    assert score(store, NegativeOptions(3, 3, 0.3, teacher_scores=True)) == [], "fewer sampled negatives need no more"
    assert "positive_probability" not in sample_negatives_of(store, scores, NegativeOptions(5, 3, 0.3), "plain")[0]


def test_more_sampled_negatives_need_more_teacher_scores(store: Store, loop: Loop) -> None:
    pool = store.open("candidates", "pool")
    parts = {part.name: queries_of_part(number) for number, part in enumerate(pool.numbered_parts("part"))}
    for count in (2, 9):
        draw = NegativeOptions(count, 0, teacher_scores=True)
        scores = score_candidates(store, pool, spec_of(store), draw, InlineRunner(), parts=parts)
        for line in sample_negatives_of(store, scores, draw, f"taught{count}"):
            assert None not in line["probability"]
    assert {*loop.scored.values()} == {1}
    assert len(store.generations("scores", SCORES)) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pool_negatives": -1}, "parameter pool_negatives -1: expected 0 or more"),
        ({"denoised_negatives": -1}, "parameter denoised_negatives -1: expected 0 or more"),
        ({"seed": -1}, "parameter seed -1: expected 0 or more"),
        ({"denoise_threshold": 0.0}, "parameter denoise_threshold 0.0: expected a probability above 0"),
        ({"denoise_threshold": 1.5}, "parameter denoise_threshold 1.5: expected a probability above 0"),
        ({"denoise_threshold": float("nan")}, "parameter denoise_threshold nan: expected a probability above 0"),
    ],
)
def test_bad_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as raised:
        NegativeOptions(**options)
    assert str(raised.value) == told
