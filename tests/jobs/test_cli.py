"""The command line of every job: recipes, exit statuses, one line for a mistake; run as a person runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import without_progress
from samples import files_of, make_passages, write_beir

from riptide.base.errors import InputError
from riptide.base.yaml_files import read_yaml
from riptide.indexing.store.store import Store
from riptide.jobs.commands import cli
from riptide.jobs.commands.steps import job_names
from riptide.jobs.import_corpus import ImportCorpus
from riptide.jobs.search import SearchJob

JOBS = Path(cli.__file__).parents[1]
NAMES = job_names()
REQUIRED: dict[str, tuple[str, ...]] = {
    "compare": ("a", "b"),
    "convert_prompts": ("--task", "t"),
    "draw": ("points",),
    "import_queries": ("--source", "s"),
    "judge": ("a", "b"),
    "pipeline": ("--config", "c.yaml"),
    "pretrain_rip": ("--backbone", "b"),
    "replay": ("requests.jsonl",),
    "reproduce": ("--table", "dptdr-3"),
    "store": ("list",),
    "train_reranker": ("--backbone", "b"),
    "train_retriever": ("--backbone", "b", "--task", "t", "--train", "all"),
    "tune_prompts": ("--backbone", "b", "--task", "t"),
}


# Runs a job, and writes the addresses on which this process and the Ray that it has started listen to a file.
LISTENING = """
import contextlib, runpy, sys
import psutil
from riptide.jobs.common import session

def connect(store, connect=session.connect):
    address = connect(store)
    root = psutil.Process()
    with open("listening", "w") as file:
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets = process.net_connections("tcp")
                print(*(each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN), sep="\\n", file=file)
    return address

session.connect = connect
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=600)


def test_jobs_run_as_plain_files_from_anywhere(tmp_path: Path) -> None:
    """Status 0 for --help with the command in it, 1 for bad input, 2 for bad usage; never a traceback."""
    helped = python(JOBS / "search.py", "--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert "riptide search --store data/squad --split test" in " ".join(helped.stdout.split())
    assert "--drop-self" in helped.stdout
    bad = python(JOBS / "search.py", "--store", tmp_path / "none", cwd=tmp_path)
    assert bad.returncode == 1
    assert bad.stderr.startswith(f"error: {tmp_path}/none: there is no store here")
    assert bad.stderr.count("\n") == 1
    usage = python(JOBS / "search.py", "--store", "x", "--split-name", "test", cwd=tmp_path)
    assert usage.returncode == 2
    assert usage.stderr == "error: --split-name: unknown option; did you mean --split?\n"
    assert "Traceback" not in usage.stderr + bad.stderr + helped.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [(), pytest.param(("--ray",), marks=pytest.mark.cluster)], ids=["here", "ray"])
def test_a_job_runs_here_or_starts_a_ray_and_is_quiet(tmp_path: Path, more: tuple[str, ...]) -> None:
    """All that a user sees of an import that fails in a worker is one line; then it works.

    A Ray that a job starts listens on loopback addresses only.
    """
    source = write_beir(tmp_path / "raw", make_passages(20))
    lines = (source / "corpus.jsonl").read_text().splitlines()
    (source / "corpus.jsonl").write_text("\n".join([*lines[:7], "nonsense", *lines[7:]]))
    command = (JOBS / "import_corpus.py", "--store", "s", "--source", "raw", "--part-size", 5, *more)
    bad = python(*command, cwd=tmp_path)
    assert bad.returncode == 1
    [line] = without_progress(bad.stderr).splitlines()
    assert line.startswith(f"error: {source}/corpus.jsonl:8: found no valid JSON")
    assert bad.stdout == ""
    (source / "corpus.jsonl").write_text("\n".join(lines))
    listening = ("-c", LISTENING) if more else ()
    good = python(*listening, JOBS / "import_corpus.py", "--store", "t", "--source", "raw", *more, cwd=tmp_path)
    assert ("runs on a private Ray on this machine (requested)\n" in good.stderr) == bool(more)
    assert (good.returncode, without_progress(good.stderr)) == (0, "")
    titles = [line.split(":")[0] for line in good.stdout.splitlines()]
    assert titles == ["import", "check ids", f"{tmp_path}/t/corpus/g0000"]
    if more:
        addresses = set((tmp_path / "listening").read_text().split())
        assert {"::ffff:127.0.0.1"} <= addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("name", NAMES)
