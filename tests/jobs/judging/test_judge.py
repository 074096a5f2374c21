"""The job `judge`: its files, rounds that continue each other, its page, the Python method, and bad input."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import write_beir

from riptide import Store
from riptide.jobs.judging.judging_page import render_page

Done = Callable[..., str]
HOSTILE = "</p></article><script>alert(1)</script> 'é\x1b"
NUM_QUERIES = 20


@pytest.fixture
def store(tmp_path: Path, done: Done) -> Path:
    """A store with 30 passages and 20 queries without judgements, and the run files a.trec and b.trec next to it."""
    passages = [{"_id": f"d{n}", "title": HOSTILE, "text": f"text {n} {HOSTILE}"} for n in range(30)]
    queries = [{"_id": f"q{n:02d}", "text": f"query {n} {HOSTILE}"} for n in range(NUM_QUERIES)]
    source = write_beir(tmp_path / "raw", passages, queries, {})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    choice = random.Random(0)
    for name in ("a", "b"):
        lines = []
        for n in range(NUM_QUERIES):
            ids = choice.sample(range(30), 10)
            lines += [f"q{n:02d} Q0 d{id} {rank} {1 / rank} x\n" for rank, id in enumerate(ids, 1)]
        (tmp_path / f"{name}.trec").write_text("".join(lines))
    return tmp_path / "s"


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def answers(store: Path, rows: list[dict]) -> list[dict]:
    """Returns the verdicts of an assessor who finds every hit of the second run relevant, and no other one."""
    of_second = {tuple(line.split()[::2][:2]) for line in (store.parent / "b.trec").read_text().splitlines()}
    return [
        {
            **{name: row[name] for name in ("query_id", "id")},
            "verdict": "relevant" if (row["query_id"], row["id"]) in of_second else "not",
        }
        for row in rows
    ]


def by_number(rows: list[dict]) -> list[dict]:
    """Returns the verdicts of an assessor who finds every third passage relevant, whichever run finds it."""
    verdicts = ["not" if int(row["id"][1:]) % 3 else "relevant" for row in rows]
    return [
        {"query_id": row["query_id"], "id": row["id"], "verdict": verdict}
        for row, verdict in zip(rows, verdicts, strict=True)
    ]


def command(store: Path, *more: object, round_size: int = 10) -> tuple:
    runs = (store.parent / "a.trec", store.parent / "b.trec")
    return ("judge", *runs, "--store", store, "--folder", store.parent / "j", "--round-size", round_size, *more)


def test_rounds_continue_until_the_verdicts_are_enough(store: Path, done: Done, documented: Callable) -> None:
    folder = store.parent / "j"
    assert "rounds   after 10, 15, 23," in done(*command(store, "--plan"))
    assert not folder.exists()
    out = done(*command(store, "--all-pairs"))
    assert "too few verdicts: 10 pairs of the first round are pending" in out
    pending, everything = read_lines(folder / "pairs.jsonl"), read_lines(folder / "all-pairs.jsonl")
    assert list(pending[0]) == ["query_id", "id", "query", "title", "text"]
    assert all(row in everything for row in pending)
    assert f"{len(everything):,} ranked differently" in out

    part = write_lines(store.parent / "part.jsonl", answers(store, pending[:6]))
    assert "4 pairs of the first round are pending" in done(*command(store, "--verdicts", part))
    assert read_lines(folder / "pairs.jsonl") == pending[6:]
    rest = write_lines(store.parent / "rest.jsonl", answers(store, pending[6:]))
    lines = done(*command(store, "--verdicts", rest))
    report = json.loads((folder / "judging.json").read_text())
    of_next_round = write_lines(store.parent / "next.jsonl", answers(store, read_lines(folder / "pairs.jsonl")[:2]))
    lines = done(*command(store, "--verdicts", of_next_round))
    assert json.loads((folder / "judging.json").read_text())["num_needed"] == report["num_needed"] - 2
    repeated = done(*command(store, "--verdicts", rest, of_next_round, part))
    warning, _, after_warning = repeated.partition("\n")
    assert after_warning == lines, "the same verdicts again change nothing"
    documented("Judging", "`--verdicts` without a further verdict", warning, 0)
    for _ in range(10):
        assert done(*command(store)) == lines, "a call without further verdicts repeats the report"
        if "enough: " in lines:
            break
        rows = read_lines(folder / "pairs.jsonl")
        lines = done(*command(store, "--verdicts", write_lines(part, answers(store, rows))))
    report = json.loads((folder / "judging.json").read_text())
    assert report["estimate"]["low"] > 0
    assert report["num_verdicts"] < len(everything) / 2
    assert f"enough: {store.parent}/b.trec is better" in lines


def test_runs_are_known_by_their_content(store: Path, done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other paths of the same files continue a judging; a run may be called "equal"; equal runs end with a tie."""
    folder = store.parent / "j"
    done(*command(store, "--all-pairs"))
    verdicts = write_lines(store.parent / "all.jsonl", answers(store, read_lines(folder / "all-pairs.jsonl")))
    shutil.copy(store.parent / "b.trec", store.parent / "equal")
    monkeypatch.chdir(store.parent)
    out = done("judge", "a.trec", "equal", *command(store)[3:], "--verdicts", verdicts)
    assert "enough: equal is better" in out

    rest = ("--store", store, "--folder", "tied", "--measure", "P@10", "--limit", 7)
    assert "warning: " not in done("judge", "a.trec", "b.trec", *rest, "--all-pairs"), "others are not judged"
    rows = answers(store, read_lines(Path("tied/all-pairs.jsonl")))
    for of_run in [[row for row in rows if row["verdict"] == verdict] for verdict in ("relevant", "not")]:
        for number, row in enumerate(of_run):
            row["verdict"] = "relevant" if number < 9 else "not"  # as many hits of each run
    write_lines(verdicts, rows)
    out = done("judge", "a.trec", "b.trec", *rest, "--verdicts", verdicts)
    assert out.endswith("all pairs are judged: the runs do not differ\n")


