"""The storage backend for Google Cloud Storage and Azure Blob Storage, through obstore."""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from riptide.base.errors import BusyStorageError, StorageError
from riptide.indexing.storage.remote import RemoteStorage
from riptide.indexing.storage.storage import RangeReader, explain_disk_errors
from riptide.process.extras import require
from riptide.telemetry.phases import Phase, measured

MAX_RETRIES = 9  # repetitions of a request that a service throttles or fails to answer
BLOCK_BYTES = 8 << 20  # bytes of a piece of a large object
MAX_BLOCKS = 9_000  # pieces of an object at most; Google Cloud Storage allows 10,000, Azure 50,000
LISTED = 1_000  # objects of a page of a list
READ_TIMEOUT_S, REQUEST_TIMEOUT_S = 60, 6 * 3600  # without a byte; for a whole object of any size
_BUSY = re.compile(r"status code: (408|429|5\d\d)\b|operation timed out")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket (does not exist|not found)", re.IGNORECASE)


class _Service(NamedTuple):
    """A cloud service.

    Attributes:
        name: Its name in messages.
        bucket: Its word for a bucket.
        store: The class of obstore.store.
        tag: The field of an object's metadata that a conditional write compares.
        wrong_tag: A value of this field that no object has.
        settings: The environment variables of the address and of the credentials, for error messages.
    """

    name: str
    bucket: str
    store: str
    tag: str
    wrong_tag: str
    settings: str


SERVICES = {
    "gs": _Service(
        "Google Cloud Storage", "bucket", "GCSStore", "version", "1", "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_BASE_URL"
    ),
    "az": _Service(
        "Azure Blob Storage",
        "container",
        "AzureStore",
        "e_tag",
        '"0x0"',
        "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT and the credentials",
    ),
}


