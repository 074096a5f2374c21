"""Writes one small project with riptide, with sentence-transformers and FAISS, and with Pyserini: lines and seconds.

    python benchmarks/same_project/run.py --rounds 3

Each `with_*.py` reads examples/squad (1,995 passages), makes its indexes in a new folder, searches the test queries
(100 hits), prints nDCG@10 and R@100, and prints the first three passages of a question. A line counts if it is code:
not blank, not a comment, not the docstring. Each program is a separate process, with its imports; they take turns.

Pyserini is run as its documentation says, but for the start of the JVM: the Java that is installed from PyPI lacks a
module that Pyserini requests, so a `sitecustomize` starts riptide's JVM in its processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide.retriever.model.model_folder import find_model_folder

HERE = Path(__file__).resolve().parent
PROGRAMS = ("with_riptide", "with_sentence_transformers", "with_pyserini")
QUESTION = "When did the 1973 oil crisis begin?"
START_JVM = "from riptide.indexing.lucene.java import jvm\njvm()\n"


def lines_of_code(program: Path) -> int:
    """Returns the number of lines of code of a program, without its docstring."""
    _, _, code = program.read_text(encoding="utf-8").split('"""', 2)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def run(name: str, folder: str) -> tuple[float, str]:
    """Runs a program in a new folder; returns its seconds and what it printed."""
    (start := Path(folder, "start")).mkdir()
    path = [str(ROOT)]
    if name == "with_pyserini":
        (start / "sitecustomize.py").write_text(START_JVM)
        path.append(str(start))
    (work := Path(folder, "work")).mkdir()
    arguments = [str(ROOT / "examples/squad"), str(work), str(find_model_folder(MINILM)), QUESTION]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path), "TQDM_DISABLE": "1"}
    started = time.perf_counter()
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    result = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{name}: {result.stderr[-2000:]}")
    return time.perf_counter() - started, result.stdout


def main() -> None:
    """Runs the programs in turns, and prints and writes their lines, seconds and output."""
    parser = Parser(__doc__)
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--only", list(PROGRAMS), "programs to run", choices=PROGRAMS, nargs="+")
    parser.add("--json", ROOT / "results/same_project.json", "output file")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in options.only}
    printed = {}
    for _ in range(options.rounds):
        for name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                taken, printed[name] = run(name, folder)
                seconds[name].append(taken)
    for name in options.only:
        lines, median = lines_of_code(HERE / f"{name}.py"), statistics.median(seconds[name])
        print(f"== {name}: {lines} lines, {median:.1f} s\n{printed[name]}")
    lines = {name: lines_of_code(HERE / f"{name}.py") for name in options.only}
    write_json(options.json, {"machine": cpu_name(), "lines": lines, "seconds": seconds, "printed": printed})


if __name__ == "__main__":
    main()
