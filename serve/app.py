"""The routes of the HTTP API, with tokens, limits and errors. `riptide.serve.service` answers the requests."""

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
from fastapi import APIRouter, Depends, FastAPI, File, Form, Request, UploadFile
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from riptide.indexing.corpus.filters import type_name
from riptide.indexing.corpus.row_sets import filter_cache
from riptide.indexing.lucene.stop_words import STOP_WORDS
from riptide.serve.callers import ANONYMOUS, Caller
from riptide.serve.http.connections import Connections
from riptide.serve.http.guard import AccessTable, Guard, Tokens, access
from riptide.serve.http.http_errors import add_errors, response_to
from riptide.serve.http.page_files import page_routes
from riptide.serve.http.routes import (
    DirectRoutes,
    JsonRoute,
    UploadRoute,
    cancel_on_disconnect,
    json_list_response,
    json_response,
    remaining_s,
)
from riptide.serve.http.tracing import TracedApp
from riptide.serve.parts.query_states import QueryAnswer
from riptide.serve.protocol import (
    ClientOut,
    EmbeddingsRequest,
    EmbeddingsResponse,
    ErrorResponse,
    InfoResponse,
    ModelOut,
    ModelsResponse,
    Name,
    ReleaseRequest,
    RerankRequest,
    RerankResponse,
    SearchRequest,
    SearchResponse,
    TaskOut,
    TasksResponse,
)
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.release_tasks import ServedTask, supported_modes
from riptide.serve.server_metrics import SAMPLE_S, Exporter, Metrics, PrometheusExporter
from riptide.serve.service.audit import show_audit_lines
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.loops import repeat_forever
from riptide.serve.service.prompt_uploads import PromptUpload
from riptide.serve.service.service import CERTIFY_S, ERASURES_S, FREE_S, LOOK_S, Service
from riptide.serve.service_errors import ConflictError, NotReadyError, RequestError, UnknownTaskError
from riptide.telemetry.spans import open_tracer

MAX_PROMPT_BYTES = 256 << 20  # maximum size in bytes of a request that uploads a prompt
# Maximum count of numbers in vectors that the event loop itself writes as JSON, which takes less than a millisecond.
SMALL = 4_096
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": what}
    for status, what in {
        400: "The request cannot be answered as it is",
        401: "No token, or an unknown one",
        403: "The token does not allow this",
        404: "No such task",
        408: "The head or the body of the request did not arrive in time",
        409: "The live release is not the one of the request, others changed it at the same time, or a release is "
        "refused because its encoder gives other vectors than those stored",
        413: "The body is too large",
        414: "The URL is too long",
        422: "The request does not match the schema",
        429: "Too many requests: Retry-After",
        431: "The headers are too large",
        503: "Late, incomplete, not ready, or files of the service cannot be read: Retry-After",
    }.items()
}


def build_app(
    changes: ReleaseChanges, tokens: Tokens, *, connections: Connections | None = None, exporter: Exporter | None = None
) -> FastAPI:
    """Builds the ASGI application of a service.

    Args:
        changes: Changes of the live release of the service that answers the requests.
        tokens: Tokens of users and administrators.
        connections: Connections of the server that runs the application, for the metrics; None: another server runs
            it.
        exporter: Exports the metrics; None: `/metrics` does.
    """
    service = changes.service
    metrics = Metrics(service, exporter or PrometheusExporter(service.store.url), connections, tokens.owners.values())
    app = FastAPI(
        title="riptide",
        version="1",
        lifespan=_lifespan(changes, metrics),
        docs_url=None,  # FastAPI's page loads a script from another server; page_routes has one that loads nothing
        redoc_url=None,
        responses=RESPONSES,
        # Only documents the tokens in OpenAPI: Guard checks them.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if tokens else [],
    )
    add_errors(app)
    routers = (
        search_routes(service, metrics),
        model_routes(service, metrics),
        *release_routes(changes),
        *task_routes(changes),
        monitoring_routes(service, metrics),
        page_routes(app.openapi),
    )
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    for router in routers:
        app.include_router(router)
    # Guard runs before FastAPI's own layers. The object stays a FastAPI, as Ray Serve names requests by its routes.
    direct = DirectRoutes(app.build_middleware_stack(), routes, response_to)
    guard: Any = Guard(
        direct,
        AccessTable(routes),
        tokens=tokens,
        on_response=metrics.count_request,
        on_large=service.note_large_request,
    )
    if tracer := open_tracer():
        metrics.on_search = tracer.add_stages
        guard = TracedApp(guard, tracer)
    app.middleware_stack = guard
    return app


