"""A client of a riptide server, over Python's own HTTP.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retriever.model.files import PROMPT_SETTINGS, PROMPT_WEIGHTS
from serve.protocol import FoundPassage

# Statuses of a proxy, such as Ray's HAProxy, while no replica runs; the server's own errors are always JSON.
PROXY_FAILURES = (500, 502, 503, 504)


class ServerError(Exception):
    """The server's refusal.

    Attributes:
        status: Of HTTP; 0: the server did not answer; 503 also if a proxy answered that it reaches no replica.
        retry_after: Seconds after which to try again; None: the server did not say so.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None):
        super().__init__(message if status == 0 else f"{status}: {message}")
        self.status, self.retry_after = status, retry_after


class LostReplicaError(ServerError):
    """A replica was lost before it answered: a proxy says so, or has closed the connection."""


class Client:
    """url: of the server. token: a bearer token, where it wants one. timeout: seconds.

    Raises ValueError for what is no URL of http; its methods raise ServerError.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, timeout: float = 60.0):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{url}: expected http://… or https://…")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._token = token

    def search(self, query: str, *, task: str = "default", k: int = 10, **options: Any) -> list[FoundPassage]:
        """The k best passages. options: mode or source, filter, rerank, timeout_ms, allow_partial, as `POST /v1/search`
        has them."""
        [hits] = self.search_all([query], task=task, k=k, **options)
        return hits

    def search_all(
        self, queries: Sequence[str], *, task: str = "default", k: int = 10, **options: Any
    ) -> list[list[FoundPassage]]:
        """The k best passages of each question, in order."""
        answer = self._post("/v1/search", {"queries": list(queries), "task": task, "k": k, **options})
        return [[FoundPassage(**hit) for hit in result["hits"]] for result in answer["results"]]

    def embed(
        self, texts: Sequence[str], *, task: str = "default", input_type: Literal["query", "passage"] = "query"
    ) -> np.ndarray:
        """Vectors of texts by a task's prompt: float32 [n, dim]."""
        body = {"model": task, "input": list(texts), "input_type": input_type, "encoding_format": "base64"}
        rows = [base64.b64decode(row["embedding"]) for row in self._post("/v1/embeddings", body)["data"]]
        return np.stack([np.frombuffer(row, "<f4") for row in rows])

    def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """The probability that each document answers: float32 [n]."""
        scores = np.empty(len(documents), np.float32)
        for result in self._post("/v1/rerank", {"query": query, "documents": list(documents)})["results"]:
            scores[result["index"]] = result["relevance_score"]
        return scores

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks that are being served."""
        return list(self._call("GET", "/v1/tasks")["tasks"])

    def put_task(self, name: str, folder: str | Path, *, index: str | None = None) -> dict[str, Any]:
        """Serve the prompt in a folder (prompt.safetensors and prompt.json) under a name; takes an administrator."""
        boundary = uuid.uuid4().hex
        pieces = []
        for field, file in (("prompt", PROMPT_WEIGHTS), ("settings", PROMPT_SETTINGS)):
            head = f'Content-Disposition: form-data; name="{field}"; filename="{file}"\r\n\r\n'
            pieces.append(head.encode() + Path(folder, file).read_bytes())
        if index is not None:
            pieces.append(f'Content-Disposition: form-data; name="index"\r\n\r\n{index}'.encode())
        mark = f"--{boundary}".encode()
        body = b"".join(mark + b"\r\n" + piece + b"\r\n" for piece in pieces) + mark + b"--\r\n"
        return self._call("PUT", _task(name), body, f"multipart/form-data; boundary={boundary}")

    def drop_task(self, name: str) -> None:
        """Serve a task no longer; takes an administrator."""
        self._call("DELETE", _task(name))

    def switch(self, release: str | None = None) -> str:
        """Go back to an earlier release, or (None) on to what the store holds now; its id. Takes an administrator."""
        body = json.dumps({"release": release}).encode()
        return str(self._call("PUT", "/v1/release", body, "application/json")["release"])

    def info(self) -> dict[str, Any]:
        """What the server says of itself."""
        return self._call("GET", "/v1/info")

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        return self._call("POST", path, json.dumps(body).encode(), "application/json")

    def _call(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> dict[str, Any]:
        """Returns the answer to a request. It is sent once more if its replica is lost: all can be repeated."""
        try:
            return self._send(method, path, body, kind)
        except LostReplicaError:
            return self._send(method, path, body, kind)

    def _send(self, method: str, path: str, body: bytes | None, kind: str | None) -> dict[str, Any]:
        headers = {"Content-Type": kind} if kind else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return dict(json.load(answer))
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
            wait = error.headers.get("Retry-After")
            raise ServerError(error.code, message, float(wait) if wait else None) from None
        except (ConnectionError, http.client.HTTPException) as error:  # closed before the end of the answer
            raise LostReplicaError(0, f"{self.url} does not answer: {error}") from error
        except OSError as error:
            raise ServerError(0, f"{self.url} does not answer: {error}") from error


def _task(name: str) -> str:
    return f"/v1/tasks/{urllib.parse.quote(name, safe='')}"
