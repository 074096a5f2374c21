"""release.py: what a release is built from, the wheel in a separate environment, sums, images (without docker)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cluster_files import CLUSTER, KUBERAY, ROOT
from samples import make_passages

import riptide


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT)
    spec = importlib.util.spec_from_file_location("release", ROOT / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("install", None)


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_version_stands_in_one_place(release: ModuleType) -> None:
    assert release.read_version() == riptide.__version__
    for name in KUBERAY:
        [tag] = re.findall(r"image: &image \S+?:([\d.]+)-gpu@sha256:", (CLUSTER / name).read_text())
        assert tag == riptide.__version__, name


def git(folder: Path, *arguments: str) -> None:
    names = ("-c", "user.name=tests", "-c", "user.email=tests@example.com")
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_release_needs_a_commit_a_section_of_the_changelog_and_a_store(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    stores = tmp_path / "tests/jobs/earlier_stores"
    stores.mkdir(parents=True)
    (stores / "1.1.tar.xz").write_bytes(b"")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("## [Unreleased]\n\n## [1.2.0] - 2026-01-01\n\n## [1.1.0]\n")
    git(tmp_path, "init")
    with pytest.raises(SystemExit, match="commit these changes first"):
        release.require_release("1.1.0")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    release.require_release("1.1.0")
    with pytest.raises(SystemExit, match=r"CHANGELOG.md has no section `## \[1.3.0\]`"):
        release.require_release("1.3.0")
    with pytest.raises(SystemExit, match=r"earlier_stores/1\.2\.tar\.xz is missing: run RIPTIDE_WRITE_STORE=1"):
        release.require_release("1.2.0")


def test_sums_are_those_of_sha256sum(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other/folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    release.make_empty(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name in ("b.whl", "a.txt", ".gitignore"):
        (tmp_path / name).write_text(name)
    release.write_sums(tmp_path)
    expected = "".join(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in ("a.txt", "b.whl"))
    assert (tmp_path / "SHA256SUMS").read_text() == expected


DOCKER = """
echo "$@" >> "$LOG"
case "$3" in inspect) echo sha256:base; exit;; esac
while [ $# -gt 1 ]; do
  case "$1" in
    --metadata-file) file=$2;;
    -t) case "$2" in *-cpu) digest=1;; *) digest=2;; esac;;
  esac
  shift
done
printf '{"containerimage.digest": "sha256:%064d"}' "$digest" > "$file"
"""


def test_images_are_built_from_the_release_and_pinned(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program in docker's place notes its arguments and writes digests."""
    program(tmp_path / "bin", "docker", DOCKER)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    (tmp_path / "cluster").mkdir()
    for name in KUBERAY:
        shutil.copy(CLUSTER / name, tmp_path / "cluster" / name)
    with pytest.raises(SystemExit, match="run `make release` first"):
        release.build_images("registry.test/riptide", "9.9.0")
    (tmp_path / "dist").mkdir()
    for name in ("SHA256SUMS", "riptide-9.8.0-py3-none-any.whl"):
        (tmp_path / "dist" / name).write_text("")
    with pytest.raises(SystemExit, match=r"no release 9\.9\.0: run `make release` first"):
        release.build_images("registry.test/riptide", "9.9.0")
    (tmp_path / "dist" / "riptide-9.9.0-py3-none-any.whl").write_text("")
    release.build_images("registry.test/riptide", "9.9.0")

    images = [f"registry.test/riptide:9.9.0-{extra}@sha256:{digest:064d}" for extra, digest in (("cpu", 1), ("gpu", 2))]
    assert capsys.readouterr().out.splitlines() == images
    _, cpu, gpu = (tmp_path / "log").read_text().splitlines()
    assert "--build-arg EXTRA=cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu" in cpu
    assert "--build-arg BASE=python:3.11-slim@sha256:base" in gpu
    assert "--push" in gpu
    for name in KUBERAY:
        before, after = (CLUSTER / name).read_text(), (tmp_path / "cluster" / name).read_text()
        assert [line for line in after.splitlines() if line not in before.splitlines()] == [
            line[: line.index("registry.")] + images[1] for line in before.splitlines() if "&image" in line
        ]


@pytest.mark.parametrize("arguments", [["--image", ""], ["--images", "x"], ["x"]])
def test_a_wrong_argument_is_refused_in_one_line(release: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="expected no argument, or --image and a name"):
        release.main(arguments)


@pytest.mark.slow
def test_the_wheel_works_beside_a_users_own_modules_of_our_names(release: ModuleType, tmp_path: Path) -> None:
    """It holds every file of the packages, and its command searches, in a folder with a `serve.py` and a `jobs/`."""
    dist = tmp_path / "dist"
    release.build_packages(dist)
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if name.startswith("riptide/")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    folders = ("indexing/", "jobs/", "retriever/", "serve/")
    files = {f"riptide/{name}" if name.startswith(folders) else name for name in tracked.splitlines()}
    links = {f"riptide/{name.rstrip('/')}" for name in folders}
    assert inside == {name for name in files if name.startswith("riptide/") and name not in links}

    environment = tmp_path / "environment"
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    python = environment / "bin/python"
    subprocess.run([*uv, "pip", "install", "-q", "--no-deps", "--python", python, wheel], check=True)
    packages = python.parents[1] / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    # The dependencies are those of this environment; its own riptide, which is editable, is not among them.
    (packages / "dependencies.pth").write_text(f"{site.getsitepackages()[0]}\n")

    mine = tmp_path / "mine"
    (mine / "jobs").mkdir(parents=True)
    for name in ("serve.py", "jobs/__init__.py", "indexing.py"):
        (mine / name).write_text('raise RuntimeError("a module of the user")\n')
    with tarfile.open(
        ROOT / "tests/jobs/earlier_stores" / f"{riptide.__version__.rpartition('.')[0]}.tar.xz"
    ) as archive:
        archive.extractall(mine, filter="data")

    def ask(*arguments: str) -> str:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [environment / "bin/riptide", *arguments]
        done = subprocess.run(command, cwd=mine, env=variables, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert str(ROOT) not in done.stderr
        return done.stdout

    assert "search" in ask("--help")
    passage = make_passages(1)[0]  # the first one of the store
    assert passage["_id"] in ask(
        "search", "--store", "store", "--source", "bm25", "--query", passage["text"], "--k", "1"
    )
