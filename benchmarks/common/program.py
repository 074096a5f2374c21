"""The command line of a benchmark, and the jobs that it runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # the checkout


class Parser(argparse.ArgumentParser):
    """Reads the options of a benchmark.

    Args:
        description: The docstring of its module.
    """

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(self, name: str, default: Any, help: str, **settings: Any) -> None:
        """Adds an option. Its type is that of its default; False declares a flag, and a list takes several values.

        Args:
            name: The option, with dashes.
            default: The value if it is not given; --help shows it, unless the help names a default.
            help: What the option is.
            settings: Further arguments of `add_argument`.
        """
        if default is False:
            self.add_argument(name, action="store_true", help=help)
            return
        values = list(default) if isinstance(default, list | tuple) else [default]
        if isinstance(default, list):
            settings = {"nargs": "+", **settings}
        if default is not None:
            settings = {"type": str if not values or isinstance(values[0], str) else type(values[0]), **settings}
            names = [str(each).removeprefix(f"{ROOT}/") for each in values]
            help += "" if "default" in help else f" (default: {' '.join(names)})"
        self.add_argument(name, default=default, help=help, **settings)


def run_job(store: Path | str, name: str, *arguments: object) -> None:
    """Runs a job of this checkout on a store. Raises CalledProcessError if it fails."""
    command = [sys.executable, f"jobs/{name}.py", "--store", str(store), *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True)
