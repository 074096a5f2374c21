"""Clients of parts in deployments of Ray Serve, and the control of all their replicas."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from grpc import RpcError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from serve.batching import OverloadedError
from serve.calls.protocols import (
    Encoded,
    EncodeRequest,
    LostError,
    Passage,
    PassagesRequest,
    Reply,
    ScoreRequest,
    SourceHits,
    SourceRequest,
)

Result = TypeVar("Result")
PREPARE_S = 600.0  # seconds for all replicas to open a release
CHECK_S = 10.0  # seconds for all replicas to check their files


@dataclass(frozen=True)
class RemoteEncoder:
    """Client of the replicas of an encoder. handle: of the deployment."""

    handle: Any

    def encode(self, request: EncodeRequest) -> Reply[Encoded]:
        return Sent(self.handle.encode.remote, request)

    def describe(self, release: str) -> Reply[dict[str, Any]]:
        return Sent(self.handle.describe.remote, release)


@dataclass(frozen=True)
class RemoteSearcher:
    """Client of the replicas of a shard that searches sources. handle: of the deployment."""

    handle: Any

    def search(self, request: SourceRequest) -> Reply[SourceHits]:
        return Sent(self.handle.search.remote, request)


@dataclass(frozen=True)
class RemotePassages:
    """Client of the replicas of the passages. handle: of the deployment."""

    handle: Any

    def fetch(self, request: PassagesRequest) -> Reply[list[Passage]]:
        return Sent(self.handle.fetch.remote, request)


@dataclass(frozen=True)
class RemoteReranker:
    """Client of the replicas of a re-ranker. handle: of the deployment."""

    handle: Any

    def score(self, request: ScoreRequest) -> Reply[np.ndarray]:
        return Sent(self.handle.score.remote, request)


class Sent(Generic[Result]):
    """A Reply from Ray Serve.

    If the replica is lost during the call, the call is sent once more, to another replica or to the next one that
    starts. Calls change nothing, so they can be repeated.

    Args:
        send: Sends the request and returns Ray Serve's response.
        request: The request.
    """

    def __init__(self, send: Callable[[Any], Any], request: Any):
        self._send, self._request = send, request
        self._response: Any = None
        with contextlib.suppress(LostError), _as_raised():
            self._response = send(request)

    def result(self, timeout_s: float | None = None) -> Result:
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        if self._response is not None:
            with contextlib.suppress(LostError), _as_raised():
                return self._response.result(timeout_s=timeout_s)
        with _as_raised():
            remaining_s = None if ends is None else max(0.0, ends - time.monotonic())
            return self._send(self._request).result(timeout_s=remaining_s)


class RemotePart:
    """Controls all replicas of a part. handles: of its deployments, one for each shard.

    Every method waits for the first replica if none has started. It raises LostError if the calls take too long, and
    exceptions of a replica as they are.
    """

    def __init__(self, handles: Sequence[Any]):
        self.handles = list(handles)

    def prepare(self, release_id: str) -> None:
        self._everywhere("prepare", release_id)

    def retire(self, release_id: str) -> None:
        self._everywhere("retire", release_id)

    def check(self, release_id: str) -> None:
        self._everywhere("check", release_id, timeout_s=CHECK_S)

    def read(self, release_id: str, budget: int | None, seconds: float) -> int:
        return sum(self._everywhere("read", release_id, budget, seconds))

    def _everywhere(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns the results of a method of PartReplica from every replica; broadcasts of Ray Serve take its name."""
        allowed = PREPARE_S if timeout_s is None else timeout_s
        return [result for handle in self.handles for result in _broadcast(handle, method, arguments, allowed)]


def _broadcast(handle: Any, method: str, arguments: Sequence[Any], allowed_s: float) -> list[Any]:
    ends = time.monotonic() + allowed_s
    with _as_raised():
        while True:
            try:
                remaining_s = max(0.0, ends - time.monotonic())
                return list(handle.broadcast(method, *arguments).results(timeout_s=remaining_s) or [])
            except DeploymentUnavailableError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.5)
            except TimeoutError as error:
                raise LostError(f"{method}: not done after {allowed_s:g} s") from error


@contextlib.contextmanager
def _as_raised() -> Iterator[None]:
    """Raises the exception of a replica without Ray's traceback, which is not meant for clients.

    Raises LostError if the call failed outside of the part.
    """
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except TimeoutError:
        raise
    except BackPressureError as error:
        raise OverloadedError(1) from error
    except (RayError, RayServeException, RpcError) as error:
        raise LostError(type(error).__name__) from error
