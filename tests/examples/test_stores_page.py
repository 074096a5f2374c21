"""docs/stores.md: its commands run in order, and leave the artifacts of which the page speaks."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from indexing.store.store import Store

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_commands_of_the_page_run(
    tmp_path: Path, call_job: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(REPOSITORY / "examples/own_data", examples / "own_data")
    (examples / "backbone").symlink_to(REPOSITORY / "examples/backbone")
    table = (examples / "own_data/packages.csv").read_text(encoding="utf-8").splitlines()
    more = [table[0], *(f"{line.split(',')[0]}-next,{line.partition(',')[2]}" for line in table[1:4])]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/more-packages.csv").write_text("\n".join(more), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs/stores.md").read_text(encoding="utf-8")
    keys: dict[str, list[str]] = {}
    for chapter in text.split("\n## "):
        for block in re.findall(r"```bash\n(.*?)```", chapter, re.DOTALL):
            for command in block.splitlines():
                _, job, *arguments = shlex.split(command)
                assert call_job(job.replace("-", "_"), *arguments) == 0, (command, capsys.readouterr().err)
        keys[chapter.partition("\n")[0]] = Store("data/shared").keys()
    before = ["bm25/bm25/g0000", "corpus/g0000"]
    assert keys["Removing"] == [*before, "embeddings/small/g0000"]
    assert keys["Changing the encoder"] == [*before, "embeddings/minilm/g0000"]
    assert keys["Undoing an append"] == keys["Changing the encoder"]
    assert "removed embeddings/minilm/g0001" in capsys.readouterr().out