def test_a_model_makes_the_interval_shorter_in_python_too(
    store: Path, done: Done, refused: Callable[..., str], documented: Callable
) -> None:
    done(*command(store, "--all-pairs", round_size=60))
    folder = store.parent / "j"
    everything = by_number(read_lines(folder / "all-pairs.jsonl"))
    people = write_lines(store.parent / "people.jsonl", everything)
    values = {"relevant": 0.9, "not": 0.1}
    model = write_lines(
        store.parent / "model.jsonl", [row | {"verdict": values[row["verdict"]]} for row in everything[1:]]
    )
    by_people = write_lines(store.parent / "part.jsonl", by_number(read_lines(folder / "pairs.jsonl")))
    done(*command(store, "--verdicts", by_people, round_size=60))
    late = refused(*command(store, "--model-verdicts", model, round_size=60))
    documented("Judging", "verdicts of a model after those of people", late, 1)
    alone = json.loads((folder / "judging.json").read_text())["estimate"]

    runs = [str(store.parent / f"{name}.trec") for name in "ab"]
    options = {"round_size": 60, "folder": store.parent / "python"}
    first = Store(store).judge(*runs, model_verdicts=[str(model)], **options)
    assert (first.estimate, first.num_needed, first.num_pending, first.decision) == (None, None, 60, None)
    by_people = write_lines(store.parent / "part.jsonl", by_number(read_lines(store.parent / "python/pairs.jsonl")))
    judging = Store(store).judge(*runs, verdicts=[str(by_people)], **options)
    assert (judging.num_verdicts, judging.num_model_verdicts) == (60, len(everything) - 1)
    assert judging.estimate is not None
    assert judging.estimate.high - judging.estimate.low < 0.9 * (alone["high"] - alone["low"])
    other = [*command(store)[:-3], store.parent / "other"]
    half = write_lines(store.parent / "half.jsonl", [everything[0] | {"verdict": 0.5}])
    done(*other, "--model-verdicts", model, half)
    changed = write_lines(store.parent / "changed.jsonl", [everything[0] | {"verdict": 0.9}])
    assert "contradicts that of" in refused(*other, "--model-verdicts", changed), "0.5 is a probability, and no skip"
    assert 0.5 in [row["verdict"] for row in read_lines(store.parent / "other/model-verdicts.jsonl")]
    done(*other, "--verdicts", people, "--model-verdicts", model, half)
    written = store.parent / "other/model-verdicts.jsonl"
    written.write_text(written.read_text().replace("0.5", "0.6"))
    documented("Judging", "verdicts of a model that were edited", refused(*other), 1)


def test_the_page_shows_the_best_passage_of_a_document(
    tmp_path: Path, done: Done, refused, documented: Callable
) -> None:
    """That of the run that ranks the document higher; d0 is "one two three four five six", two words per passage."""
    passages = [{"_id": "d0", "text": "one two three four five six"}, {"_id": "d1", "text": "seven eight"}]
    source = write_beir(tmp_path / "raw", passages, [{"_id": "q", "text": "x"}], {})
    done("import_corpus", "--store", tmp_path / "s", "--source", source, "--split-words", 2, "--overlap", 0)
    hits = {"a": ["d0#1", "d1#0", "gone"], "b": ["d1", "d0#2"], "c": ["d1", "d0"], "far": ["MED-1", "MED-2"]}
    for name, ids in hits.items():
        lines = [f"q Q0 {id} {rank} {1 / rank} x\n" for rank, id in enumerate(ids, 1)]
        (tmp_path / f"{name}.trec").write_text("".join(lines))

    def texts(*names: str) -> dict[str, str]:
        folder = tmp_path / "-".join(names)
        files = [tmp_path / f"{name}.trec" for name in names]
        out = done("judge", *files, "--store", tmp_path / "s", "--folder", folder)
        [line] = [line for line in out.splitlines() if "shown without text" in line] if "a" in names else [""]
        assert not line or line.startswith("warning: 1 of 3 passages (such as 'gone')")
        if names == ("a", "b"):
            documented("Judging", "passages that the corpus lacks", line, 0)
        return {row["id"]: row["text"] for row in read_lines(folder / "pairs.jsonl")}

    assert texts("a", "b") == texts("b", "a") == {"d0": "three four", "d1": "seven eight", "gone": ""}
    assert texts("a", "c")["d0"] == "three four"
    line = refused("judge", tmp_path / "a.trec", tmp_path / "far.trec", "--store", tmp_path / "s")
    documented("Judging", "a run over another corpus", line, 1)


