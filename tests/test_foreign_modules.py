"""Other modules named like riptide's packages: `import riptide` names them in one line, and a job as a file runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# What pip's editable install does by default: a finder after those for the path, whose folders are found first.
EDITABLE = f"""
import importlib.util, sys
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        for file in (Path({str(REPOSITORY)!r}, name, "__init__.py"), Path({str(REPOSITORY)!r}, name + ".py")):
            if path is None and file.exists():
                return importlib.util.spec_from_file_location(name, file)

sys.path[:] = ["", *(entry for entry in sys.path if entry not in ("", {str(REPOSITORY)!r}))]
sys.meta_path.append(Finder)
"""


def python(*arguments: object, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder; `path` is the first folder of PYTHONPATH."""
    paths = [str(folder) for folder in (path, REPOSITORY) if folder]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("package", ["retriever", "indexing", "serve", "jobs"])
def test_import_riptide_names_a_module_that_hides_a_package(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("print('this module ran')")
    (tmp_path / "program.py").write_text("import riptide; riptide.Store")
    done = python(tmp_path / "program.py", cwd=tmp_path)
    expected = (
        f"ImportError: {tmp_path / package}.py hides riptide's package {package} ({REPOSITORY / package}): rename it, "
        "or take its folder off the path of Python (the folder of the program, PYTHONPATH)"
    )
    assert (done.returncode, done.stderr.splitlines()[-1], done.stdout) == (1, expected, "")


@pytest.mark.parametrize("folder", ["indexing", "jobs"])
def test_a_folder_hides_a_package_of_an_editable_install(tmp_path: Path, folder: str) -> None:
    """A folder without __init__.py is found as a namespace package. Only what is a part of `jobs` needs that one."""
    (tmp_path / folder).mkdir()
    if folder == "jobs":
        done = python("-c", f"{EDITABLE}import riptide; riptide.Client; riptide.exact_search", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    done = python("-c", f"{EDITABLE}import riptide; print(riptide.Store)", cwd=tmp_path)
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: {tmp_path / folder} hides riptide's package {folder} ({REPOSITORY}")


def test_a_program_in_the_folder_above_a_clone_finds_the_installed_project(tmp_path: Path) -> None:
    """As `make install` installs it. The folder of the clone has no __init__.py."""
    (tmp_path / "riptide").mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import riptide; riptide.Store; print(riptide.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == (f"{REPOSITORY / 'riptide.py'}\n", "")


def test_a_job_as_a_file_uses_the_packages_beside_it(tmp_path: Path) -> None:
    """Even if modules of the same names are first on PYTHONPATH."""
    for package in ("jobs", "indexing", "retriever"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise SystemExit('the wrong {package}')")
    (tmp_path / "serve.py").write_text("raise SystemExit('the wrong serve')")
    done = python(REPOSITORY / "jobs" / "search.py", "--store", "none", cwd=tmp_path, path=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/none: there is no store here; python jobs/import_corpus.py makes one\n"
