"""Counts the object store requests of the parts of an artifact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MULTIPART_BYTES = 8 << 20  # boto3 uploads larger files in pieces of this size


@dataclass(frozen=True)
class Requests:
    """Numbers of requests to an object store.

    Attributes:
        writes: PUT, POST, DELETE.
        reads: GET, HEAD, and pages of lists.
    """

    writes: int = 0
    reads: int = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.writes + other.writes, self.reads + other.reads)


NO_REQUESTS = Requests()


def count_upload(size: int) -> int:
    """Returns the writes that upload a file: one, or those of a multipart upload."""
    return 1 if size < MULTIPART_BYTES else 2 + -(-size // MULTIPART_BYTES)


def count_parts(sizes: Iterable[int]) -> int:
    """Returns the writes that commit parts of the given sizes in bytes: the file and the record of each."""
    return sum(count_upload(size) + 1 for size in sizes)


# Requests besides those of parts: the check of the name, lists, manifests and provenance. Counted on a proxy in front
# of an S3 server: docs/measurements/plans.md. A long job renews its draft: one write and two reads in 20 s.
WRITES_PER_ARTIFACT, READS_PER_ARTIFACT = 3, 21
PROBE = Requests(writes=4)  # the test of a process whether the server honours conditional writes
READS_PER_PART = 3  # the record is looked for and read, and the draft is checked
READS_PER_FETCH = 1


def artifact_requests(sizes: Iterable[int], fetched: int = 0) -> Requests:
    """Returns the requests that make an artifact.

    Args:
        sizes: Bytes of the parts to commit.
        fetched: Number of files that are fetched, of this artifact or of others.
    """
    parts = [*sizes]
    reads = READS_PER_ARTIFACT + READS_PER_PART * len(parts) + READS_PER_FETCH * fetched
    return Requests(WRITES_PER_ARTIFACT + count_parts(parts), reads)
