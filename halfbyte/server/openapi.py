"""/openapi.json: a description of the server, made of the tables by which its requests are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .fields import Table
from .refusals import MESSAGES, TYPES
from .settings import Settings
from .tables import Model

REFUSALS = tuple(status for status in TYPES if status not in (404, 405, 499, 500))


@dataclass(frozen=True)
class Operation:
    """A route: the method of the API that answers it, and what its body may have."""

    path: str
    answer: str
    says: str
    body: Callable[[Model, Settings], Table] | None = None  # POST with a body, else GET
    streams: bool = False
    media: str = "application/json"

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


def describe(operations: tuple[Operation, ...], tables: Mapping[str, Table], guarded: bool) -> dict[str, Any]:
    """`tables` by path. `guarded`: a key is asked for."""
    paths: dict[str, Any] = {}
    for one in operations:
        path = one.path.replace(":path}", "}")
        paths[path] = {one.method.lower(): _operation(one, tables.get(one.path), guarded and one.path != "/health")}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }  # fmt: skip
    errors = {"OpenAIError": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR}
    said = {"title": "halfbyte", "version": __version__, "description": "A model behind OpenAI's and Anthropic's APIs."}
    parts = {"schemas": errors, "securitySchemes": schemes}
    return {"openapi": "3.1.0", "info": said, "paths": paths, "components": parts}


def _operation(one: Operation, table: Table | None, guarded: bool) -> dict[str, Any]:
    shape = "AnthropicError" if one.path.startswith(MESSAGES) else "OpenAIError"
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    media: dict[str, Any] = {one.media: {"schema": {"type": "object"} if one.media == "application/json" else {}}}
    if one.streams:
        media["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = (*REFUSALS, 404, 500) if table is not None else (401, 403, 404, 431, 503)
    described: dict[str, Any] = {
        "operationId": one.answer, "summary": one.says,
        "responses": {
            "200": {"description": "The answer.", "content": media},
            **{str(status): {"description": TYPES[status], "content": refusal} for status in sorted(statuses)},
        },
    }  # fmt: skip
    if table is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": table.describe()}}}
    if "{name" in one.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if guarded:
        described["security"] = [{"bearer": []}, {"key": []}]
    return described


_WORDS = {"type": ["string", "null"]}
_ERROR = {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _WORDS, "code": _WORDS},
}  # fmt: skip
OPENAI_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}
_SHORT = {
    "type": "object", "required": ["type", "message"],
    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
}  # fmt: skip
ANTHROPIC_ERROR = {
    "type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"}, "error": _SHORT},
}  # fmt: skip
