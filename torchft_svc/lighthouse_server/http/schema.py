"""The OpenAPI schema of the API, derived from the records that the answers are made of."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from torchft_svc.core.limits import MAX_DURATION_S, MAX_REASON_LENGTH
from torchft_svc.version import VERSION

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_REASON_TEXT = {"type": "string", "maxLength": MAX_REASON_LENGTH, "pattern": r"^[ -~]*$"}
_WITHIN_S = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION_S}
# The bodies of commands.
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
REASON = {**NOTHING, "properties": {"reason": _REASON_TEXT}}
DRAIN = {**NOTHING, "properties": {"reason": _REASON_TEXT, "within_s": _WITHIN_S}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string", "description": "For programs."},
                "message": {"type": "string", "description": "For people."},
                "leader": {
                    "type": "string",
                    "description": "host:port of the lighthouse that leads (not_leader).",
                },
            },
        }
    },
}
# What each kind of request may be refused with, beside what is particular to it.
_MEANINGS = {
    400: "The request is malformed, or its header Host names another server.",
    401: "The token is missing or wrong.",
    403: "The command comes from a page of another site, or this lighthouse has no token.",
    404: "There is no such job, group, run or node.",
    408: "The request did not arrive in time.",
    409: "The command cannot be carried out now; the message says why.",
    413: "The request is too large.",
    415: "The request is not application/json.",
    503: "Another lighthouse leads, or too many readers are connected.",
}
READ, READ_ONE, COMMAND = (400, 401, 503), (400, 401, 404, 503), tuple(_MEANINGS)


class Schema:
    """Collects the paths of the API, and the records that they name."""

    def __init__(self) -> None:
        self._paths: dict[str, dict[str, Any]] = {}
        self._records: dict[str, Any] = {"Error": _ERROR}

    def add_read(
        self,
        path: str,
        summary: str,
        answer: type[Any] | str,
        refusals: Sequence[int],
        query: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add a path for GET; ``answer``: a record, or a media type."""
        self._add(path, "get", summary, 200, answer, refusals, query or {}, None)

    def add_command(
        self, path: str, summary: str, answer: type[Any], status: int, body: Mapping[str, Any]
    ) -> None:
        """Add a path for POST; ``body``: the schema of what is sent."""
        self._add(path, "post", summary, status, answer, COMMAND, {}, body)

    def document(self) -> dict[str, Any]:
        """Return the whole schema."""
        return {
            "openapi": "3.1.0",
            "info": {"title": "torchft lighthouse", "version": VERSION},
            "paths": self._paths,
            "components": {
                "schemas": self._records,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            # Only a lighthouse with a token asks for it; commands always need one.
            "security": [{}, {"token": []}],
        }

    def _add(
        self,
        path: str,
        method: str,
        summary: str,
        status: int,
        answer: type[Any] | str,
        refusals: Sequence[int],
        query: Mapping[str, Mapping[str, Any]],
        body: Mapping[str, Any] | None,
    ) -> None:
        if isinstance(answer, str):
            content: dict[str, Any] = {answer: {"schema": {"type": "string"}}}
        else:
            content = {"application/json": {"schema": self._of_type(answer)}}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        operation: dict[str, Any] = {
            "operationId": re.sub(r"\W+", "_", f"{method} {path}").strip("_"),
            "summary": summary,
            "parameters": [
                *(
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in re.findall(r"\{(\w+)\}", path)
                ),
                *({"name": name, "in": "query", "schema": each} for name, each in query.items()),
            ],
            "responses": {
                str(status): {"description": summary, "content": content},
                **{
                    str(each): {"description": _MEANINGS[each], "content": error}
                    for each in refusals
                },
            },
        }
        if body is not None:
            operation["security"] = [{"token": []}]
            content = {"application/json": {"schema": body}}
            operation["requestBody"] = {"required": True, "content": content}
        self._paths.setdefault(path, {})[method] = operation

    def _of_type(self, kind: Any) -> dict[str, Any]:
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (types.UnionType, typing.Union):
            (inner,) = (each for each in arguments if each is not type(None))
            return {"anyOf": [self._of_type(inner), {"type": "null"}]}
        if origin is tuple:
            return {"type": "array", "items": self._of_type(arguments[0])}
        if origin in (dict, collections.abc.Mapping):
            return {"type": "object", "additionalProperties": self._of_type(arguments[1])}
        if isinstance(kind, enum.EnumMeta):
            return {"type": "string", "enum": [each.value for each in kind]}  # type: ignore[var-annotated]
        return self._of_record(kind)

    def _of_record(self, kind: type[Any]) -> dict[str, Any]:
        name = kind.__name__
        if name not in self._records:
            self._records[name] = {}  # it may contain itself
            fields = dataclasses.fields(kind)
            hints = typing.get_type_hints(kind)
            self._records[name] = {
                "type": "object",
                "description": inspect.cleandoc(kind.__doc__ or "").replace("``", "`"),
                "required": [each.name for each in fields],
                "properties": {each.name: self._of_type(hints[each.name]) for each in fields},
                "additionalProperties": False,
            }
        return {"$ref": f"#/components/schemas/{name}"}
