"""Routes of the search page and of the page that describes the API, which load nothing from other servers."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.exceptions import HTTPException

from riptide.base.html_page import html_page, html_table
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


API_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": HEADERS["Content-Security-Policy"].replace(
        "style-src 'self'", "style-src 'unsafe-inline'"
    ),
}  # The style sheet of the page is within it.


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


def render_api(document: Mapping[str, Any]) -> str:
    """Returns the HTML page of an OpenAPI document: the routes, and the fields of requests and responses."""
    title = f"{document['info']['title']} {document['info']['version']}"
    routes = [
        (f"{method.upper()} {path}", route.get("description", ""), ", ".join(sorted(set(_models_of(route)))))
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    body = [
        f"<h1>{html.escape(title)}</h1><p>The schema of the API is at <a href='/openapi.json'>/openapi.json</a>.</p>",
        html_table(("route", "what it does", "requests and responses"), routes),
    ]
    for name, model in document.get("components", {}).get("schemas", {}).items():
        required = model.get("required", ())
        fields = [
            (field, _describe_type(schema), "required" if field in required else "", schema.get("description", ""))
            for field, schema in model.get("properties", {}).items()
        ]
        body += [f"<h2>{html.escape(name)}</h2><p>{html.escape(model.get('description', ''))}</p>"]
        body += [html_table(("field", "type", "", "meaning"), fields)]
    return html_page(title, body)


def _models_of(value: Any) -> Iterator[str]:
    """Yields the names of the models to which a part of an OpenAPI document refers."""
    if isinstance(value, dict):
        yield from (text.rpartition("/")[2] for key, text in value.items() if key == "$ref")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _models_of(each)


def _describe_type(schema: Mapping[str, Any]) -> str:
    """Returns the type of a field, with its bounds and its default."""
    kinds = [each.get("type") or ", ".join(_models_of(each)) for each in schema.get("anyOf", (schema,))]
    words = [" or ".join(filter(None, kinds))]
    for name in ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "enum", "pattern", "default"):
        words += [f"{name} {each[name]}" for each in (schema, *schema.get("anyOf", ())) if each.get(name) is not None]
    return ", ".join(words)
