"""The page that describes the HTTP API: the routes, and the fields of requests and responses."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from riptide.base.html_page import html_page, html_table

_BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "enum", "pattern", "default")


def render_api(document: Mapping[str, Any]) -> str:
    """Returns the HTML page of an OpenAPI document."""
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
    for name in _BOUNDS:
        values = [each[name] for each in (schema, *schema.get("anyOf", ())) if each.get(name) is not None]
        words += [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for value in values]
    return ", ".join(words)
