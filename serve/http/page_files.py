"""Routes of the search page and of the page that describes the API, which load nothing from other servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.exceptions import HTTPException

from riptide.serve.http.api_page import render_api
from riptide.serve.http.guard import access

PAGE = Path(__file__).parents[1] / "page"
_POLICY = "Content-Security-Policy"
HEADERS = {
    # Even if a text is not escaped, the page runs only its own scripts and connects only to this server.
    _POLICY: "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL of the page contains the query
    "Cache-Control": "no-cache",  # files of different versions do not work together
}
# The page that describes the API holds its style sheet.
API_HEADERS = HEADERS | {_POLICY: HEADERS[_POLICY].replace("style-src 'self'", "style-src 'unsafe-inline'")}


def page_routes(openapi: Callable[[], dict[str, Any]]) -> APIRouter:
    """Returns the routes of the page on which users try searches, and of the page that describes the API.

    Args:
        openapi: Returns the OpenAPI document of the application.
    """
    routes = APIRouter()

    @routes.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    @access("public")
    async def api_page() -> Response:
        return HTMLResponse(render_api(openapi()), headers=API_HEADERS)

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @access("public")
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)

    @routes.get("/page/{name}", include_in_schema=False)
    @access("public")
    async def page_file(name: str) -> Response:
        files = {file.name: file for file in PAGE.iterdir()}
        if name not in files:
            raise HTTPException(404)
        return FileResponse(files[name], headers=HEADERS)

    return routes
