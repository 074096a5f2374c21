"""Two processes, ranks 0 and 1 of one gloo group, that run the cases which tests send to them.

Starting the processes takes longer than most cases, so all cases of a backend share a pair. A case is a function of an
importable module: `case(rank, patch, *arguments)`, where `patch` is a pytest.MonkeyPatch. After each case the pair
resets what the case changed through `patch`, the environment, torch's threads and random state, and the function that
DeepSpeed's stage 3 replaces. A pair whose case failed is ended, and the next case runs in new processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

WAIT = timedelta(minutes=5)  # of a collective, in which a worker waits for the other one


class CaseFailed(AssertionError):
    """A case raised, or its process ended; the message holds the traceback or the exit status."""


class TwoWorkers:
    """A pair of workers, started when the first case is run.

    Args:
        threads: torch's threads of each worker.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.starts = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: str | None = None

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs a case on both workers and returns what it returned on rank 0 and on rank 1.

        Raises:
            CaseFailed: If the case raised on a worker, or a worker ended. The pair is ended.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((case, arguments))
        answers: dict[int, Any] = {}
        try:
            for connection in self._connections:
                connection.send_bytes(request)
            while len(answers) < 2:
                pending = [self._connections[rank] for rank in (0, 1) if rank not in answers]
                for connection in wait(pending):
                    rank = self._connections.index(connection)
                    answers[rank] = self._answer(rank)
        except BaseException:
            self.end(kill=True)
            raise
        return [answers[0], answers[1]]

    def end(self, kill: bool = False) -> None:
        """Ends both processes. Raises CaseFailed if one does not end with status 0, except after `kill`."""
        for connection in self._connections:
            connection.close()  # which a worker takes as the end
        for process in self._processes:
            if kill:
                process.kill()
            process.join()
        statuses = [process.exitcode for process in self._processes]
        self._processes, self._connections = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None
        if any(statuses) and not kill:
            raise CaseFailed(f"the workers ended with the statuses {statuses}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.starts += 1
        self._folder = tempfile.mkdtemp(prefix="two-workers-")
        for rank in (0, 1):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._folder, self.threads, other), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._connections.append(own)

    def _answer(self, rank: int) -> Any:
        try:
            failure, answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            raise CaseFailed(f"worker {rank} ended with the status {self._processes[rank].exitcode}") from None
        if failure:
            raise CaseFailed(f"worker {rank}:\n{failure}")
        return answer


def _serve(rank: int, folder: str, threads: int, connection: Connection) -> None:
    """Runs cases until the connection is closed."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    torch.set_num_threads(threads)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=WAIT)
    while True:
        try:
            case, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = _run(case, rank, arguments)
            dist.barrier()
            message = pickle.dumps((None, answer))
        except BaseException:
            message = pickle.dumps((traceback.format_exc(), None))
        connection.send_bytes(message)
        del case, arguments
    dist.destroy_process_group()
    # DeepSpeed's stage-3 engines are never freed and keep their own process group, whose gloo threads still run. If
    # such a thread needs the interpreter while it shuts down, C++ aborts the process ("terminate called without an
    # active exception"). So the process ends without that, as the workers of Ray Train do, which Ray kills.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(case: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> Any:
    import torch

    environment, threads, linear = dict(os.environ), torch.get_num_threads(), torch.nn.functional.linear
    try:
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
            return case(rank, patch, *arguments)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.nn.functional.linear = linear
        gc.collect()
