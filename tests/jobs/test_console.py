"""The command `riptide`: its list of jobs, the three forms in which a job is started, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from riptide import jobs
from riptide.base.wording import Command
from riptide.jobs.commands import console
from riptide.jobs.commands.command_line import make_parser
from riptide.jobs.commands.steps import job_names
from riptide.jobs.common import starting
from riptide.jobs.common.job_options import Common

ROOT = Path(jobs.__file__).resolve().parents[1]
# What pip writes.
SCRIPT = "import sys\nfrom riptide.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def run(command: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with the packages of this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The console script."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"riptide": "riptide.__main__:main"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/riptide").write_text(SCRIPT)
    return tmp_path / "bin/riptide"


def test_the_list_has_every_job_once_with_the_first_line_of_its_docstring() -> None:
    assert sorted(console.command_names()) == sorted(name.replace("_", "-") for name in job_names())
    lines = console.overview_of_jobs().splitlines()
    assert max(map(len, lines)) <= 100
    assert "  build-bm25       Build a Lucene index of a corpus for BM25." in lines
    for name in console.command_names():
        [line] = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.endswith(".")
        assert '"' not in line


def test_the_list_loads_no_library(tmp_path: Path) -> None:
    statements = "import sys; from riptide.__main__ import main; main(); print(*sorted(sys.modules))"
    loaded = run(["-c", statements], tmp_path).stdout.splitlines()[-1].split()
    assert {"riptide.jobs.commands.console", "riptide"} <= {*loaded}
    assert {"numpy", "pyarrow", "torch", "ray", "yaml", "argparse"}.isdisjoint(loaded)


FORMS = {
    "script": "riptide import-corpus",
    "module": "python -m riptide import-corpus",
    "file": "python jobs/import_corpus.py",
}


@pytest.mark.parametrize("form", FORMS)
def test_commands_are_named_as_the_user_started(form: str, script: Path, tmp_path: Path) -> None:
    """From another folder, in which other things have the names of the packages."""
    command = {"script": [script, "pipeline"], "module": ["-m", "riptide", "pipeline"]}
    pipeline = command.get(form, [ROOT / "jobs/pipeline.py"])
    if form == "module":
        (tmp_path / "jobs").mkdir()
        (tmp_path / "serve.py").write_text("raise SystemExit('the wrong serve')")
    (tmp_path / "r.yaml").write_text("store: none\nsteps:\n  - import-corpus: {source: raw}\n  - verify: {}\n")
    job = FORMS[form]
    planned = run([*pipeline, "--config", "r.yaml", "--plan"], tmp_path)
    assert planned.stdout.splitlines()[1] == f"$ {job} --store none --source raw", planned.stderr
    assert planned.returncode == 1
    later = run([*pipeline, "--config", "r.yaml", "--plan", "--only", "verify"], tmp_path)
    assert later.stdout.endswith(f"there is no store here; {job} makes one\n"), later.stderr
    missing = run([*pipeline, "--config", "r.yaml", "--only", "verify"], tmp_path)
    place = "error: step 2/2 verify: " + str(tmp_path / "none")
    assert missing.stderr == f"{place}: there is no store here; {job} makes one\n"


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--version"], 0, "riptide 0."),
        ([], 0, "usage: riptide COMMAND"),
        (["build_bm25", "--help"], 0, "usage: riptide build-bm25 "),
        (["serch"], 2, "error: serch: unknown command; did you mean search or serve-search?\n"),
        (["index"], 2, "error: index: unknown command; did you mean build-index?\n"),
        (["--store", "s"], 2, "error: --store: expected a command before the options; --help lists them\n"),
        (["xyzzy"], 2, "error: xyzzy: unknown command; --help lists them\n"),
        (["completion", "csh"], 2, "error: completion csh: expected one shell: bash, zsh, fish\n"),
    ],
)
def test_what_is_no_job(arguments: list[str], status: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        console.run_command(arguments, "0.1")
        ended = 0
    except SystemExit as end:
        ended = int(end.code or 0)
    out, err = capsys.readouterr()
    assert ended == status
    assert (err or out).startswith(expected)


def test_a_job_knows_its_name_in_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    for file, argv in (
        ("/opt/bin/riptide", ["/opt/bin/riptide", "build-bm25"]),
        (str(ROOT / "riptide/__main__.py"), [str(ROOT / "riptide/__main__.py"), "build-bm25"]),
        (str(ROOT / "jobs/build_bm25.py"), ["build_bm25.py", "--store", "s"]),
    ):
        monkeypatch.setattr(main, "__file__", file, raising=False)
        monkeypatch.setattr(sys, "argv", argv)
        assert starting.runs_one_job()
        assert starting.job_name() == "build_bm25"
    command = f"run {Command('build-index', name='a')} again, riptide is"
    assert starting.COMMAND_LINE.render(command) == "run python jobs/build_index.py --name a again, riptide is"


def test_the_usage_of_another_program_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/experiment.py", "--help"])
    assert make_parser(Common, "riptide.jobs.experiments.experiment").prog == "python benchmarks/experiment.py"


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
complete=$(complete -p riptide | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$complete riptide "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    made = run(["-m", "riptide", "completion", "bash"], tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "riptide.bash").write_text(made.stdout)

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(tmp_path / "riptide.bash"), "riptide", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert completed("enc") == ["encode-corpus"]
    assert completed("encode-corpus", "--enc") == ["--encoder"]
    assert completed("encode-corpus", "--pooling", "") == ["cls", "mean", "last", "splade"]
    assert "remove" in completed("store", "")


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef riptide"), ("fish", "")])
def test_other_shells_get_a_script_with_every_command(
    shell: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console.print_completion([shell])
    out = capsys.readouterr().out
    assert out.startswith(start)
    assert [name for name in console.command_names() if name not in out] == []
