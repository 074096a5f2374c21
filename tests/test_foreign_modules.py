"""A user's modules named as packages of riptide hide none of them, in each way in which riptide is found."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("retriever", "indexing", "serve", "jobs")

# What pip's editable install does by default: a finder after those for the path, whose folders are found first.
EDITABLE = f"""
import importlib.util, sys
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = Path({str(REPOSITORY)!r}, name, "__init__.py")
        if path is None and file.exists():
            return importlib.util.spec_from_file_location(name, file)

sys.path[:] = ["", *(entry for entry in sys.path if entry not in ("", {str(REPOSITORY)!r}))]
sys.meta_path.append(Finder)
"""
# Uses each of the four packages, and the user's modules.
PROGRAM = """
import riptide, riptide.__main__
riptide.Client, riptide.Encoder, riptide.Store, riptide.exact_search
import indexing, jobs, serve
print(riptide.__file__, riptide.Store.__module__, indexing.OWN, jobs.OWN, serve.OWN)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's modules: two files, a package and a folder without __init__.py."""
    for name in ("serve.py", "indexing.py", "jobs/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("OWN = 1\n")
    (tmp_path / "retriever").mkdir()
    return tmp_path


def python(*arguments: object, cwd: Path, path: str = "") -> str:
    """Returns what Python prints in a folder; `path` is PYTHONPATH."""
    command = [sys.executable, *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def use_both(folder: Path, first: str = "", path: str = "") -> str:
    """Runs PROGRAM in the folder, after other statements; returns the folder in which riptide was found."""
    file, module, *values = python("-c", first + PROGRAM, cwd=folder, path=path).split()
    assert (module, values) == ("riptide.jobs.api.python_store", ["1"] * 3)
    return str(Path(file).parents[1])


def test_a_users_modules_do_not_hide_those_of_a_checkout(folder: Path) -> None:
    assert use_both(folder, path=f"{folder}{os.pathsep}{REPOSITORY}") == str(REPOSITORY)
    assert use_both(folder, first=EDITABLE) == str(REPOSITORY)


def test_a_checkout_without_links_has_the_same_modules(folder: Path, tmp_path: Path) -> None:
    """As in an archive that was unpacked without links, and in a working directory that Ray packs (.rayignore)."""
    checkout = tmp_path / "checkout"
    (checkout / "riptide").mkdir(parents=True)
    own = [REPOSITORY / "riptide" / name for name in ("base", "telemetry")]
    for path in [*(REPOSITORY / "riptide").glob("*.py"), *own]:
        (checkout / "riptide" / path.name).symlink_to(path)
    for package in PACKAGES:
        (checkout / package).symlink_to(REPOSITORY / package)
    assert use_both(folder, path=str(checkout)) == str(checkout)
    version = python(checkout / "riptide" / "__main__.py", "--version", cwd=folder)
    assert version == python("-m", "riptide", "--version", cwd=folder, path=str(checkout))


@pytest.mark.slow
def test_a_wheel_has_one_package_with_all_files(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("riptide", *PACKAGES):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("riptide-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    listed = ["git", "ls-files", *PACKAGES, "riptide/base", "riptide/process", "riptide/telemetry"]
    files = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    own = {f"riptide/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    assert names == own | {f"riptide/{file.removeprefix('riptide/')}" for file in files}
    assert use_both(folder, path=str(tmp_path / "site")) == str(tmp_path / "site")


def test_a_program_in_the_folder_above_a_clone_finds_the_installed_project(tmp_path: Path) -> None:
    """As `make install` installs it. The folder of the clone has no __init__.py."""
    (tmp_path / "riptide").mkdir()
    told = python("-c", "import riptide; riptide.Store; print(riptide.__file__)", cwd=tmp_path)
    assert told == f"{REPOSITORY / 'riptide/__init__.py'}\n"


def test_a_job_as_a_file_uses_the_packages_beside_it(tmp_path: Path) -> None:
    """Even if modules of the same names are first on PYTHONPATH."""
    for package in ("riptide", *PACKAGES):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise SystemExit('the wrong {package}')")
    command = [sys.executable, REPOSITORY / "jobs" / "search.py", "--store", "none"]
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/none: there is no store here; python jobs/import_corpus.py makes one\n"


def test_the_public_names_are_all_that_riptide_shows() -> None:
    told = python("-c", "import riptide; riptide.Store; print(dir(riptide) == sorted(riptide.__all__))", cwd=REPOSITORY)
    assert told == "True\n"


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_installation_compiles_packages_where_processes_write_no_bytecode(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    install = importlib.import_module("install")
    monkeypatch.setattr(sys, "dont_write_bytecode", is_lost)
    options = install.uv_options({"find-links": "a b"})
    assert options[:4] == ["--find-links", "a", "--find-links", "b"]
    assert ("--compile-bytecode" in options) == is_lost