def _lifespan(
    changes: ReleaseChanges, metrics: Metrics
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Returns the lifespan of the application: it starts the background loops, and ends them and the service."""
    service = changes.service

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loops = (
            repeat_forever(changes.refresh, LOOK_S, "the release that is to be live cannot be served"),
            repeat_forever(service.check_if_due, LOOK_S, "the parts cannot be checked"),
            repeat_forever(service.look_for_newer, LOOK_S, "newer artifacts are not noticed"),
            repeat_forever(service.look_for_erasures, ERASURES_S, "erasures of passages are not noticed"),
            repeat_forever(metrics.update_gauges, SAMPLE_S, "the metrics cannot be sampled"),
            repeat_forever(service.certify, CERTIFY_S, "searches cannot be certified"),
            repeat_forever(service.return_freed_memory, FREE_S, "freed memory cannot be returned"),
        )
        show_audit_lines()
        tasks = [asyncio.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()
        await service.drain()
        changes.uploads.close()
        service.close()

    return lifespan


def search_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Returns the router of the search route."""
    json_routes = APIRouter(route_class=JsonRoute)

    @json_routes.post("/v1/search", response_model=SearchResponse)
    @access("user")
    async def search(request: SearchRequest, http: Request) -> Response:
        """Returns the top k passages of each query, by a mode or by sources of the task.

        Modes are dense (with the index), exact (every vector), bm25, and hybrid.
        """
        start = time.perf_counter()
        async with cancel_on_disconnect(http):
            live, search, answers = await service.search(
                request, remaining_s(http, request.timeout_ms), http.state.caller
            )
        metrics.count_search(answers)
        for answer, _ in answers:
            if answer.error is not None:
                raise answer.error
        stage_ms = _stage_ms(answers)
        document = {
            "request_id": http.state.request_id,
            "release": live.release.id,
            "task": request.task,
            "mode": None if request.source else request.mode,
            "source": search.source,
            **({"raised_settings": search.raised_settings} if search.efforts else {}),
            "took_ms": {**stage_ms, "total": round(1000 * (time.perf_counter() - start), 3)},
        }
        return json_list_response(document, "results", [answer.json for answer, _ in answers])

    return json_routes


def model_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Returns the router of routes that apply a model to the texts of the request: embeddings and re-ranking."""
    json_routes = APIRouter(route_class=JsonRoute)

    @json_routes.post("/v1/embeddings", response_model=EmbeddingsResponse)
    @access("user")
    async def embeddings(request: EmbeddingsRequest, http: Request) -> Response:
        """Returns vectors of texts, in the format of OpenAI's API: `model` is the task."""
        async with cancel_on_disconnect(http):
            vectors, cuts = await service.embed(
                request.texts,
                request.model,
                request.input_type,
                remaining_s(http, request.timeout_ms),
                http.state.caller,
            )
        if request.dimensions not in (None, vectors.shape[1]):
            raise RequestError(
                f"dimensions: found {request.dimensions}, expected {vectors.shape[1]}, the length of the vectors"
            )
        is_base64 = request.encoding_format == "base64"
        data = (
            _embeddings_json(vectors, is_base64)
            if vectors.size <= SMALL
            else await asyncio.to_thread(_embeddings_json, vectors, is_base64)
        )
        usage = {
            "prompt_tokens": cuts.kept_tokens,
            "total_tokens": cuts.kept_tokens,
            "truncated_inputs": cuts.cut_texts,
            "truncated_tokens": cuts.cut_tokens,
        }
        metrics.count_embedding(cuts.kept_tokens)
        return json_list_response({"object": "list", "model": request.model, "usage": usage}, "data", data)

    @json_routes.post("/v1/rerank", response_model=RerankResponse)
    @access("user")
    async def rerank(request: RerankRequest, http: Request) -> Response:
        """Ranks documents by the probability that they answer a query, best first."""
        async with cancel_on_disconnect(http):
            timeout_s = remaining_s(http, request.timeout_ms)
            live, scores = await service.rerank(request.query, request.documents, timeout_s, http.state.caller)
        order = np.argsort(-scores, kind="stable")[: request.top_n]
        results = [{"index": int(n), "relevance_score": float(scores[n])} for n in order]
        model = public_name(live.release.reranker or "")
        return json_response({"request_id": http.state.request_id, "model": model, "results": results})

    return json_routes


def release_routes(changes: ReleaseChanges) -> tuple[APIRouter, APIRouter]:
    """Returns the routers of routes that show and switch the live release."""
    service = changes.service
    routes, json_routes = APIRouter(), APIRouter(route_class=JsonRoute)

    @json_routes.put("/v1/release", response_model=TasksResponse)
    @access("admin")
    async def put_release(request: ReleaseRequest, http: Request) -> Response:
        """Makes a new release of the store's artifacts live, or an earlier release; no request fails meanwhile."""
        await changes.switch(request.release, http.state.caller)
        return _tasks_response(_require_live_release(service))

    @routes.get("/v1/info", response_model=InfoResponse)
    @access("user")
    async def info(http: Request) -> Response:
        """Returns the live release (encoder, modes, filters, tasks, number of passages), and what is newer."""
        live = _require_live_release(service)
        caller: Caller = http.state.caller
        corpus, release = live.corpus, live.release
        document = {
            "release": release.id,
            "encoder": public_name(release.encoder) if release.encoder else None,
            "query_model": release.query_model,
            "dim": None,
            "similarity": None,
            "numerics": None,
            "prompt_bytes": 0,
            "stored_similarity": service.stored_similarities,
            "filter_cache": filter_cache.usage()._asdict(),
            "passages": corpus.num_rows - len(corpus.deleted),
            "is_split": corpus.is_split,
            "reranker": public_name(release.reranker) if release.reranker else None,
            "modes": supported_modes(*release.tasks),
            "filters": {name: type_name(kind) for name, kind in live.columns.items()},
            "tasks": sorted(live.tasks),
            "newer": service.newer_artifacts,
            "stop_words": sorted(STOP_WORDS),
            "examples": service.examples,
            "certified": _certified_recalls(service),
            "raised_settings": _all_raised_settings(service),
            "client": None if caller is ANONYMOUS else {name: getattr(caller, name) for name in ClientOut.model_fields},
        }
        return json_response({**document, **await service.describe(live)})

    return routes, json_routes


def task_routes(changes: ReleaseChanges) -> tuple[APIRouter, APIRouter]:
    """Returns the routers of routes that list, put and delete tasks."""
    service = changes.service
    routes, upload_routes = APIRouter(), APIRouter(route_class=UploadRoute)

    @routes.get("/v1/tasks", response_model=TasksResponse)
    @access("user")
    async def tasks() -> Response:
        """Returns the tasks of the live release."""
        return _tasks_response(_require_live_release(service))

    @routes.get("/v1/models", response_model=ModelsResponse)
    @access("user")
    async def models() -> Response:
        """Returns the tasks in the format of OpenAI's API, in which a task is a model."""
        return json_response(
            {"object": "list", "data": [_model_document(name) for name in sorted(_require_live_release(service).tasks)]}
        )

    @routes.get("/v1/models/{name}", response_model=ModelOut)
    @access("user")
    async def get_model(name: Name) -> Response:
        """Returns one task in the format of OpenAI's API."""
        live = _require_live_release(service)
        if name not in live.tasks:
            raise UnknownTaskError.for_name(name, live.tasks)
        return json_response(_model_document(name))

    @routes.get("/v1/tasks/{name}", response_model=TaskOut)
    @access("user")
    async def get_task(name: Name) -> Response:
        """Returns one task of the live release."""
        live = _require_live_release(service)
        if name not in live.tasks:
            raise UnknownTaskError.for_name(name, live.tasks)
        return json_response(_task_document(live, live.tasks[name]))

    @upload_routes.put("/v1/tasks/{name}", response_model=TaskOut)
    @access("admin", max_bytes=MAX_PROMPT_BYTES)
    async def put_task(
        http: Request,
        name: Name,
        prompt: Annotated[UploadFile, File(description="prompt.safetensors")],
        settings: Annotated[UploadFile, File(description="prompt.json")],
        index: Annotated[
            str | None,
            Form(description="Index of its passages, or embeddings; default: those of the backbone's own task."),
        ] = None,
    ) -> Response:
        """Serves a prompt under a name, at once and after restarts; the response comes when every replica has it."""
        await changes.put_task(PromptUpload(name, prompt.file, settings.file, index), http.state.caller)
        live = _require_live_release(service)
        if name not in live.tasks:
            raise ConflictError(f"task {name!r} was put, and has been deleted by now")
        return json_response(_task_document(live, live.tasks[name]))

    @routes.delete("/v1/tasks/{name}", response_model=TasksResponse)
    @access("admin")
    async def delete_task(http: Request, name: Name) -> Response:
        """Stops serving a task, and returns the remaining ones."""
        await changes.drop_task(name, http.state.caller)
        return _tasks_response(_require_live_release(service))

    return routes, upload_routes


def monitoring_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Returns the router of the monitoring routes: health, readiness and metrics."""
    routes = APIRouter()

    @routes.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    @access("public")
    async def healthz() -> Response:
        return json_response({"status": "ok"})

    @routes.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
    @access("public")
    async def readyz() -> Response:
        state = service.readiness()
        return json_response(state, 200 if state["ready"] else 503)

    @routes.get("/metrics", include_in_schema=False)
    @access("user")
    async def read_metrics() -> Response:
        if (text := metrics.render()) is None:
            raise HTTPException(404, "on Ray Serve, each node's Ray exports the metrics: scrape its MetricsExportPort")
        return Response(text, media_type="text/plain; version=0.0.4")

    return routes


def _require_live_release(service: Service) -> ReleaseArtifacts:
    if service.live is None:
        raise NotReadyError
    return service.live


def _model_document(task: str) -> dict[str, Any]:
    return {"id": task, "object": "model", "created": 0, "owned_by": "riptide"}


def public_name(model: str) -> str:
    """Returns the name of a model for clients: of a path the last part; NAME, OWNER/NAME and models/NAME unchanged."""
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    return Path(model).name if is_path else model


def _stage_ms(answers: list[tuple[QueryAnswer, float]]) -> dict[str, float]:
    """Returns the milliseconds of each stage, for the slowest query of a request in that stage."""
    seconds_by_stage = {"queue": max(waited for _, waited in answers)}
    for answer, _ in answers:
        for stage, seconds in answer.stage_seconds.items():
            seconds_by_stage[stage] = max(seconds_by_stage.get(stage, 0.0), seconds)
    return {stage: round(1000 * seconds, 3) for stage, seconds in seconds_by_stage.items()}


def _embeddings_json(vectors: np.ndarray, is_base64: bool) -> list[bytes]:
    """Returns the JSON text of each vector for the response to a request for embeddings."""
    return [
        orjson.dumps(
            {
                "object": "embedding",
                "index": number,
                "embedding": base64.b64encode(row.tobytes()).decode() if is_base64 else row,
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        for number, row in enumerate(vectors.astype("<f4"))
    ]


def _certified_recalls(service: Service) -> list[dict[str, Any]]:
    """Returns the fields of `protocol.RecallOut` of each group of searches that has samples."""
    return [
        {
            **group._asdict(),
            "samples": recall.samples,
            **dict(zip(("recall", "lower", "upper"), recall.interval, strict=True)),
            "is_below_target": recall.is_below_target,
        }
        for group, recall in sorted(service.certifier.recalls.items() if service.certifier else ())
        if recall.samples
    ]


def _all_raised_settings(service: Service) -> list[dict[str, Any]]:
    """Returns the fields of `protocol.RaisedSettingOut` of each setting that the certification has raised."""
    return [
        {
            "task": searches.task,
            "mode": searches.mode,
            "source": searches.source.source_text,
            "setting": raised.name,
            "value": raised.value,
            "built": raised.built,
        }
        for searches, raised in (service.certifier.raised.items() if service.certifier else ())
    ]


def _tasks_response(live: ReleaseArtifacts) -> Response:
    """Returns the response that lists all tasks of the live release."""
    return json_response(
        {"release": live.release.id, "tasks": [_task_document(live, task) for task in live.release.tasks]}
    )


def _task_document(live: ReleaseArtifacts, task: ServedTask) -> dict[str, Any]:
    key = f"prompts/{task.prompt}"
    return {
        "name": task.name,
        "prompt": live.release.fingerprints[key][:16] if task.prompt else None,
        "length": live.prompt_lengths.get(task.name, {}),
        "embeddings": task.embeddings,
        "index": task.index,
        "bm25": task.bm25,
        "modes": supported_modes(task),
        "sources": [source.source_text for source in task.served_sources()],
    }
