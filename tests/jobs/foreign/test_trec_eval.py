"""trec_eval: each measure of random runs with equal scores has the value that the original program prints."""

from __future__ import annotations

import platform
import random
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from riptide.indexing.lucene.java import find_anserini_jar
from riptide.indexing.measures.metrics import metrics_per_query

PROGRAM = "trec_eval/trec_eval-linux-amd64"  # of Anserini's jar, version 9.0.4
CUTOFFS = {"P": (5, 10, 30, 100), "recall": (5, 100), "ndcg_cut": (5, 10, 1000), "map_cut": (5, 10), "success": (1, 10)}
NAMES = {"P": "P", "recall": "R", "ndcg_cut": "nDCG", "map_cut": "AP", "success": "Success"}
# Names of measures by those of the program.
MEASURES = {
    **{f"{theirs}_{cutoff}": f"{NAMES[theirs]}@{cutoff}" for theirs, cutoffs in CUTOFFS.items() for cutoff in cutoffs},
    **{f"iprec_at_recall_{recall / 10:.2f}": f"IPrec@{recall / 10}" for recall in range(11)},
    "map": "AP",
    "ndcg": "nDCG",
    "recip_rank": "RR",
    "Rprec": "Rprec",
    "bpref": "Bpref",
    "infAP": "infAP",
    "set_P": "SetP",
    "set_recall": "SetR",
    "set_map": "SetAP",
    "set_F": "SetF",
    "num_ret": "NumRet",
    "num_rel": "NumRel",
    "num_rel_ret": "NumRet(rel=1)",
}
# Measures that count from another grade on, by the option of the program.
OF_GRADE_2 = ("P_10", "map", "recip_rank", "Rprec", "bpref", "recall_100", "success_10")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("the program is for x86-64")
    with zipfile.ZipFile(find_anserini_jar()) as jar:
        file = Path(jar.extract(PROGRAM, tmp_path_factory.mktemp("program")))
    file.chmod(0o700)
    return file


def random_run(draw: random.Random) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, float]]]:
    """Returns judgements and hits: some queries have no hit or no relevant passage, and most hits have equal scores."""
    passages = [f"{draw.choice(['p', 'P', '-', 'é', '한', '𝒳', '10', '9'])}{number}" for number in range(400)]
    judged, hits = [], []
    for number in range(40):
        query = f"q{number}"
        grades = [0] if number % 8 == 0 else [-1, 0, 0, 0, 1, 1, 2, 3]
        judged += [(query, id, draw.choice(grades)) for id in draw.sample(passages, draw.randrange(3, 60))]
        judged.append((query, "judged", 0))
        scores = [draw.gauss(0, 9) for _ in range(draw.choice([1, 5, 300]))]
        scores += [scores[0] + 1e-9, 2e39, 3e39, -1e-50, 0.0]  # equal in float32, in pairs
        retrieved = draw.sample(passages, draw.choice([0, 1, 12, 250])) if number % 9 else []
        hits += [(query, id, draw.choice(scores)) for id in retrieved]
    hits.append(("stranger", "p1", 1.0))
    draw.shuffle(hits)
    return judged, hits


def table(rows: Iterable[tuple[object, ...]], *names: str) -> pa.Table:
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def printed_values(program: Path, folder: Path, *options: str) -> dict[tuple[str, str], float]:
    """Returns the values that the program prints, by measure and query."""
    command = [program, "-q", "-c", *options, folder / "qrels", folder / "run"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    fields = (line.split() for line in lines)
    return {(name, query): float(value) for name, query, value in fields if name in MEASURES}


def compare(expected: dict[tuple[str, str], float], values: dict[str, dict[str, float]], names: Iterable[str]) -> None:
    for name in names:
        for query, value in values[name].items():
            theirs = expected.get((name, query), 0.0)  # a query without hits has no line
            assert value == pytest.approx(theirs, abs=5.1e-5), (name, query)
        if name[:3] != "num":
            mean = sum(values[name].values()) / len(values[name])
            assert mean == pytest.approx(expected[name, "all"], abs=5.1e-5), name


@pytest.mark.parametrize("seed", range(3))
def test_each_measure_has_the_value_of_the_original_program(program: Path, seed: int, tmp_path: Path) -> None:
    judged, hits = random_run(random.Random(seed))
    (tmp_path / "qrels").write_text("".join(f"{query} 0 {id} {grade}\n" for query, id, grade in judged))
    (tmp_path / "run").write_text("".join(f"{query} Q0 {id} 1 {score!r} run\n" for query, id, score in hits))
    qrels, run = table(judged, "query_id", "corpus_id", "score"), table(hits, "query_id", "id", "score")
    queries = sorted({query for query, *_ in judged})
    for level, names in ((1, MEASURES), (2, OF_GRADE_2)):
        ours = {name: MEASURES[name] for name in names}
        if level == 2:
            ours = {
                name: f"{base}(rel=2){at}{cut}" for name in names for base, at, cut in [MEASURES[name].partition("@")]
            }
        computed = metrics_per_query(qrels, run, list(ours.values()))
        values = {name: dict(zip(queries, computed[ours[name]].tolist(), strict=True)) for name in names}
        expected = printed_values(program, tmp_path, f"-l{level}", "-m", "all_trec")
        assert {name for name, _ in expected} == set(MEASURES)
        compare(expected, values, names)
