"""Installs the project in the environment of this Python: `python install.py [EXTRA ...]`, for example cpu dev.

torch is installed by pip, which takes a build for CPUs where one is configured. The other packages are installed by uv,
which is four times as fast, at the versions of constraints.txt. uv does not read pip's configuration, so it gets the
indexes, links, constraints and certificates from `pip config`. Where uv cannot be installed, pip installs all.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PIP = (sys.executable, "-m", "pip")
CONSTRAINTS = ("-c", "constraints.txt")
# Installs with a path in a .pth file; otherwise `import riptide` above a clone finds the clone, as an empty package.
EDITABLE = ("--config-settings", "editable_mode=compat", "-e")
# Names in pip's configuration, whose values are separated by spaces, and the options of uv.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}


def run(*command: str, **environment: str) -> bool:
    """Runs a command and returns whether it succeeds. Its output is printed only if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(f"{shlex.join(command)}: failed\n{done.stdout}", file=sys.stderr)
    return done.returncode == 0


def pip_config() -> dict[str, str]:
    """Returns pip's configuration: the values by their names, those of the environment last."""
    done = subprocess.run((*PIP, "config", "list"), cwd=ROOT, text=True, capture_output=True, check=True)
    lines = sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:"))
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, _, value in pairs}


def uv_options(config: dict[str, str]) -> list[str]:
    """Returns the options of `uv pip install` that stand for pip's configuration."""
    values = [(option, value) for name, option in OPTIONS.items() for value in config.get(name, "").split()]
    options = [word for pair in values for word in pair]
    # As pip: the best version of all indexes, and bytecode where processes would compile it again at each import.
    options += ["--index-strategy", "unsafe-best-match"]
    return [*options, "--compile-bytecode"] if sys.dont_write_bytecode else options


def main() -> None:
    if unknown := [word for word in sys.argv[1:] if not word.isalnum()]:
        sys.exit(f"{__doc__.strip()}\n\nerror: {unknown[0]}: expected the name of an extra of pyproject.toml")
    started = time.monotonic()
    project = f".[{','.join(sys.argv[1:])}]" if sys.argv[1:] else "."
    print(f"installs {project} and its packages in {sys.prefix}: 3 GB, a minute or two", flush=True)
    if not run(*PIP, "install", "-q", *CONSTRAINTS, "torch==2.13.0"):
        sys.exit(1)
    config = pip_config()
    certificate = {"SSL_CERT_FILE": config["cert"]} if "cert" in config else {}
    uv = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *uv_options(config))
    by_uv = run(*PIP, "install", "-q", *CONSTRAINTS, "uv") and run(*uv, *CONSTRAINTS, *EDITABLE, project, **certificate)
    if not by_uv:
        print("uv cannot be used here; pip installs the packages, which takes longer", flush=True)
        if not run(*PIP, "install", "-q", *CONSTRAINTS, *EDITABLE, project):
            sys.exit(1)
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
