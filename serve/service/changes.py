"""Changes the live release: derives a release from the live one, opens it in all parts, and makes it live."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.serve.callers import ANONYMOUS, Caller
from riptide.serve.release.artifacts import ReleaseArtifacts, check_row_ranges
from riptide.serve.release.live import discard_release, live_release_id, save_as_live
from riptide.serve.release.planning import BASE
from riptide.serve.release.release import Release
from riptide.serve.release.renewal import renew_release
from riptide.serve.service.audit import log_change
from riptide.serve.service.prompt_uploads import CheckedPrompt, PromptUpload, add_task, check_upload
from riptide.serve.service.service import Service
from riptide.serve.service.uploads import PromptUploads
from riptide.serve.service_errors import (
    STORE,
    ConflictError,
    OverloadedError,
    RequestError,
    StoreError,
    UnknownTaskError,
    is_store_error,
    store_error,
)

TRIES = 20  # maximum number of attempts to make a release live while other servers do the same
MAX_CHANGES = 8  # maximum number of changes that run or wait


class ReleaseChanges:
    """Changes the live release of a service, one change at a time.

    Not thread-safe: all coroutines run in the event loop of the service.

    Args:
        service: The service.
        refresh_others: Tells the other replicas of the service that another release is live; None: there are none.
    """

    def __init__(self, service: Service, refresh_others: Callable[[], Awaitable[None]] | None = None):
        self.service, self.refresh_others = service, refresh_others
        self.uploads = PromptUploads()
        self._lock = asyncio.Lock()
        self._pending = 0  # number of changes that run or wait

    async def refresh(self) -> None:
        """Switches the service to the release that `serving/current.json` names.

        Raises:
            StoreError: If the release cannot be read.
            InputError: If a part cannot use a prompt of it.
        """
        service = self.service
        tagged = await service.run_on_store(live_release_id, service.store)
        if tagged is None or (service.live is not None and tagged[0] == service.live.release.id):
            return
        async with self._lock:
            # Read again under the lock, as it may name another release by now.
            if tagged := await service.run_on_store(live_release_id, service.store):
                await service.serve_release(await service.run_on_store(Release.load, service.store, tagged[0]))

    async def put_task(self, upload: PromptUpload, caller: Caller = ANONYMOUS) -> None:
        """Serves a prompt as a task. Returns when every part has opened the release.

        The prompt is checked in a thread for that, so that changes of the release do not wait for the check.

        Args:
            upload: The prompt and the name of the task.
            caller: Who makes the change, for the audit log.

        Raises:
            InputError: If the prompt cannot be used.
            OverloadedError: If too many uploads are in progress.
            UploadExpiredError: If the check took too long.
            ConflictError: If other servers kept changing the release at the same time.
            StoreError: If the store cannot be read.
        """
        store, live = self.service.store, self.service.require_live()

        def check(deadline: float) -> CheckedPrompt:
            with self._client_errors():
                return check_upload(store, _open(store, live.release), upload, deadline)

        async with self.uploads.check(check) as checked_prompt:
            action = f"put task {upload.name}"
            await self._apply(lambda release: add_task(store, _open(store, release), checked_prompt), caller, action)

    async def drop_task(self, name: str, caller: Caller = ANONYMOUS) -> None:
        """Removes a task from the live release.

        Args:
            name: Name of the task.
            caller: Who makes the change, for the audit log.

        Raises:
            UnknownTaskError: If the live release does not have the task.
            InputError: If the task is the backbone's own, or the only one.
            ConflictError: If other servers kept changing the release at the same time.
        """
        if name == BASE:
            raise RequestError(f"task {BASE!r} is the backbone's own: it stays")

        def change(release: Release) -> Release:
            if release.task(name) is None:
                raise UnknownTaskError.for_name(name, [task.name for task in release.tasks])
            if len(release.tasks) == 1:
                raise RequestError(f"task {name!r} is the only one, and stays: put another one first")
            return release.without_task(name)

        await self._apply(change, caller, f"delete task {name}")

    async def switch(self, id: str | None, caller: Caller = ANONYMOUS) -> None:
        """Makes another release live: an earlier one, or a new one of the newest artifacts.

        Args:
            id: Id of an earlier release; None: a new release of the same tasks over what the store holds now.
            caller: Who makes the change, for the audit log.

        Raises:
            InputError: If the release does not exist or does not fit the store.
            ConflictError: If other servers kept changing the release at the same time.
        """
        store = self.service.store
        await self._apply(
            lambda release: renew_release(store, release) if id is None else Release.load(store, id),
            caller,
            "renew the release" if id is None else f"switch to release {id}",
        )

    async def _apply(self, change: Callable[[Release], Release], caller: Caller, action: str) -> None:
        """Applies a change to the live release, opens the result in all parts, and makes it live."""
        if self._pending >= MAX_CHANGES:
            raise OverloadedError(5)
        self._pending += 1
        try:
            async with self._lock:
                await self._make_live(change, caller, action)
        finally:
            self._pending -= 1
        if self.refresh_others is not None:
            await self.refresh_others()

    async def _make_live(self, change: Callable[[Release], Release], caller: Caller, action: str) -> None:
        """Makes the result of a change live."""
        service, store = self.service, self.service.store
        for _ in range(TRIES):
            tagged = await service.run_on_store(live_release_id, store)
            if tagged is None:
                error = f"{store.url} has no live release any more: start the server again to make one"
                raise StoreError(STORE, "files are missing", error)
            live_release = await service.run_on_store(Release.load, store, tagged[0])
            with self._client_errors():
                release = await service.run_blocking(change, live_release)
                if service.num_leaves > 1:
                    check_row_ranges(await service.run_blocking(_open, store, release), service.num_leaves)
            log = functools.partial(log_change, caller, action, live_release, release)
            if await self._try_to_make_live(release, tagged[1], log):
                await service.serve_release(release)
                return
        raise ConflictError("others change the tasks at the same time; try again")

    async def _try_to_make_live(self, release: Release, tag: str, log: Callable[..., None]) -> bool:
        """Opens and warms a release and makes it live; discards it if that fails. Returns whether it is live.

        Args:
            release: The release.
            tag: The tag of the record that it replaces.
            log: Called when the release is live, and with `is_confirmed=False` if it may be.
        """
        service, store, is_live = self.service, self.service.store, False
        try:
            await service.run_on_store(release.save, store)
            await service.run_on_store(service.open_release, release.id)
            await service.run_on_store(service.warm_up.run, release)
            try:
                is_live = await service.run_on_store(save_as_live, store, release, tag)
            except StoreError:
                log(is_confirmed=False)
                raise
            if is_live:
                log()  # before anything else can fail
        finally:
            if not is_live and service.live is not None and release.id != service.live.release.id:
                service.close_when_unused(release.id)
                await service.run_on_store(discard_release, store, release.id)
        return is_live

    @contextlib.contextmanager
    def _client_errors(self) -> Iterator[None]:
        """Context that converts failures of the store to StoreError and removes locations from errors for clients."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if is_store_error(error):
                raise store_error(STORE, error) from error
            if isinstance(error, InputError) and not isinstance(error, RequestError):
                raise self.service.client_error(error) from error
            raise


def _open(store: Store, release: Release) -> ReleaseArtifacts:
    """Opens the artifacts of a release. Raises StoreError for a failure to read, which is no mistake of the client."""
    try:
        return ReleaseArtifacts(store, release)
    except Exception as error:
        raise store_error(STORE, error) from error