def test_every_job_explains_itself_and_refuses_what_it_does_not_know(name: str, job, tmp_path: Path) -> None:
    helped = job(name, "--help")
    assert helped.status == 0
    assert f"riptide {name.replace('_', '-')}" in " ".join(helped.out.split())
    for option in ("--store", "--plan", "--limit"):
        assert option in helped.out or (name in ("reproduce", "serve_search") and option == "--limit")
    unknown = job(name, "--store", "x", "--nonsense", "1")
    assert (unknown.status, unknown.err) == (2, "error: --nonsense: unknown option; --help lists the options\n")
    missing = job(name)
    assert missing.status == 2
    assert re.fullmatch(r"error: [a-z-]+ is required: .*\n", missing.err)
    store = ("--store", tmp_path / "none", *REQUIRED.get(name, ()))
    outcome = job(name, *store, "--limit", 0)
    assert (outcome.status, outcome.err) == (1, "error: --limit 0: expected at least 1\n")
    assert job(name, *store, "--limit", "many").status == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", NAMES)
def test_help_has_named_groups_lines_of_a_terminal_and_no_empty_default(
    name: str, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = job(name, "--help").out.splitlines()
    start = lines.index("required:")
    headings = [line.removesuffix(":") for line in lines[start:] if line.endswith(":") and line[0] != " "]
    assert len(headings) > 1
    assert headings[-1] == "every job"
    assert "options" not in headings, "the group of an option without a heading"
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if "None" in line] == []
    assert any(line.startswith(f"    riptide {name.replace('_', '-')} ") for line in lines)


def test_help_is_printed_on_the_narrowest_terminal(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert job("store", "--help").status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("search", "--k", "ten"),
        ("build_index", "--recall", "high"),
        ("build_index", "--shards", "1.5"),
        ("import_corpus", "--format", "xml"),
        ("encode_corpus", "--encoder", "x", "--pooling", "max"),
        ("store", "destroy"),
    ],
)
def test_values_of_the_wrong_type_are_bad_usage(arguments: tuple, job, world) -> None:
    before = files_of(world.store, but=())
    outcome = job(arguments[0], "--store", world.store, *arguments[1:])
    assert outcome.status == 2
    assert arguments[-1] in outcome.err
    assert "Traceback" not in outcome.err
    assert files_of(world.store, but=()) == before


def recipe(tmp_path: Path, text: str) -> str:
    (tmp_path / "recipe.yaml").write_text(text)
    return str(tmp_path / "recipe.yaml")


def test_a_recipe_gives_values_lists_and_mappings_and_the_command_line_wins(tmp_path: Path) -> None:
    file = recipe(
        tmp_path,
        "store: /data/s\nsource: raw\npart-size: 7\nappend: true\nlimit: null\n"
        "filters:\n  year: int64\n  lang: string\n",
    )
    options = cli.parse_arguments(ImportCorpus, ["--config", file])
    expected = ImportCorpus(
        store="/data/s", source="raw", part_size=7, append=True, filters={"year": "int64", "lang": "string"}
    )
    assert options == expected
    for given in (["--part-size", "9"], ["--part-size=9"], ["--part_size", "9"]):
        assert cli.parse_arguments(ImportCorpus, ["--config", file, *given]).part_size == 9
        assert cli.parse_arguments(ImportCorpus, [*given, "--config", file]).part_size == 9
    assert not cli.parse_arguments(ImportCorpus, ["--config", file, "--no-append"]).append
    assert cli.parse_arguments(ImportCorpus, ["--config", file, "--filters", "n", "int64"]).filters == {"n": "int64"}
    assert cli.parse_arguments(ImportCorpus, [f"--config={file}"]) == expected


