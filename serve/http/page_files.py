"""Routes of the files of the search page, which loads nothing from other servers."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from riptide.serve.http.guard import access

PAGE = Path(__file__).parents[1] / "page"
HEADERS = {
    # Even if a text is not escaped, the page runs only its own scripts and connects only to this server.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL of the page contains the query
    "Cache-Control": "no-cache",  # files of different versions do not work together
}


def page_routes() -> APIRouter:
    """Returns the routes of the page, on which users try searches."""
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