class ObjectStorage(RemoteStorage):
    """The storage backend for `gs://bucket/prefix` and `az://container/prefix`.

    Commits are conditional writes: by the generation of an object on Google Cloud Storage, by its ETag on Azure. The
    account, the endpoint and the credentials come from the usual variables, files and metadata services, which
    obstore reads (docs/stores.md). Azure removes uncommitted blocks itself; a lifecycle rule of a bucket aborts
    uploads.
    """

    CONDITIONS = "on generations and ETags"
    REMEDY = "the service itself"
    ENDPOINTS = ("GOOGLE_BASE_URL", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT")

    def __init__(self, url: str):
        super().__init__(url)
        self.service = SERVICES[self.scheme]
        require(self.service.name, "obstore")
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    def client(self) -> Any:
        if self._client is None:
            import obstore.store

            options = {
                "allow_http": True,  # only if the endpoint is an http:// address
                "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
            }
            with self._explain_errors(""):
                self._client = getattr(obstore.store, self.service.store)(
                    self.bucket, client_options=options, retry_config={"max_retries": MAX_RETRIES}
                )
        return self._client

    @measured("read")
    def read(self, key: str) -> bytes:
        with self._explain_errors(key):
            return bytes(self.client.get(self.key(key)).bytes())

    @measured("read")
    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._explain_errors(key):
            return bytes(self.client.get_range(self.key(key), start=start, end=end))

    @measured("read")
    def size(self, key: str) -> int | None:
        metadata = self._metadata(key)
        return None if metadata is None else int(metadata["size"])

    @measured("read")
    def write_time(self, key: str) -> float:
        metadata = self._metadata(key)
        if metadata is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{key}")
        return float(metadata["last_modified"].timestamp())

    @measured("read")
    def sha256(self, key: str) -> str:
        digest = hashlib.sha256()
        with self._explain_errors(key):
            for block in self.client.get(self.key(key)).stream(BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    @measured("read")
    def fetch(self, key: str, path: Path) -> None:
        with self._explain_errors(key), explain_disk_errors(path):
            blocks = self.client.get(self.key(key)).stream(BLOCK_BYTES)
            with open(path, "wb") as target:
                for block in blocks:
                    target.write(block)

    @measured("write")
    def put(self, key: str, source: Path | bytes) -> None:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        with self._explain_errors(key, creates=True):
            self.client.put(self.key(key), source, chunk_size=max(BLOCK_BYTES, -(-size // MAX_BLOCKS)))
        if isinstance(source, Path):
            source.unlink()

    @measured("commit")
    def put_new(self, key: str, data: bytes) -> bool:
        return self._conditional_put(key, data, "create")

    @measured("read")
    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            with self._explain_errors(key):
                answer = self.client.get(self.key(key))
                return bytes(answer.bytes()), answer.meta[self.service.tag]
        except FileNotFoundError:
            return None

    @measured("commit")
    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        return self._conditional_put(key, data, "create" if tag is None else {self.service.tag: tag})

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with Phase("read"):
            listed = sorted((key, metadata["size"]) for key, metadata in self._list(prefix))
        yield from listed

    def page(self, prefix: str, after: str) -> tuple[builtins.list[tuple[str, float]], bool]:
        folder, skip = self.key(prefix).rstrip("/") or None, len(self.key(""))
        with self._explain_errors(prefix, creates=True):
            pages = self.client.list(folder, offset=self.key(after) if after else None, chunk_size=LISTED)
            page: builtins.list[dict[str, Any]] = next(iter(pages), [])
        entries = [(metadata["path"][skip:], metadata["last_modified"].timestamp()) for metadata in page]
        return entries, len(entries) < LISTED

    @measured("read")
    def write_times(self, prefix: str) -> dict[str, float]:
        return {key: metadata["last_modified"].timestamp() for key, metadata in self._list(prefix)}

    @measured("read")
    def is_empty(self) -> bool:
        with self._explain_errors("", creates=True):
            return not next(iter(self.client.list(self.prefix or None, chunk_size=1)), None)

    @measured("write")
    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._explain_errors(key):
            self.client.delete(self.key(key))

    def wrong_tag(self) -> str:
        return self.service.wrong_tag

    def _metadata(self, key: str) -> dict[str, Any] | None:
        """Returns the size, the time of the last write and the tags of an object; None if it does not exist."""
        try:
            with self._explain_errors(key):
                metadata: dict[str, Any] = self.client.head(self.key(key))
                return metadata
        except FileNotFoundError:
            return None

    def _list(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (key, metadata) of every object under the folder `prefix`."""
        skip = len(self.key(""))
        with self._explain_errors(prefix, creates=True):
            for page in self.client.list(self.key(prefix).rstrip("/") or None, chunk_size=LISTED):
                for metadata in page:
                    yield metadata["path"][skip:], metadata

    def _conditional_put(self, key: str, data: bytes, mode: str | Mapping[str, str]) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._explain_errors(key, creates=mode == "create"):
                self.client.put(self.key(key), data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return False
        return True

    @contextlib.contextmanager
    def _explain_errors(self, key: str, *, creates: bool = False) -> Iterator[None]:
        """Converts an error of obstore to a StorageError with one line: the object, and the reason.

        Args:
            key: The key of the object, or of a folder.
            creates: Whether the request succeeds without the object, so that only a bucket can be missing.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, FileNotFoundError) as error:
            reason = " ".join(str(error).partition("\n\nDebug source")[0].split())
            name = f"{self.url}/{key}".rstrip("/")
            if _NO_BUCKET.search(reason) or (creates and isinstance(error, FileNotFoundError)):
                bucket = self.service.bucket
                raise StorageError(f"{self.url}: there is no {bucket} {self.bucket}: create it first") from error
            if isinstance(error, FileNotFoundError):
                raise
            if _BUSY.search(reason):
                raise BusyStorageError(f"{name}: {reason[:300]}: run the command again later") from error
            raise StorageError(f"{name}: {reason[:300]} (check {self.service.settings})") from error


class ObjectFiles:
    """Raw files in a cloud, by the methods of a pyarrow filesystem that their readers use; paths begin with the bucket.

    Args:
        scheme: One of SERVICES.
    """

    def __init__(self, scheme: str):
        self.scheme = scheme

    def get_file_info(self, place: Any) -> Any:
        """Returns the FileInfo of a path, or a list of those of the files that a FileSelector selects."""
        from pyarrow.fs import FileInfo, FileType

        if not isinstance(place, str):
            bucket, key, storage = self._open(place.base_dir)
            depth = f"{key}/".count("/") if key else 0
            return [
                FileInfo(f"{bucket}/{name}", type=FileType.File, size=size)
                for name, size in storage.list(key)
                if place.recursive or name.count("/") == depth
            ]
        bucket, key, storage = self._open(place)
        if key and (size := storage.size(key)) is not None:
            return FileInfo(place, type=FileType.File, size=size)
        is_folder = not ObjectStorage(f"{self.scheme}://{bucket}/{key}").is_empty()
        return FileInfo(place, type=FileType.Directory if is_folder else FileType.NotFound)

    def open_input_file(self, path: str) -> Any:
        """Opens a file for random access (pyarrow.NativeFile). Raises FileNotFoundError."""
        import pyarrow as pa

        _, key, storage = self._open(path)
        if (size := storage.size(key)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.scheme}://{path}")
        return pa.PythonFile(io.BufferedReader(_ObjectReader(storage, key, size), BLOCK_BYTES), mode="r")

    def _open(self, path: str) -> tuple[str, str, ObjectStorage]:
        """Returns the bucket and the key of a path, and the storage of the bucket."""
        bucket, _, key = path.partition("/")
        return bucket, key.strip("/"), ObjectStorage(f"{self.scheme}://{bucket}")


class _ObjectReader(RangeReader):
    """Reads ranges of an object without checksums."""

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = self._storage.read_range(self._key, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
