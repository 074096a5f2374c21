"""Runs two servers of one growing store for an hour, with uploads, switches, kills and hostile clients at once.

    python benchmarks/soak.py --minutes 60 --seed 0 --json results/soak.json

The store has the passages of examples/squad, BM25, and an exact search with the backbone of examples/. Good clients
search both servers in all modes for random tasks. At the same time:

- an administrator uploads and removes up to --tasks prompts, and switches between releases;
- passages are appended and deleted, encoded and indexed by jobs, of which a third are killed (kill -9) and repeated,
  and a release of the newest generations is made live;
- the first server is killed (kill -9) and started again, on the same port;
- hostile clients hold incomplete heads, and send one of the worst known requests after the other.

Each answer is compared with the expected one of the release that it names: dense scores with the products of vectors
that this process computes itself, the first hits with all passages of that release, each text with the source. BM25 and
hybrid answers must have the hits of the first answer of the same generations, across restarts. The memory of the
servers (RSS) is printed each minute. The load is bounded in count and time; servers are stopped by their process ids.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common.files import read_documents, read_texts, write_documents, write_json
from benchmarks.common.program import ROOT, Parser, run_job
from benchmarks.common.server import start_server, stopping
from benchmarks.hostile.answers import Answers
from benchmarks.hostile.measurement import send
from benchmarks.hostile.requests import REQUESTS
from benchmarks.hostile.store import BACKBONE, LENGTH
from benchmarks.query_prompts import computed_prompt, fixed_prompt
from riptide import Client, Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
from riptide.serve.client import ServerError

NUMERICS = ("--dtype", "float32", "--compile", "never")
MODES = ("exact", "exact", "bm25", "hybrid")
HALF_HEAD = b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
BUSY = (429, 503)  # a server may say that it is busy


class Soak:
    """The store, its two servers, and the threads that use them.

    Args:
        folder: A folder for the store and the files of this run.
        options: The options of the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.options, self._folder = options, folder
        self.url = str(folder / "store")
        documents = list(read_documents(ROOT / "examples/squad/corpus.jsonl"))
        self._later, first = documents[: options.later], documents[options.later :]
        write_documents(folder / "first" / "corpus.jsonl", first)
        run_job(self.url, "import_corpus", "--source", folder / "first", "--part-size", 500)
        run_job(self.url, "build_bm25")
        run_job(self.url, "encode_corpus", "--encoder", BACKBONE, "--name", "base", *NUMERICS)
        encoder = Encoder(BACKBONE, EncoderOptions(dtype="float32", compile="never"), threads=1, tasks={})
        queries = read_texts(ROOT / "examples/squad/queries.jsonl", options.queries)
        self.names = [f"t{number:02}" for number in range(options.tasks)]
        for number, name in enumerate(self.names):
            is_computed = number % 4 == 0
            prompt = computed_prompt(encoder, LENGTH, "after", number) if is_computed else None
            prompt = prompt or fixed_prompt(encoder, LENGTH, number)
            (folder / name).mkdir()
            prompt.save(folder / name)
            encoder.put_task(name, prompt)
        alive = frozenset(document["_id"] for document in first)
        self.answers = Answers(Store(self.url), encoder, documents, queries, ["default", *self.names], alive)
        self.statuses, self.events = Counter[str](), Counter[str]()
        self.faults: list[str] = []
        self.stop = threading.Event()
        self.servers: dict[str, tuple[subprocess.Popen[str], int]] = {}

    def start(self, name: str, arguments: tuple[str, ...]) -> None:
        """Starts a server, on the port that it had before."""
        port = self.servers[name][1] if name in self.servers else 0
        if not port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        command = [str(ROOT / "jobs/serve_search.py"), "--store", self.url, "--port", str(port), *arguments]
        self.servers[name] = start_server(ROOT, command)

    def client(self, name: str) -> Client:
        return Client(f"http://127.0.0.1:{self.servers[name][1]}", timeout=120)

    def search(self, seed: int) -> None:
        """Searches until the end, and checks each answer."""
        draw = random.Random(seed)
        while not self.stop.is_set():
            server, query = draw.choice(list(self.servers)), draw.choice(self.answers.queries)
            task, mode = draw.choice(["default", *self.names]), draw.choice(MODES)
            body = {"query": query, "task": task, "mode": mode, "k": 10, "timeout_ms": 60_000}
            try:
                answer = self.client(server).search_response(body)
            except ServerError as error:
                self.statuses[str(error.status)] += 1
                is_absent = error.status == 404 and task != "default"
                is_down = error.status == 0 and server == "first"
                if not (is_absent or is_down or error.status in BUSY):
                    self.faults.append(f"{server}, {mode}, {task}: {error}")
                time.sleep(1)
            else:
                self.statuses["200"] += 1
                if problem := self.answers.problem_of(query, mode, answer):
                    self.faults.append(f"{server}, {mode}, {task}, release {answer['release']}: {problem}")
            time.sleep(self.options.pause)

    def administer(self) -> None:
        """Uploads and removes tasks, switches between releases, and kills the first server, until the end."""
        draw = random.Random(self.options.seed)
        for name in self.names:
            self._change("uploads", lambda name=name: self.client("second").put_task(name, self._folder / name))
        releases = [self.client("second").info()["release"]]
        next_kill = time.monotonic() + self.options.kill_every
        while not self.stop.wait(self.options.change_every):
            if time.monotonic() > next_kill:
                next_kill += self.options.kill_every
                process, _ = self.servers["first"]
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.start("first", ("--keep-release",))
                self.events["kills of the server"] += 1
            client, name = self.client(draw.choice(list(self.servers))), draw.choice(self.names)
            changes: dict[str, Callable[[], object]] = {
                "uploads": lambda client=client, name=name: client.put_task(name, self._folder / name),
                "removals": lambda client=client, name=name: client.drop_task(name),
                "switches": lambda client=client: client.switch(draw.choice(releases[-3:])),
                "switches to the newest": lambda client=client: client.switch(None),
            }
            [kind] = draw.choices(list(changes), weights=[6, 2, 1, 1])
            if self._change(kind, changes[kind]):
                releases.append(self.client("second").info()["release"])

    def grow(self) -> None:
        """Appends and deletes passages until the end; jobs are killed now and then, and repeated."""
        draw, added = random.Random(self.options.seed + 1), iter(self._later)
        for step in itertools.count(1):
            if self.stop.wait(self.options.grow_every):
                return
            new = list(itertools.islice(added, self.options.step))
            if not new:
                return
            gone = draw.sample(sorted(self.answers.alive[-1]), len(new) // 2)
            source = self._folder / f"step{step}"
            write_documents(source / "corpus.jsonl", new)
            (source / "gone.txt").write_text("\n".join(gone) + "\n", encoding="utf-8")
            self.answers.alive.append(self.answers.alive[-1] - set(gone) | {each["_id"] for each in new})
            append = ("--source", source, "--append", "--delete", source / "gone.txt")
            for name, arguments in (
                ("import_corpus", append),
                ("encode_corpus", ("--encoder", BACKBONE, "--name", "base", *NUMERICS)),
                ("build_bm25", ()),
            ):
                self._run_killed(draw, name, *arguments)
            self.events["steps of growth"] += 1
            self._change("switches to the newest", lambda: self.client("second").switch(None))

    def _run_killed(self, draw: random.Random, name: str, *arguments: object) -> None:
        """Runs a job, which is killed at a random moment once in three runs, until it succeeds."""
        command = [sys.executable, f"jobs/{name}.py", "--store", self.url, *map(str, arguments)]
        while not self.stop.is_set():
            seconds = draw.uniform(0.5, 15) if draw.random() < 1 / 3 else None
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            try:
                _, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                self.events["kills of jobs"] += 1
                continue
            if process.returncode == 0:
                return
            self.faults.append(f"{name}: {errors.strip()[-500:]}")
            return

    def _change(self, kind: str, change: Callable[[], object]) -> bool:
        """Makes a change of what is served, and counts it; returns whether it was made."""
        try:
            change()
        except ServerError as error:
            self.events[f"{kind}, refused"] += 1
            if error.status not in (0, 400, 404, 409, *BUSY):
                self.faults.append(f"{kind}: {error}")
            return False
        self.events[kind] += 1
        return True

    def attack(self) -> None:
        """Holds incomplete heads and sends the worst known requests, one after the other, until the end."""
        asyncio.run(self._attack())

    async def _attack(self) -> None:
        def ports() -> list[int]:
            return [port for _, port in self.servers.values()]

        async def hold(number: int) -> None:
            while not self.stop.is_set():
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", ports()[number % 2])
                    writer.write(HALF_HEAD if number % 3 else b"")
                    while await reader.read(4096):
                        pass
                    writer.close()
                self.events["connections with half of a head"] += 1
                await asyncio.sleep(1)

        holders = [asyncio.create_task(hold(number)) for number in range(self.options.holders)]
        draw = random.Random(self.options.seed + 2)
        while not self.stop.is_set():
            name, port = draw.choice(sorted(REQUESTS)), draw.choice(ports())
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(60):
                    status = await send(port, REQUESTS[name]())
                    self.events[f"hostile requests, {status}"] += 1
                    if status == "500":
                        self.faults.append(f"{name}: 500")
            await asyncio.sleep(self.options.attack_every)
        for holder in holders:
            holder.cancel()

    def watch(self) -> list[dict[str, Any]]:
        """Prints and returns the figures of each minute."""
        rows = []
        start = time.monotonic()
        for minute in range(1, self.options.minutes + 1):
            time.sleep(max(0.0, start + 60 * minute - time.monotonic()))
            row: dict[str, Any] = {"minute": minute, "statuses": dict(self.statuses), "events": dict(self.events)}
            for name, (process, _) in list(self.servers.items()):
                with contextlib.suppress(psutil.Error):
                    row[f"{name}, MiB"] = round(psutil.Process(process.pid).memory_info().rss / (1 << 20))
            row |= {"faults": len(self.faults), "tasks": self._num_tasks()}
            rows.append(row)
            print(json.dumps(row), flush=True)
        return rows

    def _num_tasks(self) -> int | None:
        with contextlib.suppress(ServerError):
            return len(self.client("second").tasks())
        return None


@contextlib.contextmanager
def running(soak: Soak) -> Iterator[None]:
    """Runs the threads of a soak while the context is open."""

    def run(work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # a server that does not start raises SystemExit
            soak.faults.append(f"{work.__name__} has ended: {error!r}")

    threads = [threading.Thread(target=run, args=(work,)) for work in (soak.administer, soak.grow, soak.attack)]
    threads += [threading.Thread(target=run, args=(soak.search, n)) for n in range(soak.options.clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        soak.stop.set()
        for thread in threads:
            thread.join()


def main() -> None:
    """Reads the options, runs the soak, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--minutes", 60, "duration")
    parser.add("--seed", 0, "seed of what happens; the moments depend on the machine")
    parser.add("--tasks", 31, "number of prompts that are uploaded; the task `default` has none")
    parser.add("--queries", 64, "number of different queries")
    parser.add("--clients", 4, "number of good clients")
    parser.add("--pause", 0.05, "time between an answer and the client's next search ( s )")
    parser.add("--change-every", 5.0, "time between changes of what is served ( s )")
    parser.add("--kill-every", 180.0, "time between kills of the first server ( s )")
    parser.add("--grow-every", 180.0, "time between steps of growth ( s )")
    parser.add("--later", 400, "number of passages that are appended in the course of the run")
    parser.add("--step", 20, "number of passages of a step; half as many are deleted")
    parser.add("--holders", 64, "number of connections with incomplete heads")
    parser.add("--attack-every", 20.0, "time between hostile requests ( s )")
    parser.add("--json", Path("results/soak.json"), "output file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="riptide-soak-") as folder:
        soak = Soak(Path(folder), options)
        with stopping(soak.servers):
            soak.start("first", ())
            soak.start("second", ("--keep-release",))
            with running(soak):
                rows = soak.watch()
    for fault in soak.faults[:20]:
        print(fault)
    memory = [row["second, MiB"] for row in rows if "second, MiB" in row]
    print(f"answers: {soak.answers.num_checked:,}, all of them checked; faults: {len(soak.faults)}")
    if len(memory) >= 20:
        late = memory[len(memory) // 2 :]
        slope = 60 * float(np.polyfit(range(len(late)), late, 1)[0])
        print(f"memory of the second server: {memory[4]} MiB after 5 minutes, {memory[-1]} at the end,")
        print(f"in the second half {slope:+.0f} MiB per hour")
    write_json(options.json, {"options": vars(options), "minutes": rows, "faults": soak.faults})
    if soak.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
