"""The S3 storage backend: boto3, with conditional PUTs for commits, and pyarrow's filesystem for lists and sizes."""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from riptide.base.errors import BusyStorageError, InputError, StorageError
from riptide.indexing.storage.remote import RemoteStorage
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.telemetry.phases import Phase, measured

ATTEMPTS = 10  # attempts per request that S3 throttles or fails to answer; AWS_MAX_ATTEMPTS overrides it
BLOCK_BYTES = 1 << 20  # bytes of an object that are in memory while it is fetched
DELETED_AT_ONCE = 1_000  # objects of a DeleteObjects request; S3 allows no more
# What servers answer that lack DeleteObjects or expect another checksum
NO_DELETE_OBJECTS = {"NotImplemented", "501", "MethodNotAllowed", "405", "MissingContentMD5", "InvalidRequest", "400"}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # bounds of the backoff after a conflict of conditional writes
BUSY = re.compile(r"slow_?down|unavailable|internal_?(error|failure)|throttl|\b50[0234]\b", re.IGNORECASE)
UPLOAD = "?uploadId="  # separates an object's key from its upload id, as in S3's URLs
_connecting = threading.Lock()  # boto3 makes clients in one thread only, and each client has separate types of errors


class S3Storage(RemoteStorage):
    """The storage backend for a bucket and prefix on S3.

    boto3 reads and writes objects; pyarrow's filesystem lists them and returns their sizes and times. Endpoint, region
    and credentials come from the usual AWS variables and files.
    """

    CONDITIONS = "If-None-Match and If-Match"
    REMEDY = "Amazon S3"
    ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

    def __init__(self, url: str):
        super().__init__(url)
        self._clients: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": None}

    @property
    def s3(self) -> Any:
        return self._connect()[0]

    @property
    def files(self) -> Any:
        return self._connect()[1]

    def _connect(self) -> tuple[Any, Any]:
        with _connecting:
            if self._clients is None:
                import boto3
                from botocore.config import Config

                retries = {"total_max_attempts": max_attempts(), "mode": os.environ.get("AWS_RETRY_MODE", "adaptive")}
                self._clients = boto3.client("s3", config=Config(retries=retries)), s3_filesystem()
            return self._clients

    def path(self, key: str) -> str:
        return f"{self.bucket}/{self.key(key)}"

    @measured("read")
    def read(self, key: str) -> bytes:
        return self._get(key)

    @measured("read")
    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self._get(key, Range=f"bytes={start}-{end - 1}")

    def _get(self, key: str, **options: str) -> bytes:
        """Reads an object or a range of it in one request; pyarrow would send another one for its size."""
        with self._explain_errors(key):
            return self._get_tagged(key, **options)[0]

    def _get_tagged(self, key: str, **options: str) -> tuple[bytes, str]:
        """Reads an object or a range of it, and its version tag. A read that breaks is repeated."""
        breaks = 0
        while True:
            answer = self._open(key, **options)
            try:
                return answer["Body"].read(), answer["ETag"]
            except _broken_reads():  # boto3 repeats a request only until its body begins
                breaks += 1
                if breaks >= max_attempts():
                    raise

    def _blocks(self, key: str) -> Iterator[bytes]:
        """Yields the bytes of an object in one request, and in another one after each break of the connection."""
        start = breaks = 0
        while True:
            stream = self._open(key, **({"Range": f"bytes={start}-"} if start else {}))["Body"]
            try:
                while block := stream.read(BLOCK_BYTES):
                    start += len(block)
                    yield block
                return
            except _broken_reads():
                breaks += 1
                if breaks >= max_attempts():
                    raise

    def _open(self, key: str, **options: str) -> dict[str, Any]:
        """Requests an object or a range of it. Raises FileNotFoundError if the object does not exist."""
        try:
            answer: dict[str, Any] = self.s3.get_object(Bucket=self.bucket, Key=self.key(key), **options)
        except self.s3.exceptions.NoSuchKey:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(key)) from None
        return answer

    @measured("read")
    def size(self, key: str) -> int | None:
        with self._explain_errors(key):
            info = self.files.get_file_info(self.path(key))
        return info.size if info.is_file else None

    @measured("read")
    def sha256(self, key: str) -> str:
        digest = hashlib.sha256()
        with self._explain_errors(key):
            for block in self._blocks(key):
                digest.update(block)
        return digest.hexdigest()

    @measured("read")
    def fetch(self, key: str, path: Path) -> None:
        with self._explain_errors(key), explain_disk_errors(path), open(path, "wb") as target:
            for block in self._blocks(key):
                target.write(block)

    @measured("write")
    def put(self, key: str, source: Path | bytes) -> None:
        with self._explain_errors(key):
            if isinstance(source, bytes):
                self.s3.put_object(Bucket=self.bucket, Key=self.key(key), Body=source)
            else:
                self.s3.upload_file(str(source), self.bucket, self.key(key))
                source.unlink()

    @measured("commit")
    def put_new(self, key: str, data: bytes) -> bool:
        return self._conditional_put(key, data, IfNoneMatch="*")

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from sorted((key, info.size) for key, info in self._infos(prefix))

    def page(self, prefix: str, after: str) -> tuple[builtins.list[tuple[str, float]], bool]:
        folder, skip = self.key(prefix).rstrip("/"), len(self.key(""))
        options = {"StartAfter": self.key(after)} if after else {}
        with self._explain_errors(prefix):
            page = self.s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{folder}/" if folder else "", **options)
        entries = [(entry["Key"][skip:], entry["LastModified"].timestamp()) for entry in page.get("Contents", [])]
        return entries, not page["IsTruncated"]

    @measured("read")
    def write_times(self, prefix: str) -> dict[str, float]:
        return {key: info.mtime_ns / 1e9 for key, info in self._infos(prefix)}

    def _infos(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yields (key, pyarrow's FileInfo) of every object under the folder `prefix`, in any order."""
        from pyarrow import fs

        with Phase("read"), self._explain_errors(prefix):
            selector = fs.FileSelector(self.path(prefix).rstrip("/"), allow_not_found=True, recursive=True)
            infos = self.files.get_file_info(selector)
        skip = len(self.path(""))
        while infos:  # each is released when it was yielded, as there may be hundreds of thousands
            info = infos.pop()
            if info.is_file:
                yield info.path[skip:], info

    @measured("read")
    def is_empty(self) -> bool:
        with self._explain_errors(""):
            return not self.s3.list_objects_v2(Bucket=self.bucket, Prefix=self.key(""), MaxKeys=1)["KeyCount"]

    @measured("write")
    def delete(self, key: str) -> None:
        key, _, upload = key.partition(UPLOAD)
        with self._explain_errors(key):
            if not upload:
                self.s3.delete_object(Bucket=self.bucket, Key=self.key(key))
                return
            with contextlib.suppress(self.s3.exceptions.NoSuchUpload):  # completed or aborted meanwhile
                self.s3.abort_multipart_upload(Bucket=self.bucket, Key=self.key(key), UploadId=upload)

    @measured("write")
    def delete_all(self, keys: Sequence[str]) -> None:
        from botocore.exceptions import ClientError

        for first in range(0, len(keys), DELETED_AT_ONCE):
            batch = keys[first : first + DELETED_AT_ONCE]
            objects = [{"Key": self.key(key)} for key in batch]
            with self._explain_errors(batch[0]):
                try:
                    answer = self.s3.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
                    batch = [error["Key"].removeprefix(self.key("")) for error in answer.get("Errors", [])]
                except ClientError as error:
                    if error.response["Error"]["Code"] not in NO_DELETE_OBJECTS:
                        raise
            super().delete_all(batch)

    def abandoned_writes(self, older_than: float) -> builtins.list[tuple[str, int]]:
        """Adds (KEY?uploadId=ID, bytes so far) of multipart uploads without a new part for `older_than` seconds.

        Their writer was killed. They are billed although they are no objects. `delete` takes the name and aborts the
        upload.
        """
        stale, latest = super().abandoned_writes(older_than), time.time() - older_than
        with self._explain_errors(""):
            uploads = self._pages("list_multipart_uploads", "Uploads", Prefix=self.key(""))
            for key, upload, begun in [(u["Key"], u["UploadId"], u["Initiated"]) for u in uploads]:
                with contextlib.suppress(self.s3.exceptions.NoSuchUpload):  # completed or aborted meanwhile
                    parts = self._pages("list_parts", "Parts", Key=key, UploadId=upload)
                    if max([begun, *(part["LastModified"] for part in parts)]).timestamp() < latest:
                        name = f"{key.removeprefix(self.key(''))}{UPLOAD}{upload}"
                        stale.append((name, sum(part["Size"] for part in parts)))
        return sorted(stale)

    def _pages(self, call: str, field: str, **options: str) -> builtins.list[dict[str, Any]]:
        """Collects the entries of all pages of a paginated request."""
        pages = self.s3.get_paginator(call).paginate(Bucket=self.bucket, **options)
        return [entry for page in pages for entry in page.get(field, [])]

    @measured("read")
    def write_time(self, key: str) -> float:
        with self._explain_errors(key):
            info = self.files.get_file_info(self.path(key))
        if not info.is_file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(key))
        return info.mtime_ns / 1e9

    @measured("read")
    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        with self._explain_errors(key):
            try:
                return self._get_tagged(key)
            except FileNotFoundError:
                return None

    @measured("commit")
    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        return self._conditional_put(key, data, **({"IfMatch": tag} if tag else {"IfNoneMatch": "*"}))

    def _conditional_put(self, key: str, data: bytes, **condition: str) -> bool:
        from botocore.exceptions import ClientError

        for attempt in range(max_attempts()):
            try:
                with self._explain_errors(key):
                    self.s3.put_object(Bucket=self.bucket, Key=self.key(key), Body=data, **condition)
                return True
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in ("PreconditionFailed", "412", "NoSuchKey"):
                    return False
                if code not in ("ConditionalRequestConflict", "409"):  # for concurrent writes S3 asks for a retry
                    raise
            time.sleep(random.uniform(0.5, 1) * min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise BusyStorageError(
            f"s3://{self.path(key)}: S3 answers {max_attempts()} attempts to write it with 409, as if others wrote it "
            "at the same time: run the command again"
        )

    @contextlib.contextmanager
    def _explain_errors(self, key: str) -> Iterator[None]:
        """Converts an S3 error to a StorageError with one line: the bucket or object, and the reason."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except FileNotFoundError:
            raise
        except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
            code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
            if code in ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey"):
                raise
            reason = " ".join(str(error).split())
            if "NoSuchBucket" in reason or code == "NoSuchBucket":
                raise StorageError(f"{self.url}: there is no bucket {self.bucket}: create it first") from error
            # A timeout of botocore is an OSError too.
            if isinstance(error, OSError) and not isinstance(error, BotoCoreError) and "AWS Error" not in reason:
                raise
            if code in ("NotImplemented", "501"):
                raise StorageError(
                    f"s3://{self.path(key)}: {reason[:300]}: the server does not implement this request: use Amazon S3 "
                    "or a server that implements conditional writes (If-None-Match, If-Match)"
                ) from error
            # Only S3's answer is searched, as the rest of the reason may contain a key such as first-503.
            _, _, answer = reason.partition("AWS Error" if isinstance(error, OSError) else "An error occurred")
            if BUSY.search(code or answer):
                raise BusyStorageError(f"s3://{self.path(key)}: {reason[:300]}: run the command again later") from error
            raise StorageError(
                f"s3://{self.path(key)}: {reason[:300]} (check AWS_ENDPOINT_URL, AWS_REGION and the credentials)"
            ) from error


def _broken_reads() -> tuple[type[Exception], ...]:
    """Returns the errors of a connection that breaks while the body of an answer is read."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    return HTTPClientError, IncompleteReadError


def max_attempts() -> int:
    """Returns the maximum number of attempts of a request to S3, from AWS_MAX_ATTEMPTS or ATTEMPTS."""
    text = os.environ.get("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InputError(f"AWS_MAX_ATTEMPTS={text!r}: expected a number of at least 1")
    return int(text)


def s3_filesystem() -> Any:
    """Returns pyarrow's S3 filesystem for the endpoint that boto3 uses (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL)."""
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=max_attempts())
    return fs.S3FileSystem(endpoint_override=endpoint, region=region, retry_strategy=retries)