def test_the_page_escapes_texts_and_its_script_keeps_ids(tmp_path: Path) -> None:
    """The ids survive the page; its script runs in node with a document of two pairs, and saves their verdicts."""
    pairs = [{"query_id": HOSTILE, "id": f"d{n}", "query": HOSTILE, "title": "", "text": HOSTILE} for n in (1, 2)]
    page = render_page(pairs, "x")
    assert page.count("<script") == 1
    assert "script-src 'sha256-" in page
    assert "\x1b" not in page
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    script = page.split("<script>")[1].split("</script>")[0]
    ids = json.dumps([json.dumps([row["query_id"], row["id"]]) for row in pairs])
    (tmp_path / "page.js").write_text(
        f"""
const listeners = {{}};
const effects = [];
const element = () => {{
  const events = {{ click: (event) => effects.push(link) }};
  const link = {{
    dataset: {{ verdict: "relevant" }}, setAttribute() {{}}, blur() {{ effects.push("blurred"); }},
    addEventListener: (name, action) => {{ events[name] = action; }}, click: (event) => events.click(event),
  }};
  return link;
}};
const button = element();
const saveButton = element();
URL.createObjectURL = () => "";
URL.revokeObjectURL = () => {{}};
const shown = {ids}.map((pair) => ({{ dataset: {{ pair }} }}));
const document = {{
  querySelectorAll: (query) => (query === "article" ? shown : [button]),
  querySelector: () => ({{ dataset: {{ identity: "x" }} }}), createElement: element,
  getElementById: (id) => (id === "save" ? saveButton : element()),
  addEventListener: (name, action) => {{ listeners[name] = action; }},
}};
const window = {{ scrollTo() {{}} }};
{script}
const press = (key, repeat) => listeners.keydown({{ key, repeat, preventDefault() {{}} }});
button.click({{ detail: 1 }});
for (const key of ["ArrowLeft", "N", "x"]) press(key, false);
press("r", true);
press("s", false);
saveButton.click({{ detail: 0 }});
process.stdout.write(lines() + JSON.stringify(effects.map((each) => each.download || each)));
"""
    )
    done = subprocess.run([node, tmp_path / "page.js"], capture_output=True, text=True, check=True, timeout=60)
    *lines, events = done.stdout.splitlines()
    blurred, name = json.loads(events)
    assert blurred == "blurred", "a click of the mouse leaves no focus that the space bar would press"
    assert re.fullmatch(r"verdicts-x-\d{8}-\d{6}\.jsonl", name), "no two saved files have one name"
    assert [json.loads(line) for line in lines] == [
        {"query_id": HOSTILE, "id": "d1", "verdict": "not"},
        {"query_id": HOSTILE, "id": "d2", "verdict": "skip"},
    ]


def test_bad_input_is_refused(store: Path, done: Done, refused: Callable[..., str], documented: Callable) -> None:
    done(*command(store))
    rows = answers(store, read_lines(store.parent / "j/pairs.jsonl"))
    file = store.parent / "bad.jsonl"

    def state(case: str, *arguments: object) -> None:
        documented("Judging", case, refused(*arguments), 1)

    with_file = command(store, "--verdicts", file)
    write_lines(file, [rows[0], rows[1] | {"id": "d99"}])
    state("a verdict on an unknown pair", *with_file)
    rows[0]["verdict"] = "not"
    write_lines(file, [rows[0], rows[0] | {"verdict": "relevant"}])
    state("two verdicts that contradict each other", *with_file)
    write_lines(file, [rows[0] | {"verdict": "maybe"}])
    state("a verdict that is no verdict", *with_file)
    state("a model's verdict that is no verdict", *command(store, "--model-verdicts", file))
    file.write_text("relevant\n")
    state("a file of verdicts that is not JSON", *with_file)
    state("a folder of another judging", *command(store, "--seed", 1))
    state("`--folder` with other files", *command(store)[:5], "--folder", store.parent / "raw")
    state("`--measure` that a sample cannot estimate", *command(store, "--measure", "nDCG@10"))
    state("the same run twice", "judge", *(2 * [store.parent / "a.trec"]), "--store", store)
    other = store.parent / "other.trec"
    other.write_text("x1 Q0 d1 1 1.0 x\n")
    state("a run of other queries", "judge", store.parent / "a.trec", other, "--store", store)
    shutil.copy(store.parent / "a.trec", other)
    state("two runs with the same hits", "judge", store.parent / "a.trec", other, "--store", store)
    assert read_lines(store.parent / "j/pairs.jsonl") != [], "nothing is lost"
    (store.parent / "j/judging.json").write_text("[" * 20_000)
    state("a damaged report in the folder of a judging", *command(store))
