"""Routes for whoever runs the server: is it alive, is it ready, what is it doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hetero.server.state import AppState


def router(state: AppState) -> APIRouter:
    """``/health``, ``/health/live``, ``/health/ready`` and ``/metrics``."""
    routes = APIRouter()

    @routes.get("/health/live", summary="200 while the process answers.")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    # /health is what most tools ask before they send work, so it says the same as /health/ready.
    @routes.get("/health", summary="200 when requests are served; 503 while loading or draining.")
    @routes.get("/health/ready", summary="200 when requests are served; 503 while loading or draining.")
    async def ready(http: Request) -> JSONResponse:
        phase = state.phase
        body: dict[str, Any] = {"status": "ok" if phase == "ready" else phase}
        # It answers without a key, and what is served here is not for everybody's eyes then.
        if not getattr(http.state, "stranger", False):
            body["model"] = state.name
        if phase != "loading":
            status = state.engine.status()
            body |= {"running": status.running, "waiting": status.waiting}
        if phase == "ready":
            return JSONResponse(body)
        return JSONResponse(body, 503, {"retry-after": "2"})

    @routes.get("/metrics", summary="Counters in Prometheus' format.", response_class=Response)
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
