"""Leaves in deployments of Ray Serve: the replica of a leaf, calls to leaves, and control of all their replicas.

Importing this module loads no torch: a leaf holds no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from grpc import RpcError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from riptide.indexing.exact.score_parts import ScoreParts
from riptide.indexing.store.store import Store
from riptide.serve.parts.leaf import (
    ExplainRequest,
    HitsRequest,
    Leaf,
    Passage,
    PassagesRequest,
    Reply,
    SliceHits,
    SliceRequest,
    SourceHits,
)
from riptide.serve.release.live import live_release_id
from riptide.serve.service_errors import LostError, OverloadedError

Result = TypeVar("Result")
PREPARE_S = 600.0  # timeout for all replicas to open a release, in seconds
TOGETHER = 2  # concurrent batches of a leaf: one computes while the other is read or sent
CHECK_S = 10.0  # timeout for all replicas to check their files, in seconds


class LeafReplica:
    """A replica of a leaf on Ray Serve. Searches run in threads, so that it can open a release at the same time.

    Args:
        store: URL of the store.
        number: Number of the leaf, from 0.
        num_leaves: Number of leaves.
        threads: Threads of one search.
    """

    def __init__(self, store: str, number: int, num_leaves: int, threads: int):
        self.leaf = Leaf(Store(store), number, num_leaves, threads=threads)
        self._searches, self._admin = ThreadPoolExecutor(TOGETHER), ThreadPoolExecutor(1)
        if live := live_release_id(self.leaf.store):
            for part in self.leaf.parts.values():
                part.open_release(live[0])

    async def search(self, request: HitsRequest) -> list[SourceHits | Exception]:
        return await asyncio.get_running_loop().run_in_executor(self._searches, self.leaf.search, request)

    async def search_slice(self, request: SliceRequest) -> SliceHits:
        return await asyncio.to_thread(self.leaf.search_slice, request)

    async def explain(self, request: ExplainRequest) -> list[list[dict[int, ScoreParts]] | Exception]:
        return await asyncio.get_running_loop().run_in_executor(self._searches, self.leaf.explain, request)

    async def fetch(self, request: PassagesRequest) -> list[Passage]:
        return await asyncio.to_thread(self.leaf.fetch, request)

    async def documents(self, request: PassagesRequest) -> tuple[np.ndarray, np.ndarray]:
        return await asyncio.to_thread(self.leaf.documents, request)

    async def call_part(self, part: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a part in this replica; `_broadcast` does so in all replicas."""
        call = partial(getattr(self.leaf.parts[part], method), *arguments)
        is_change = method in ("open_release", "close_release")  # changes of the open releases run one at a time
        return await asyncio.get_running_loop().run_in_executor(self._admin if is_change else None, call)


def send_to_leaves(handles: Sequence[Any], method: str, request: Any) -> list[Reply[Any]]:
    """Sends a request to all leaves at once; returns their pending replies."""
    return [PendingReply(getattr(handle, method).remote, request) for handle in handles]


class PendingReply(Generic[Result]):
    """A reply that is pending in Ray Serve.

    If the replica is lost during the call, the call is sent once more, to another replica or to the next one that
    starts. Calls change nothing, so they can be repeated.

    Args:
        send: Sends the request and returns Ray Serve's response.
        request: The request.
    """

    def __init__(self, send: Callable[[Any], Any], request: Any):
        self._send, self._request = send, request
        self._response: Any = None
        with contextlib.suppress(LostError), unwrap_replica_errors():
            self._response = send(request)

    def result(self, timeout: float | None = None) -> Result:
        ends = None if timeout is None else time.monotonic() + timeout
        if self._response is not None:
            with contextlib.suppress(LostError), unwrap_replica_errors():
                return self._response.result(timeout_s=timeout)
        with unwrap_replica_errors():
            remaining_s = None if ends is None else max(0.0, ends - time.monotonic())
            return self._send(self._request).result(timeout_s=remaining_s)


class RemotePart:
    """Controls one part in all replicas of all leaves.

    Every method waits for the first replica of a leaf if none has started. It raises LostError if the calls take too
    long, and exceptions of a replica as they are.

    Args:
        name: Name of the part.
        handles: Of the leaves' deployments.
    """

    def __init__(self, name: str, handles: Sequence[Any]):
        self.name, self.handles = name, handles

    def open_release(self, release_id: str) -> None:
        self._call_all_replicas("open_release", release_id)

    def close_release(self, release_id: str) -> None:
        self._call_all_replicas("close_release", release_id)

    def check(self, release_id: str) -> None:
        self._call_all_replicas("check", release_id, allowed_s=CHECK_S)

    def read_files(self, release_id: str, max_bytes: int | None, max_seconds: float) -> int:
        return sum(self._call_all_replicas("read_files", release_id, max_bytes, max_seconds))

    def _call_all_replicas(self, method: str, *arguments: Any, allowed_s: float = PREPARE_S) -> list[Any]:
        """Calls a method of the part in every replica of all leaves at the same time; returns the results."""

        def results(handle: Any) -> list[Any]:
            return _broadcast(handle, [self.name, method, *arguments], allowed_s)

        with ThreadPoolExecutor(len(self.handles)) as threads:
            return [result for results in threads.map(results, self.handles) for result in results]


def _broadcast(handle: Any, arguments: Sequence[Any], allowed_s: float) -> list[Any]:
    """Calls `LeafReplica.call_part` in every replica of a leaf; returns the results."""
    ends = time.monotonic() + allowed_s
    with unwrap_replica_errors():
        while True:
            try:
                remaining_s = max(0.0, ends - time.monotonic())
                return list(handle.broadcast("call_part", *arguments).results(timeout_s=remaining_s) or [])
            except DeploymentUnavailableError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.5)
            except TimeoutError as error:
                raise LostError(f"{arguments[1]}: not done after {allowed_s:g} s") from error


@contextlib.contextmanager
def unwrap_replica_errors() -> Iterator[None]:
    """Context that raises the exception of a replica without Ray's traceback, which is not meant for clients.

    Raises LostError if the call failed outside of the leaf, or if the leaf is of an earlier version of riptide, which
    lacks the method or the class of the request: a rolling update replaces it.
    """
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, AttributeError | RayServeException):
            raise LostError(str(error.cause)) from error
        raise error.cause from None
    except TimeoutError:
        raise
    except BackPressureError as error:
        raise OverloadedError(1) from error
    except (RayError, RayServeException, RpcError) as error:
        raise LostError(type(error).__name__) from error
