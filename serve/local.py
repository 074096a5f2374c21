"""A service of one process: every part stands here, and a call is a call."""

from __future__ import annotations

from typing import Any

from indexing.store import Store
from serve.engine import Engine, Here, Places
from serve.parts import EncoderPart, Part, PassagesPart, RerankPart, SearchPart, WordsPart
from serve.release import Release
from serve.service import Limits, Live, Service


class LocalService(Service):
    """A Service whose parts are its own."""

    def __init__(self, store: Store, encoder: EncoderPart, others: dict[str, Part], limits: Limits):
        self.encoder, self.others = encoder, others
        places = Places(encoder=Here(encoder), shards=[Here(others["search"])], passages=Here(others["passages"]),
                        words=Here(others["words"]), reranker=Here(others["reranker"]))  # fmt: skip
        super().__init__(store, Engine(places), prepare=self.open, retire=self.forget, limits=limits)

    def open(self, release_id: str) -> None:
        """Have every part open a release. Raises InputError where one cannot."""
        release = Release.load(self.store, release_id)
        for name, part in {"encoder": self.encoder, **self.others}.items():
            if name != "reranker" or release.reranker:
                part.prepare(release_id)

    def forget(self, release_id: str) -> None:
        for part in (self.encoder, *self.others.values()):
            part.retire(release_id)

    def about(self, live: Live) -> dict[str, Any]:
        """What `/v1/info` says beside what the release does."""
        return {**self.encoder.describe(live.release.id), "shards": 1}


def open_local(
    store: Store, *, threads: int | None = None, batch: int = 32, bound: int = 256, compile: str = "never",
    device: str | None = None,
) -> LocalService:  # fmt: skip
    """Parts that have opened nothing yet. Belongs to the event loop that it is called in."""
    encoder = EncoderPart(store, threads=threads, device=device, compile=compile)
    others: dict[str, Part] = {
        "search": SearchPart(store, threads=threads),
        "words": WordsPart(store, threads=threads),
        "passages": PassagesPart(store),
        "reranker": RerankPart(store, threads=threads, device=device),
    }
    return LocalService(store, encoder, others, Limits(batch=batch, bound=bound))
