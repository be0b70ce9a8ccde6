"""A failed request, as its client is told: a status and one message, never a path or a traceback of ours."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hetero.core import HeteroError, InputError
from hetero.engine.request import QueueFull
from hetero.server.generation import ClientLeftError
from hetero.server.state import NotReadyError

# nginx's code for a client that left; nobody reads it.
CLIENT_LEFT = 499
NOT_FOUND, WRONG_METHOD = 404, 405
# Of a path that is told back, characters.
_MOST_OF_PATH = 200

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"


class NoSuchModelError(InputError):
    """The request names a model that is not served here."""


@dataclass(frozen=True, slots=True)
class Told:
    """An error as the client sees it; every API writes it in its own form."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """In the form of OpenAI's API."""
        # A message may quote the request, whose JSON can escape half a surrogate pair: no UTF-8 has that.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def told(error: Exception) -> Told:
    """Any exception that ends a request."""
    if isinstance(error, NoSuchModelError):
        return Told(404, str(error), INVALID, "model", "model_not_found")
    if isinstance(error, InputError):
        return Told(400, str(error), INVALID, _param(str(error)))
    if isinstance(error, QueueFull):
        wait = str(max(1, math.ceil(error.retry_after_s)))
        return Told(429, str(error), BUSY, code="queue_full", headers={"retry-after": wait})
    if isinstance(error, NotReadyError):
        return Told(503, str(error), SERVER, headers={"retry-after": "1"})
    if isinstance(error, ClientLeftError):
        return Told(CLIENT_LEFT, str(error), SERVER)
    if isinstance(error, HeteroError):
        return Told(500, str(error), SERVER)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Told(error.status_code, str(error.detail), INVALID, headers=dict(error.headers or {}))
    return Told(500, "internal error", SERVER)


def _invalid(error: RequestValidationError) -> Told:
    """A body that is not what the schema says."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Told(400, "the body is not valid JSON", INVALID)
    if not place and isinstance(error.body, bytes):
        # It has not been parsed: what curl -d sends without a header says that it is a form.
        what = "the body must be JSON, sent with the header 'content-type: application/json'"
        return Told(400, what, INVALID)
    if not place and first["type"] in ("missing", "model_attributes_type"):
        return Told(400, "the body must be a JSON object", INVALID)
    what = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    # Before what a check of ours says.
    what = what.removeprefix("Value error, ")
    return Told(400, f"{'.'.join(place) or 'body'}: {what}", INVALID, place[0] if place else None)


def _param(message: str) -> str | None:
    """The field at fault, with which our messages begin: ``stop: ...``, ``seed=-1: ...``."""
    head = message.split(":", 1)[0].split("=", 1)[0].split(".", 1)[0].split("[", 1)[0]
    return head if ":" in message and head.isidentifier() else None


def _no_route(request: Request, status: int) -> str:
    """Which path or method there is not, and what there is instead."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    path = request.url.path[:_MOST_OF_PATH]
    asked = f"{request.method} {path}"
    if status != NOT_FOUND:
        takes = " or ".join(method.upper() for method in paths.get(path, {}))
        return f"{asked}: the path takes {takes}" if takes else f"{asked}: no such method"
    # Clients that were given an address without /v1, or with it twice, are the most frequent.
    like = [f"/v1{path}", path.removeprefix("/v1"), *difflib.get_close_matches(path, paths, n=1)]
    near = next((one for one in like if one in paths), None)
    hint = f"did you mean {near}? " if near else ""
    return f"{asked}: no such path; {hint}there are {', '.join(sorted(paths))}"


def add_error_handlers(app: FastAPI) -> None:
    """Every failure outside a stream goes through ``told``."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        # The traceback of a defect goes to the log by the framework.
        answer = told(error)
        status = answer.status if isinstance(error, HTTPException) else 0
        if status in (NOT_FOUND, WRONG_METHOD) and answer.message == HTTPStatus(status).phrase:
            # Of the router, which says no more than the status does.
            answer = replace(answer, message=_no_route(request, status))
        return answer.response()

    for kind in (HeteroError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
