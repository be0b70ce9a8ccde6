"""The application: the routers of all APIs behind one guard."""

from __future__ import annotations

import logging
import time

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero.server import chat, completions, messages, models, operations, page_routes, responses
from hetero.server.errors import add_error_handlers
from hetero.server.generation import SEND
from hetero.server.safety import Guard, Policy
from hetero.server.state import AppState

log = logging.getLogger("hetero.server")


def create_app(state: AppState, policy: Policy | None = None) -> FastAPI:
    """The application that serves ``state``, whose model may be attached later, under ``policy``."""
    policy = policy or Policy()
    app = FastAPI(title="hetero", docs_url=None, redoc_url=None)
    for part in (operations, models, completions, chat, messages, responses, page_routes):
        app.include_router(part.router(state))
    add_error_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(Guard, policy=policy)
    if policy.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(policy.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(Counted, state=state)
    return app


class Counted:
    """Counts every answer by route and status, and writes one line of each to the log."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A defect is answered outside of this, by 500.
        status = 500
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope[SEND] = send
        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            self._state.metrics.answered(method, route, status)
            took = time.perf_counter() - began
            address = (scope.get("client") or ("-",))[0]
            log.info("%s %s %s %d %.3f s", address, method, route, status, took)
