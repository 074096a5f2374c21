"""The page: its files, which browsers load from this server only."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from riptide.serve.http.guard import access

PAGE = Path(__file__).parents[1] / "page"
HEADERS = {
    # The page runs its own scripts, and loads and sends nothing elsewhere, even if a text were not escaped.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # its address contains the query
    "Cache-Control": "no-cache",  # files of several versions do not fit together
}


def page_routes() -> APIRouter:
    """Returns the routes of the page to try searches."""
    routes = APIRouter()

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
