"""--optimizer: what it changes in the configuration of each training job, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.store.store import Store

Done = Callable[..., str]


@pytest.mark.parametrize(("form", "kind"), [(TUNE, "prompts"), (RERANK, "models"), (RIP, "models")])
def test_adafactor_is_part_of_the_configuration(
    world, mined: Store, done: Done, refused: Done, form: tuple, kind: str
) -> None:
    line = refused(*command(form, world, "other", "--steps", 1, "--optimizer", "adafactor", "--zero", 1))
    assert "--optimizer adafactor --zero 1: Adafactor needs the rows and columns of whole matrices" in line
    assert "give --zero 0, or leave it out, or --optimizer adamw" in line
    assert mined.names(kind) == mined.incomplete_keys() == []
    done(*command(form, world, "default", "--steps", 1, "--optimizer", "adamw"))
    assert {"optimizer", "parameter_scale"}.isdisjoint(mined.open(kind, "default").config["loop"])
    ask = command(form, world, "adafactor", "--steps", 2, "--optimizer", "adafactor")
    assert "a checkpoint of " in done(*ask, "--plan")
    done(*ask)
    loop = mined.open(kind, "adafactor").config["loop"]
    expected = {"optimizer": "adafactor", "parameter_scale": True, "weight_decay": 0.0, "lr": 1e-3}
    assert loop.items() >= expected.items()
    line = refused(*command(form, world, "adafactor", "--steps", 2, "--lr", "1e-3"))
    assert "loop.optimizer" in line
