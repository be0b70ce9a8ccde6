"""The page at ``/``, its files, and ``/live``, which feeds it."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from hetero.server.live import Live, TooManyListenersError
from hetero.server.state import AppState

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

# Nothing from elsewhere, nothing inline: text of a model that became markup by a mistake could still not run
# a script, load a picture (and so tell somebody what was said), or send a form.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for anew each time, and answered with 304: a new version of the server has a new page.
    "cache-control": "no-cache",
}


def router(state: AppState) -> APIRouter:
    """``GET /``, ``/page/NAME``, ``/favicon.ico`` and ``/live``."""
    routes = APIRouter(include_in_schema=False)
    served = _files()
    live = Live(state)

    def file(name: str, request: Request) -> Response:
        if name not in served:
            raise HTTPException(404, f"the page has no file '{name}'")
        content, kind, tag = served[name]
        headers = HEADERS | {"etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return file("index.html", request)

    @routes.get("/favicon.ico")
    async def icon(request: Request) -> Response:
        return file("icon.svg", request)

    @routes.get("/page/{name}")
    async def part(name: str, request: Request) -> Response:
        return file(name, request)

    @routes.get("/live")
    async def events() -> Response:
        try:
            live.check()
        except TooManyListenersError as error:
            raise HTTPException(503, str(error), {"retry-after": "5"}) from None
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(live.lines(), media_type="text/event-stream", headers=headers)

    return routes


def _files() -> dict[str, tuple[bytes, str, str]]:
    """Name -> content, type, entity tag."""
    found = {}
    for entry in files("hetero.server").joinpath("page").iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
