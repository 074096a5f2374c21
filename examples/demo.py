"""Shows riptide on 1,995 SQuAD passages: keywords, vectors, a kill, a trained prompt, a server. `make demo` runs it.

    python examples/demo.py [STORE]

Every step is a job that you can run yourself; the demo prints its command. A second run finds the work done.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from riptide import Client, Corpus, Queries, Store, __version__
from riptide.indexing.search.runs import read_run
from riptide.jobs.commands.console import run_command

ROOT = Path(__file__).resolve().parents[1]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
QUESTION = "When did the 1973 oil crisis begin?"
CHAT = "User: Which animals live in the Amazon rainforest? Assistant: jaguar, cougar and anaconda. User: " + QUESTION
SEARCHES = ("bm25", "dense", "hybrid")
SQUAD = ROOT / "examples" / "squad"


def main() -> None:
    started = time.monotonic()
    store = sys.argv[1] if len(sys.argv) > 1 else "data/demo"
    at = ("--store", store)

    title("Passages and keywords: a first result")
    job("import-corpus", *at, "--source", "examples/squad", "--part-size", "500")
    job("build-bm25", *at)
    job("search", *at, "--mode", "bm25", "--query", QUESTION, "--k", "3")
    print(f"\n{time.monotonic() - started:.0f} s from raw files to this result")

    title("Vectors: a job that is killed resumes with the same command")
    encode = ("encode-corpus", *at, "--encoder", MODEL, "--name", "minilm")
    kill_after_first_part(Store(store), "embeddings/minilm/g0000", *encode)
    job(*encode)
    job("build-index", *at, "--embeddings", "minilm", "--factory", "IVF32,PQ48x4fs", "--shards", "4")

    title("Keywords, vectors, or both")
    squad = (*at, "--queries", "squad", "--split", "test")
    for mode in SEARCHES:
        job("search", *squad, "--mode", mode, "--k", "100", "--name", mode)
    job("evaluate", *squad, "--run", *SEARCHES)
    show_difference(Store(store))

    title("Another task over the same vectors: an assistant sends the whole chat, and its last message counts")
    train_chat(store)

    title("All of this over HTTP: one backbone, two tasks, one set of vectors")
    with served(store) as url:
        for mode in SEARCHES:
            best = Client(url).search(QUESTION, mode=mode, k=1)[0]
            print(f"{mode:7} {best.score:.3f}  {best.title}: {best.text[:70]}…")
        print(f"\n{CHAT}")
        for task in ("default", "chat"):
            titles = [hit.title for hit in Client(url).search(CHAT, mode="dense", task=task, k=5)]
            print(f"task {task:7}  {', '.join(titles)}")

    title("Now your own files")
    print(f"""
With its page, for a browser:   riptide serve-search --store {store}
What the store holds now:       riptide store list --store {store}
Your CSV, JSON or Parquet:      riptide import-corpus --store data/mine --source FILE
                                and the same steps as above; docs/data.md has examples of columns

