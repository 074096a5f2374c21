"""What a job does not need, it does not import: each case runs in a fresh process and reads sys.modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import write_beir

ROOT = Path(__file__).resolve().parents[2]
# Importing one of them takes from 0.1 s (boto3, faiss) to 1 s (torch).
MODELS = ("torch", "transformers", "tokenizers", "sentence_transformers", "datasets")
HEAVY = (*MODELS, "mteb", "ray", "faiss", "boto3", "matplotlib", "scipy.stats", "pyarrow.dataset", "fastapi")

# Statements -> modules that must not be loaded after them.
IMPORTS = {
    "import riptide.base.errors": (*HEAVY, "numpy", "pyarrow"),
    "import riptide.indexing.store.store": HEAVY,
    "from riptide import Client, Corpus, EncoderOptions, Hits, Store, exact_search": HEAVY,
    "from riptide import Encoder": ("mteb", "ray", "faiss"),
    "import riptide.retriever.encoding.mteb_encoder": ("mteb", "ray", "faiss"),
    "import riptide.jobs.convert_prompts": HEAVY,
    "import riptide.jobs.import_corpus": HEAVY,
    "import riptide.jobs.import_queries": HEAVY,
    "import riptide.jobs.build_bm25": HEAVY,
    "import riptide.jobs.search": HEAVY,
    "import riptide.jobs.evaluate": HEAVY,
    "import riptide.jobs.compare": HEAVY,
    "import riptide.jobs.judge": HEAVY,
    "import riptide.jobs.draw": HEAVY,
    "import riptide.jobs.migrate": HEAVY,
    "import riptide.jobs.store": HEAVY,
    "import riptide.jobs.verify": HEAVY,
    "import riptide.jobs.pipeline": HEAVY,
    "import riptide.jobs.reproduce": HEAVY,
    "import riptide.jobs.mine_negatives": HEAVY,
    "import riptide.jobs.encode_corpus": HEAVY,
    "import riptide.jobs.serve_search": HEAVY,
    "import riptide.jobs.train_retriever": HEAVY,
    "import riptide.jobs.tune_prompts": HEAVY,
    "import riptide.jobs.train_reranker": HEAVY,
    "import riptide.jobs.pretrain_rip": HEAVY,
    "import riptide.jobs.fit_topics": (*HEAVY, "tomotopy"),
    "import riptide.indexing.topics.topics_reader, riptide.retriever.topics.model": (*HEAVY, "tomotopy"),
    "import riptide.jobs.build_index": tuple(name for name in HEAVY if name != "faiss"),
}


def loaded_modules(statements: str, folder: Path) -> set[str]:
    """Runs statements in a fresh process, in `folder`; returns the names of the modules that it has loaded."""
    script = f"{statements}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout.splitlines()[-1]))


# Command of a job on a small store -> modules that must not be loaded after it. NumPy and pyarrow may.
WITHOUT_RAY = (*MODELS, "ray", "faiss", "boto3", "matplotlib", "pyarrow.dataset", "fastapi")
COMMANDS = {
    ("evaluate", "--store", "s", "--run", "a.trec", "--json", "one.json"): (*WITHOUT_RAY, "scipy.stats"),
    ("evaluate", "--store", "s", "--run", "a.trec", "b.trec", "--json", "two.json"): WITHOUT_RAY,
    ("compare", "a.trec", "b.trec", "--store", "s", "--json", "c.json", "--html", "c.html"): WITHOUT_RAY,
    ("judge", "a.trec", "b.trec", "--store", "s", "--folder", "j"): (*WITHOUT_RAY, "scipy.stats"),
    ("store", "list", "--store", "s"): (*WITHOUT_RAY, "scipy.stats"),
    ("verify", "--store", "s"): (*WITHOUT_RAY, "scipy.stats"),
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_an_import_loads_only_what_it_needs(statement: str, tmp_path: Path) -> None:
    loaded = loaded_modules(statement, tmp_path)
    assert sorted(loaded.intersection(IMPORTS[statement])) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Path:
    """A folder with a store `s` of three passages and two judged queries, and two TREC files."""
    root = tmp_path_factory.mktemp("imports")
    passages = [{"_id": f"d{n}", "text": "x"} for n in range(3)]
    queries = [{"_id": f"q{n}", "text": "x"} for n in range(2)]
    source = write_beir(root / "raw", passages, queries, {"test": [("q0", "d0", 1), ("q1", "d1", 1)]})
    assert call_job("import_corpus", "--store", root / "s", "--source", source) == 0
    (root / "a.trec").write_text("q0 Q0 d0 1 0.5 a\nq1 Q0 d1 1 0.5 a\n")
    (root / "b.trec").write_text("q0 Q0 d1 1 0.5 b\nq1 Q0 d2 1 0.5 b\n")
    return root


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_job_without_a_model_loads_none(command: tuple[str, ...], folder: Path) -> None:
    """The job runs to its end: a module that a function imports counts too."""
    name, *arguments = command
    start = "from riptide.jobs.commands.cli import options_class_of, run"
    script = f"{start}\nfrom jobs.{name} import main\nrun(main, options_class_of(main), {arguments})"
    loaded = loaded_modules(script, folder)
    assert sorted(loaded.intersection(COMMANDS[command])) == []