def test_a_recipe_with_a_list_runs_a_job(world, done, tmp_path: Path) -> None:
    metrics = "run: [exact, dense]\nmetrics:\n  - RR@10\n  - nDCG@3\n"
    file = recipe(tmp_path, f"store: {world.store}\n{metrics}json: {tmp_path}/e.json\n")
    out = done("evaluate", "--config", file)
    assert "RR@10" in out
    assert "nDCG@3" in out
    assert "dense" in out
    out = done("evaluate", "--config", file, "--run", "exact", "--overwrite")
    assert "dense" not in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("store: s\nsplitt: test\n", "unknown key 'splitt'; did you mean split?"),
        ("store: s\nxyzzy: 1\n", "unknown key 'xyzzy'; known are query, queries, split, mode, source, embeddings and "),
        ("- store\n", "expected `key: value` lines, found list"),
        ("just text\n", "expected `key: value` lines, found str"),
        ("", "expected `key: value` lines, found NoneType"),
        ("store: [a\n", "not YAML"),
        ("store: s\nk: 1\nk: 2\n", "not YAML: line 3: the key k occurs twice"),
        ("store: s\nname: 2024-99-01\n", "not YAML: month must be in 1..12"),
        ("store: " + 3000 * "[", "not YAML: line 1: more than 100 levels of lists and mappings"),
        ("store: s\nname: &a [*a]\n", "not YAML: line 2: a list or mapping that contains itself"),
        (
            "a: &a [" + 999 * "x," + "x]\nb: &b [" + 999 * "*a," + "*a]\n",
            "not YAML: line 2: with aliases more than 100 levels or 1,000,000 values",
        ),
        ("store: s\nk: " + 5000 * "9", "not YAML: line 2: a number of more than 300 characters: 9999"),
        ("store: s\nk: 0x" + 5000 * "f", "not YAML: line 2: a number of more than 300 characters: 0xff"),
        ("store: s\nk: !!int ''\n", "not YAML"),
        (
            "store: s\nk: 99999999999999999999\n",
            "k: found 99999999999999999999, expected a whole number of at most 9,2",
        ),
        (f"store: s\n? {'x ' * 3000}\n: 1\n", "unknown key 'x x x"),
        ("store: s\nplan: 5\n", "plan: expected true or false, found 5"),
        ("store: s\nk: many\n", "k: "),
        ("store: s\nk: [1, 2]\n", "k: "),
        ("store: s\nmode: fuzzy\n", "mode: "),
        ("store: s\nk: 1.5\n", "k: "),
    ],
)
def test_a_bad_recipe_is_named_with_its_key(tmp_path: Path, refused, text: str, expected: str) -> None:
    file = recipe(tmp_path, text)
    line = refused("search", "--config", file)
    assert line.startswith(f"error: {file}: ")
    assert expected in line


def test_a_key_may_override_one_of_a_merged_mapping(tmp_path: Path) -> None:
    text = "one: &one {k: 1, b: 1}\ntwo: &two {<<: *one, k: 2}\nthree: {<<: *two, k: 3}\nagain: *two\n"
    assert read_yaml(recipe(tmp_path, text), "") == {
        "one": {"k": 1, "b": 1},
        "two": {"k": 2, "b": 1},
        "three": {"k": 3, "b": 1},
        "again": {"k": 2, "b": 1},
    }


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path, refused) -> None:
    assert f"{tmp_path}/none.yaml: " in refused("search", "--config", tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"store: \xff\n")
    assert f"{tmp_path}/bytes.yaml: not YAML" in refused("search", "--config", tmp_path / "bytes.yaml")
    assert "/dev/zero: more than 16,777,216 bytes" in refused("search", "--config", "/dev/zero")