The demo took {time.monotonic() - started:.0f} s. A second run finds its work done.""")


def train_chat(store: str) -> None:
    """Trains a prompt for queries that are chats, whose last message counts; measures without it and with it."""
    print(f"A query is a chat in which the user changes the subject: {CHAT}")
    at, folder = ("--store", store), Path(f"{store}-raw") / "chat"
    write_chat(folder)
    job("import-queries", *at, "--source", str(folder), "--queries", "chat")
    # One core: two that other programs use too wait for each other in each layer, and take many times as long.
    prompt = ("--sides", "query", "--length", "16", "--lr", "0.05", "--batch", "12", "--steps", "40", "--cpus", "1")
    job("tune-prompts", *at, "--task", "chat", "--queries", "chat", "--negatives", "none", "--backbone", MODEL, *prompt)
    chat = (*at, "--queries", "chat", "--split", "test")
    search = ("search", *chat, "--source", "exact:minilm", "--k", "100", "--name")
    job(*search, "without-prompt")
    job(*search, "with-prompt", "--task", "chat")
    job("evaluate", *chat, "--run", "without-prompt", "with-prompt")


def write_chat(folder: Path) -> None:
    """Writes chats of a SQuAD question, its answer, and a question about another article, whose passage is relevant.

    The questions of `train` and of `test` are about different articles.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    titles = {row["_id"]: row["title"] for row in read_lines(SQUAD / "corpus.jsonl.gz")}
    questions = {row["_id"]: row for row in read_lines(SQUAD / "queries.jsonl.gz")}
    for split, count in (("train", 2000), ("test", 1000)):
        lines = (SQUAD / "qrels" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
        judged = [line.split("\t")[:2] for line in lines]
        with open(folder / f"queries.{split}.jsonl", "w", encoding="utf-8") as file:
            for query, passage in draw.sample(judged, count):
                first, answer = query, passage
                while titles[answer] == titles[passage]:
                    first, answer = draw.choice(judged)
                text, reply = questions[first]["text"], questions[first]["metadata"]["answers"][0]
                chat = f"User: {text} Assistant: {reply}. User: {questions[query]['text']}"
                row = {"query": chat, "query_id": query, "relevant": passage}
                file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a compressed file of JSON lines."""
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def title(text: str) -> None:
    """Prints the title of a chapter."""
    print(f"\n\n== {text}", flush=True)


def job(*arguments: str) -> None:
    """Runs a job in this process, and exits if it fails."""
    show(arguments)
    run_command(arguments, __version__)


def show(arguments: Sequence[str]) -> None:
    """Prints a job as a command."""
    print(f"\n$ riptide {shlex.join(arguments)}", flush=True)


def kill_after_first_part(store: Store, key: str, *arguments: str) -> None:
    """Starts a job in a process, which it kills when the artifact has a part; does nothing if the artifact exists."""
    folder = Path(store.url) / key
    if (folder / "manifest.json").exists():
        return
    show(arguments)
    with subprocess.Popen([sys.executable, "-m", "riptide", *arguments], cwd=ROOT) as process:
        while process.poll() is None and not list(folder.glob("part-*.json")):
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
            print("Killed. The same command again:")


def show_difference(store: Store) -> None:
    """Prints a question whose passage hybrid search finds first, while keywords and vectors rank it lower."""
    queries, corpus = Queries.open(store, "squad"), Corpus.open(store)
    judged = queries.qrels("test")
    relevant = dict(zip(judged["query_id"].to_pylist(), judged["corpus_id"].to_pylist(), strict=True))
    ranks = {name: ranks_of(relevant, store, name) for name in SEARCHES}
    best = [query for query, rank in ranks["hybrid"].items() if rank == 1]
    query = max(best, key=lambda query: min(ranks["bm25"].get(query, 0), ranks["dense"].get(query, 0)))
    [passage] = corpus.passages(corpus.rows_of([relevant[query]]))
    print(f"\n{dict(zip(*queries.split('test'), strict=True))[query]}")
    print(f"  {passage.title}: {passage.text[:90]}…")
    print("  rank of this passage: " + ", ".join(f"{ranks[name][query]} by {name}" for name in SEARCHES))


def ranks_of(relevant: dict[str, str], store: Store, run: str) -> dict[str, int]:
    """Returns the rank, from 1, of the relevant passage of each query that has it among its hits."""
    ranks, rank, last = {}, 0, ""
    for hits in read_run(store.open("runs", run)):
        for query, id in zip(hits["query_id"].to_pylist(), hits["id"].to_pylist(), strict=True):
            rank = rank + 1 if query == last else 1
            last = query
            if relevant[query] == id:
                ranks[query] = rank
    return ranks


@contextlib.contextmanager
def served(store: str) -> Iterator[str]:
    """Serves the store while the block runs; provides the address. `--renew` adds the task to an earlier release."""
    arguments = ["serve-search", "--store", store, "--port", "0", "--renew"]
    show(arguments)
    command = [sys.executable, "-m", "riptide", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout
        try:
            for line in process.stdout:
                print(line, end="")
                if line.startswith("serving"):
                    yield line.split()[1]
                    return
            sys.exit(process.wait())
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
