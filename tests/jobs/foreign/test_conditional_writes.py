"""Ceph's tests of conditional writes in S3: the server of our tests holds those with a condition that a store sends.

A test is a list of steps: `put CONTENT`, `upload CONTENT` (in parts), `delete`, `get CONTENT` and `versioned`. A write
may have a condition, `match=ETAG` or `none=ETAG`, and end with the error `!CODE`; `>NAME` names its ETag.
"""

from __future__ import annotations

from typing import Any

import boto3
from botocore.exceptions import ClientError

CONDITIONS = {"match": "IfMatch", "none": "IfNoneMatch"}
CHANGED, ABSENT = "!PreconditionFailed", "!NoSuchKey"
TESTS = {
    "put_object_ifmatch_good": "put bar >a, put zar match=a, get zar",
    "put_object_ifmatch_failed": f"put bar, put zar match=ABCORZ {CHANGED}, get bar",
    "put_object_ifmatch_overwrite_existed_good": "put bar, put zar match=*, get zar",
    "put_object_ifmatch_nonexisted_failed": f"put bar match=* {ABSENT}, get bar {ABSENT}",
    "put_object_ifnonmatch_good": "put bar, put zar none=ABCORZ, get zar",
    "put_object_ifnonmatch_failed": f"put bar >a, put zar none=a {CHANGED}, get bar",
    "put_object_ifnonmatch_nonexisted_good": "put bar none=*, get bar",
    "put_object_ifnonmatch_overwrite_existed_failed": f"put bar, put zar none=* {CHANGED}, get bar",
    "put_object_if_match": f"put x none=* >a, put x none=* {CHANGED}, put x none=a {CHANGED}, put x none=bad, "
    f"put x match=a, delete, put x match=* {ABSENT}, put x match=bad {ABSENT}, put x none=a, put x match=*, "
    f"put x match=bad {CHANGED}, put x match=a",
    "put_current_object_if_none_match": "versioned, put data1 none=* >a, put data2 >b, "
    f"put x none=* {CHANGED}, put x none=b {CHANGED}, put x none=a, put x none=bad, delete",
    "put_current_object_if_match": f"versioned, put x match=* {ABSENT}, put x match=bad {ABSENT}, "
    f"put data1 none=deadbeef >a, put data2 match=* >b, put x match=bad {CHANGED}, put x match=a {CHANGED}, "
    "put x match=b",
    "put_object_current_if_match": f"versioned, put x none=* >a, put x none=* {CHANGED}, put x none=a {CHANGED}, "
    f"put x match=a, delete, put x match=* {ABSENT}, put x match=bad {ABSENT}, put x none=a",
    "delete_object_if_match": f"put x >a, delete match=bad {CHANGED}, delete match=a, delete match=*, "
    "delete match=bad, put x, delete match=*",
}
TESTS |= {
    f"multipart_{name}": TESTS[name].replace("put ", "upload ")
    for name in ("put_object_if_match", "put_current_object_if_none_match", "put_current_object_if_match")
}
# Moto's. A store sends `put none=*` and `put match=ETAG`; the last step of a list may differ because of one before.
DIFFERENCES = {
    "put_object_ifmatch_overwrite_existed_good": ["put zar match=*", "get zar"],
    "put_object_ifnonmatch_failed": [f"put zar none=a {CHANGED}", "get bar"],
    "put_object_if_match": [f"put x none=a {CHANGED}", "put x match=*"],
    "put_current_object_if_none_match": [f"put x none=b {CHANGED}"],
    "put_current_object_if_match": ["put data2 match=* >b", f"put x match=a {CHANGED}"],
    "put_object_current_if_match": [f"put x none=a {CHANGED}"],
    "delete_object_if_match": ["delete match=*", "delete match=bad", "delete match=*"],
    "multipart_put_object_if_match": [
        f"upload x none=a {CHANGED}",
        f"upload x match=* {ABSENT}",
        f"upload x match=bad {ABSENT}",
        f"upload x match=bad {CHANGED}",
    ],
    "multipart_put_current_object_if_none_match": [f"upload x none=b {CHANGED}"],
    "multipart_put_current_object_if_match": [
        f"upload x match=* {ABSENT}",
        f"upload x match=bad {ABSENT}",
        f"upload x match=bad {CHANGED}",
        f"upload x match=a {CHANGED}",
    ],
}


class Bucket:
    """A bucket with one object."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)

    def run(self, step: str, content: str, condition: dict[str, str]) -> str:
        """Runs a step; returns the ETag of a write, or what `get` reads. Raises ClientError."""
        target = {"Bucket": self.name, "Key": "obj"}
        match step:
            case "put":
                return self.client.put_object(**target, Body=content, **condition)["ETag"]
            case "upload":
                upload = {**target, "UploadId": self.client.create_multipart_upload(**target)["UploadId"]}
                part = self.client.upload_part(**upload, PartNumber=1, Body=content)
                parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
                return self.client.complete_multipart_upload(**upload, MultipartUpload=parts, **condition)["ETag"]
            case "delete":
                self.client.delete_object(**target, **condition)
            case "get":
                return self.client.get_object(**target)["Body"].read().decode()
            case "versioned":
                setting = {"Status": "Enabled"}
                self.client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration=setting)
        return ""


def is_held(bucket: Bucket, text: str, tags: dict[str, str]) -> bool:
    """Runs a step; returns whether it ends as it should. tags: the ETags by name, to which it may add one."""
    step, *words = text.split()
    content = next((word for word in words if word.isalnum()), "")
    named = [word.split("=") for word in words if "=" in word]
    try:
        result, error = bucket.run(step, content, {CONDITIONS[kind]: tags.get(tag, tag) for kind, tag in named}), ""
    except ClientError as refusal:
        result, error = "", "!" + refusal.response["Error"]["Code"]
    tags |= {word[1:]: result for word in words if word.startswith(">")}
    expected = next((word for word in words if word.startswith("!")), "")
    return error == expected and (step != "get" or bool(error) or result == content)


def test_the_server_holds_the_writes_that_a_store_sends(s3_server: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_server)
    differences = {}
    for test, steps in TESTS.items():
        bucket, tags = Bucket(client, test.replace("_", "-")), dict[str, str]()
        differences[test] = [step for step in steps.split(", ") if not is_held(bucket, step, tags)]
    assert {test: steps for test, steps in differences.items() if steps} == DIFFERENCES
