"""Threads of a job sleep while they wait for each other, unless the user's environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from riptide.jobs import verify
from riptide.jobs.commands.cli import run

assert "torch" not in sys.modules and "faiss" not in sys.modules, "OpenMP was loaded before its setting"
run(lambda options: print(os.environ["OMP_WAIT_POLICY"]), verify.Verify, ["--store", "none"])
"""


@pytest.mark.parametrize(("users", "policy"), [(None, "passive"), ("active", "active")])
def test_the_policy_is_set_before_openmp_is_loaded(users: str | None, policy: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"PYTHONPATH": str(ROOT)} | ({} if users is None else {"OMP_WAIT_POLICY": users})
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == [policy], ended.stderr
