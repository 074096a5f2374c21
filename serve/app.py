"""The service over HTTP: routes, tokens, limits, errors. What a request means is `serve.service`'s."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import Depends, FastAPI, File, Form, Request, UploadFile
from fastapi.responses import FileResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from retriever.errors import InputError
from serve.direct import Direct
from serve.engine import Answer
from serve.errors import add_errors, as_json
from serve.limits import Guard
from serve.live import Live
from serve.metrics import Metrics
from serve.protocol import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    ErrorResponse,
    InfoResponse,
    Name,
    ReleaseRequest,
    RerankRequest,
    RerankResponse,
    SearchRequest,
    SearchResponse,
    TaskOut,
    TasksResponse,
)
from serve.release import Task
from serve.security import Tokens
from serve.service import ConflictError, NotReadyError, Service, UnknownTaskError

PAGE = Path(__file__).parent / "page"
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": what}
    for status, what in {
        400: "The request cannot be answered as it is", 401: "No token, or an unknown one", 403: "Not this token",
        404: "No such task", 408: "The body did not come", 409: "Others changed the same", 413: "Too large",
        422: "Not as the schema says", 429: "Too many requests: Retry-After", 503: "Late, incomplete or not ready",
    }.items()
}  # fmt: skip


def build_app(service: Service, tokens: Tokens, *, about: Callable[[Live], dict[str, Any]]) -> FastAPI:
    """The ASGI application. about: what `/v1/info` says of a release beside what the service knows."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(service.follow())
        yield
        following.cancel()
        await service.drain()
        service.close()

    app = FastAPI(
        title="riptide", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None, responses=RESPONSES,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if tokens else [],  # for its document: Guard sees to it
    )  # fmt: skip
    metrics = Metrics(service)
    direct = Direct()
    add_errors(app)

    @app.post("/v1/search", response_model=SearchResponse)
    async def search(request: SearchRequest, http: Request) -> Response:
        """Passages for questions: dense (by the index), exact (every vector), bm25, or hybrid."""
        begun = time.perf_counter()
        live, answers = await service.search(request)
        metrics.searched(answers)
        for answer, _ in answers:
            if answer.error is not None:
                raise answer.error
        took = _took(answers)
        document = {
            "request_id": http.state.request_id,
            "release": live.release.id,
            "task": request.task,
            "mode": request.mode,
            "took_ms": {**took, "total": round(1000 * (time.perf_counter() - begun), 3)},
            "results": [_result(text, answer) for text, (answer, _) in zip(request.texts, answers, strict=True)],
        }
        return as_json(document)

    @app.post("/v1/embeddings", response_model=EmbeddingsResponse)
    async def embeddings(request: EmbeddingsRequest, http: Request) -> Response:
        """Vectors of texts, as OpenAI's clients ask for them: model is the task."""
        vectors, tokens = await service.embed(
            request.texts, request.model, request.input_type, request.timeout_ms / 1000
        )
        if request.dimensions not in (None, vectors.shape[1]):
            raise InputError(f"dimensions={request.dimensions}: vectors have {vectors.shape[1]}")
        coded = request.encoding_format == "base64"
        rows = vectors.astype("<f4")
        data = [
            {"object": "embedding", "index": n, "embedding": base64.b64encode(row.tobytes()).decode() if coded else row}
            for n, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        metrics.tokens.inc(tokens)
        return as_json({"object": "list", "model": request.model, "data": data, "usage": usage})

    @app.post("/v1/rerank", response_model=RerankResponse)
    async def rerank(request: RerankRequest, http: Request) -> Response:
        """Documents by the probability that they answer a question, best first."""
        live, scores = await service.rerank(request.query, request.documents, request.timeout_ms / 1000)
        order = np.argsort(-scores, kind="stable")[: request.top_n]
        results = [{"index": int(n), "relevance_score": float(scores[n])} for n in order]
        return as_json({"request_id": http.state.request_id, "model": live.release.reranker, "results": results})

    direct.add("/v1/search", SearchRequest, search)
    direct.add("/v1/embeddings", EmbeddingsRequest, embeddings)
    direct.add("/v1/rerank", RerankRequest, rerank)

    @app.get("/v1/tasks", response_model=TasksResponse)
    async def tasks() -> Response:
        """The tasks that are being served."""
        live = _live(service)
        return as_json({"release": live.release.id, "tasks": [_task(live, task) for task in live.release.tasks]})

    @app.get("/v1/tasks/{name}", response_model=TaskOut)
    async def get_task(name: Name) -> Response:
        live = _live(service)
        if name not in live.tasks:
            raise UnknownTaskError(name)
        return as_json(_task(live, live.tasks[name]))

    @app.put("/v1/tasks/{name}", response_model=TaskOut)
    async def put_task(
        name: Name,
        prompt: Annotated[UploadFile, File(description="prompt.safetensors")],
        settings: Annotated[UploadFile, File(description="prompt.json")],
        index: Annotated[str | None, Form(description="Of its passages; by default the backbone's own.")] = None,
    ) -> Response:
        """Serve a prompt under a name, at once and after restarts; answers when every replica has it."""
        await service.put_task(name, await prompt.read(), await settings.read(), index)
        live = _live(service)
        if name not in live.tasks:
            raise ConflictError(f"task {name!r} was put, and has been deleted by now")
        return as_json(_task(live, live.tasks[name]))

    @app.delete("/v1/tasks/{name}", response_model=TasksResponse)
    async def delete_task(name: Name) -> Response:
        await service.drop_task(name)
        live = _live(service)
        return as_json({"release": live.release.id, "tasks": [_task(live, task) for task in live.release.tasks]})

    @app.put("/v1/release", response_model=TasksResponse)
    async def put_release(request: ReleaseRequest) -> Response:
        """Serve a new index, or go back to an earlier release; no request fails meanwhile."""
        await service.switch(request.release)
        live = _live(service)
        return as_json({"release": live.release.id, "tasks": [_task(live, task) for task in live.release.tasks]})

    @app.get("/v1/info", response_model=InfoResponse)
    async def info() -> Response:
        live = _live(service)
        corpus, release = live.opened.corpus, live.release
        words = any(task.bm25 for task in release.tasks)
        known = {
            "release": release.id, "encoder": release.encoder, "passages": corpus.num_rows - len(corpus.deleted),
            "reranker": release.reranker, "modes": ["dense", "exact", *(["bm25", "hybrid"] if words else [])],
            "filters": {name: str(kind) for name, kind in live.columns.items()}, "tasks": sorted(live.tasks),
        }  # fmt: skip
        return as_json({**known, **await asyncio.to_thread(about, live)})

    @app.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def healthz() -> Response:
        return as_json({"status": "ok"})

    @app.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
    async def readyz() -> Response:
        return as_json({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        files = {file.name: file for file in PAGE.iterdir()}
        if name not in files:
            raise HTTPException(404)
        return FileResponse(files[name])

    # Before FastAPI's own layers, and still a FastAPI, whose routes Ray Serve names requests by.
    direct.app = app.build_middleware_stack()
    app.middleware_stack = Guard(direct, tokens=tokens, metrics=metrics)
    return app


def _live(service: Service) -> Live:
    if service.live is None:
        raise NotReadyError
    return service.live


def _took(answers: list[tuple[Answer, float]]) -> dict[str, float]:
    """Milliseconds by stage, of the slowest question of a request."""
    took = {"queue": max(waited for _, waited in answers)}
    for answer, _ in answers:
        for stage, seconds in answer.took.items():
            took[stage] = max(took.get(stage, 0.0), seconds)
    return {stage: round(1000 * seconds, 3) for stage, seconds in took.items()}


def _result(text: str, answer: Answer) -> dict[str, Any]:
    shards = answer.shards
    hits = [
        {
            "id": hit.id, "rank": rank, "score": hit.score, "title": hit.title, "text": hit.text,
            "metadata": orjson.Fragment(hit.metadata) if hit.metadata else None, "scores": hit.scores,
        }
        for rank, hit in enumerate(answer.hits, 1)
    ]  # fmt: skip
    counts = {"total": shards.total, "successful": shards.successful, "failed": shards.failed,
              "timed_out": shards.timed_out}  # fmt: skip
    return {"query": text, "hits": hits, "shards": counts}


def _task(live: Live, task: Task) -> dict[str, Any]:
    key = f"prompts/{task.prompt}"
    return {
        "name": task.name, "prompt": live.release.fingerprints[key] if task.prompt else None,
        "length": live.lengths.get(task.name, {}), "embeddings": task.embeddings, "index": task.index,
        "bm25": task.bm25,
    }  # fmt: skip
