"""A client of a riptide server, based on the HTTP client of Python's standard library.

client = Client("http://127.0.0.1:8000")
for hit in client.search("what is a rip current?", k=3):
    print(hit.score, hit.title, hit.text)
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from riptide.base.arguments import plain_value, refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, shown
from riptide.retriever.model.model_folder import PROMPT_SETTINGS, PROMPT_WEIGHTS
from riptide.serve.protocol import FoundPassage

# Statuses that a proxy such as Ray's HAProxy sends while no replica runs; errors of the server itself are always JSON.
PROXY_FAILURES = (500, 502, 503, 504)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the token to the other server."""

    def redirect_request(self, *_: Any) -> None:
        """Returns no further request, so the redirect is an HTTPError."""


_OPENER = urllib.request.build_opener(_NoRedirects)


class ServerError(Exception):
    """The server answered with an error, or did not answer.

    Attributes:
        status: HTTP status; 0: no response; 503 also if a proxy answers that it reaches no replica.
        retry_after: Seconds after which to try again; None: the response has no Retry-After.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None):
        super().__init__(message if status == 0 else f"{status}: {message}")
        self.status, self.retry_after = status, retry_after


class LostReplicaError(ServerError):
    """A replica was lost before it answered: the proxy reported this, or the connection was closed."""


@refuse_unknown_names
class Client:
    """An HTTP client of one server. Its methods raise ServerError, and InputError for what HTTP or JSON cannot hold.

    Args:
        url: URL of the server.
        token: Bearer token, if the server has tokens.
        timeout: Seconds to wait for the server, for each read.

    Raises:
        InputError: If the URL is not one of HTTP, or if a header cannot hold the token.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, timeout: float = 60.0):
        if not isinstance(url, str) or urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InputError(f"{url}: expected http://… or https://…")
        if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
            raise InputError(f"{Parameter('token')}: expected printable ASCII characters, without a line break")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._token = token

    def search(self, query: str, *, task: str = "default", k: int = 10, **options: Any) -> list[FoundPassage]:
        """Returns the top k hits of a query: passages, or documents with their best passage if documents are split.

        Args:
            query: The query.
            task: Name of the task.
            k: Number of hits.
            options: Other fields of `POST /v1/search`: mode or source, by, filter, rerank, timeout_ms, allow_partial,
                explain, release.
        """
        [hits] = self.search_all([query], task=task, k=k, **options)
        return hits

    def search_all(
        self, queries: Sequence[str], *, task: str = "default", k: int = 10, **options: Any
    ) -> list[list[FoundPassage]]:
        """Returns the top k passages of each query, in order. Takes the arguments of `search`."""
        answer = self.search_response({"queries": list(queries), "task": task, "k": k, **options})
        return [[FoundPassage(**hit) for hit in result["hits"]] for result in answer["results"]]

    def search_response(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the response to a request of `POST /v1/search`, with its release and times."""
        return self._post("/v1/search", dict(request))

    def embed(
        self, texts: Sequence[str], *, task: str = "default", input_type: Literal["query", "passage"] = "query"
    ) -> np.ndarray:
        """Returns the vectors of texts as a task encodes them, float32 [n, dim]."""
        body = {"model": task, "input": list(texts), "input_type": input_type, "encoding_format": "base64"}
        rows = [base64.b64decode(row["embedding"]) for row in self._post("/v1/embeddings", body)["data"]]
        return np.stack([np.frombuffer(row, "<f4") for row in rows])

    def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """Returns the probability that each document answers the query, float32 [n]."""
        scores = np.empty(len(documents), np.float32)
        for result in self._post("/v1/rerank", {"query": query, "documents": list(documents)})["results"]:
            scores[result["index"]] = result["relevance_score"]
        return scores

    def tasks(self) -> list[dict[str, Any]]:
        """Returns the tasks of the live release."""
        return list(self._send_with_retry("GET", "/v1/tasks")["tasks"])

    def put_task(self, name: str, folder: str | Path, *, index: str | None = None) -> dict[str, Any]:
        """Uploads a prompt and serves it as a task; returns the task. Needs an administrator's token.

        Args:
            name: Name of the task.
            folder: Folder with prompt.safetensors and prompt.json.
            index: Index that the task searches, or embeddings; None: as the backbone's own task.
        """
        boundary = uuid.uuid4().hex
        pieces = []
        for field, file in (("prompt", PROMPT_WEIGHTS), ("settings", PROMPT_SETTINGS)):
            head = f'Content-Disposition: form-data; name="{field}"; filename="{file}"\r\n\r\n'
            pieces.append(head.encode() + Path(folder, file).read_bytes())
        if index is not None:
            pieces.append(f'Content-Disposition: form-data; name="index"\r\n\r\n{index}'.encode())
        mark = f"--{boundary}".encode()
        body = b"".join(mark + b"\r\n" + piece + b"\r\n" for piece in pieces) + mark + b"--\r\n"
        return self._send_with_retry("PUT", _task_path(name), body, f"multipart/form-data; boundary={boundary}")

    def drop_task(self, name: str) -> None:
        """Stops serving a task. Needs an administrator's token."""
        try:
            self._send("DELETE", _task_path(name))
        except LostReplicaError:
            try:
                self._send("DELETE", _task_path(name))
            except ServerError as error:
                if error.status != 404:  # 404: the replica deleted the task before it was lost
                    raise

    def switch(self, release: str | None = None) -> str:
        """Makes another release live and returns its id. Needs an administrator's token.

        Args:
            release: Id of an earlier release; None: a new release of the artifacts that the store holds now.
        """
        body = json.dumps({"release": release}).encode()
        return str(self._send_with_retry("PUT", "/v1/release", body, "application/json")["release"])

    def info(self) -> dict[str, Any]:
        """Returns the description of the live release: the JSON of `GET /v1/info`."""
        return self._send_with_retry("GET", "/v1/info")

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        try:
            content = json.dumps(plain_value(body))
        except TypeError as error:
            raise InputError(f"{error}: expected values that JSON can hold") from None
        return self._send_with_retry("POST", path, content.encode(), "application/json")

    def _send_with_retry(
        self, method: str, path: str, body: bytes | None = None, content_type: str | None = None
    ) -> dict[str, Any]:
        """Sends a repeatable request, and repeats it once if its replica is lost; returns the response."""
        try:
            return self._send(method, path, body, content_type)
        except LostReplicaError:
            return self._send(method, path, body, content_type)

    def _send(
        self, method: str, path: str, body: bytes | None = None, content_type: str | None = None
    ) -> dict[str, Any]:
        headers = {"Content-Type": content_type} if content_type else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                content = error.read()
            try:
                message = str(json.loads(content)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = content.decode(errors="replace")[:200]
                if error.code in PROXY_FAILURES:
                    message = f"the proxy reaches no replica ({error.code}: {message})"
                    raise LostReplicaError(503, message, retry_after=1.0) from None
            if location := error.headers.get("Location"):
                message = f"{self.url} redirects to {shown(location)}: expected the URL of a server"
            wait = error.headers.get("Retry-After", "")  # a proxy may give a date
            raise ServerError(error.code, message, float(wait) if wait.isdecimal() else None) from None
        except ValueError as error:  # for example of a host name that IDNA cannot encode
            raise InputError(f"{self.url}: no request can be sent to this URL: {error}") from error
        # The connection closed before the end of the response.
        except (ConnectionError, http.client.HTTPException) as error:
            raise LostReplicaError(0, f"{self.url} does not answer: {error}") from error
        except OSError as error:
            raise ServerError(0, f"{self.url} does not answer: {error}") from error
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ServerError(0, f"{self.url} does not answer with a JSON object, as a riptide server does")
        return document


def _task_path(name: str) -> str:
    return f"/v1/tasks/{urllib.parse.quote(name, safe='')}"
