"""Where the workers of a training have room: looked for before it starts, and waited for where nodes are to come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from indexing.tasks import room
from retriever.errors import InputError

PATIENCE = 30.0  # seconds before a person is told that workers wait for room
LOOK = 1.0  # seconds between looks at the cluster's nodes


@dataclass(frozen=True, kw_only=True)
class Places:
    """So many workers, of so many cores and GPUs (0 or 1) each. least: as few as a run goes on with."""

    workers: int
    least: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.workers} workers of {self.cpus} cores{' and a GPU' if self.gpus else ''}"

    @property
    def room(self) -> int:
        """How many of them the cluster's nodes hold, now, were nothing else there."""
        return room(self.cpus, self.gpus)

    @property
    def resources(self) -> dict[str, float]:
        """Of each."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def find_places(
    workers: int, cpus: int, say: Callable[[str], object], *, gpus: int | None = None, least: int | None = None,
    wait: float = 0.0,
) -> Places:  # fmt: skip
    """The places of a training. gpus: None takes those that are there, if all workers, or `least`, can have one.

    Where there is no room the autoscaler is asked for nodes, up to `wait` seconds; a person is told so, and where GPUs
    stay unused. Raises InputError where there is no room for `least` workers in the end.
    """
    import ray
    from ray.autoscaler.sdk import request_resources

    least = least or workers
    own = int(room(cpus, 1) >= least) if gpus is None else gpus
    places = Places(workers=workers, least=least, cpus=cpus, gpus=own)
    if wait and places.room < workers:
        say(f"waits up to {wait:.0f} s for nodes: room for {places.room} of {places}")
        request_resources(bundles=[places.resources] * workers)
        try:
            until = time.monotonic() + wait
            while places.room < workers and time.monotonic() < until:
                time.sleep(LOOK)
        finally:
            request_resources(bundles=[])  # what has come stays for as long as idle nodes do
    found = ray.cluster_resources()
    asked = f"--workers {least} --cpus {cpus}{' --gpus 1' if own else ''}"
    if places.room < least:
        waited = f"waited {wait:.0f} s for more" if wait else "--wait SECONDS waits for an autoscaler's"
        raise InputError(f"{asked}: the cluster has {spelt(found)}, its nodes have room for {places.room} such "
                         f"workers; {waited}")  # fmt: skip
    if gpus is None and own and places.room < workers:
        say(f"begins on {places.room} GPUs, with room for no more of {places}; --gpus 0 takes processors instead")
    if gpus is None and not own and found.get("GPU", 0) >= 1:
        say(f"trains on the processors: {asked}, and the cluster has GPUs and cores beside them for {room(cpus, 1)} "
            "such workers")  # fmt: skip
    return places


@contextlib.contextmanager
def tell_of_waiting(places: Places, begun: threading.Event, say: Callable[[str], object]) -> Iterator[None]:
    """Say, once, what workers wait for that have not `begun` after PATIENCE seconds: others hold the cores."""
    timer = threading.Timer(PATIENCE, tell, (places, begun, say))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(places: Places, begun: threading.Event, say: Callable[[str], object]) -> None:
    """What workers wait for, unless they have begun."""
    import ray

    if not begun.is_set():
        say(f"waits for {places}; free now: {spelt(ray.available_resources())}")


def spelt(resources: Mapping[str, float]) -> str:
    """Cores and GPUs in words."""
    gpus = f" and {resources['GPU']:.0f} GPUs" if "GPU" in resources else ""
    return f"{resources.get('CPU', 0):.0f} cores{gpus}"