@pytest.mark.parametrize("file", sorted(JOBS.glob("recipes/*.yaml")), ids=lambda file: file.name)
def test_every_recipe_fits_its_job(file: Path) -> None:
    """A recipe begins with its command, which names the job."""
    import importlib

    command = next(line for line in file.read_text(encoding="utf-8").splitlines() if "riptide " in line)
    name = command.partition("riptide ")[2].split()[0].replace("-", "_")
    module = importlib.import_module(f"riptide.jobs.{name}")
    cli.parse_arguments(cli.options_class_of(module.main), ["--config", str(file), "--store", "s"])


def test_options_have_the_defaults_that_the_help_names() -> None:
    options = cli.parse_arguments(SearchJob, ["--store", "s"])
    assert (options.mode, options.limit, options.plan) == (None, None, False)
    assert (options.split, options.k) == (None, None), "test and 1000, or with --query none and 10"


def test_the_input_error_behind_an_exception_is_found_through_causes() -> None:
    inner = InputError("the file")
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = inner
    assert cli.find_input_error(wrapped) is inner
    assert cli.find_input_error(ValueError("a mistake in the code")) is None


def test_a_mistake_in_the_code_keeps_its_traceback(world, job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Store) -> Store:
        raise ZeroDivisionError

    monkeypatch.setattr(Store, "require_not_empty", broken)
    with pytest.raises(ZeroDivisionError):
        job("verify", "--store", world.store)


@pytest.mark.parametrize(
    ("name", "arguments", "place", "is_kept"),
    [
        ("evaluate", ("--run", "exact"), "riptide.jobs.evaluate.measure_runs", False),
        ("search", ("--mode", "exact", "--query", "w1"), "riptide.jobs.search.show_hits", False),
        ("search", ("--mode", "exact", "--name", "new"), "riptide.indexing.work.local_runner.LocalRunner.run", False),
        ("import_corpus", ("--source",), "riptide.jobs.import_corpus.import_queries", True),
        (
            "mine_negatives",
            ("--split", "test", "--sources", "exact:enc"),
            "riptide.jobs.mine_negatives.SampleNegativesWork",
            True,
        ),
    ],
)
def test_a_resume_is_promised_only_if_something_is_kept(
    world,
    job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    documented,
    name: str,
    arguments: tuple,
    place: str,
    is_kept: bool,
) -> None:
    """Ctrl-C where a job measures or searches, before its first part, and after its first artifact."""

    def interrupted(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    if name == "import_corpus":
        outcome = job(name, "--store", tmp_path / "new", *arguments, world.source)
    else:
        outcome = job(name, "--store", world.store, *arguments)
    line = "error: interrupted; run the same command again to resume\n" if is_kept else "error: interrupted\n"
    assert (outcome.status, outcome.err) == (130, line)
    if name == "evaluate":
        documented("Stores", "an evaluation that SIGINT ends, which keeps nothing", outcome.err, 130)


def test_jobs_run_in_a_locale_without_utf_8(tmp_path: Path, done, documented) -> None:
    """Files are UTF-8 in every locale; other characters than those of the terminal are printed as escapes."""
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run_in_ascii(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "riptide", *map(str, arguments)]
        return subprocess.run(command, env=variables, cwd=JOBS.parent, capture_output=True, text=True, timeout=600)

    (tmp_path / "raw.jsonl").write_text('{"id": "ä1", "title": "Škoda", "text": "ship 船"}\n', encoding="utf-8")
    imported = run_in_ascii("import-corpus", "--store", tmp_path / "s", "--source", tmp_path / "raw.jsonl")
    assert (imported.returncode, imported.stderr) == (0, "")
    done("build_bm25", "--store", tmp_path / "s")
    search = ("search", "--store", tmp_path / "s", "--source", "bm25", "--query")
    found = run_in_ascii(*search, "ship")
    assert (found.returncode, found.stderr) == (0, "")
    assert "\\xe41  \\u0160koda" in found.stdout
    assert "ä1  Škoda" in done(*search, "ship")
    refused = run_in_ascii(*search, "船")
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: \\u8239: expected ASCII, as the locale of this process has the encoding ascii; set the environment "
        "variable PYTHONUTF8=1 for texts in UTF-8\n"
    )
    documented("Searching", "a query with other characters than those of the locale", refused.stderr, 1)
