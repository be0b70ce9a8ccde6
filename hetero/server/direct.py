"""The short way from a request to its endpoint, for time to the first token."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from fastapi.routing import APIRoute

# Characters of text that are read on the event loop: the way to a thread and back takes longer.
SHORT = 2048


class DirectRoute(APIRoute):
    """For endpoints of exactly a ``body``, a model, and ``http``, which answer by a Response.

    A good request goes from its bytes to the endpoint. Every other one goes the framework's way, which tells
    what is wrong with it.
    """

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        framework = super().get_route_handler()
        endpoint = self.endpoint
        model = get_type_hints(endpoint)["body"]

        async def handle(http: HttpRequest) -> Response:
            kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return await framework(http)
            try:
                body = model.model_validate(json.loads(await http.body()))
            except Exception:
                return await framework(http)
            answer: Response = await endpoint(body=body, http=http)
            return answer

        return handle


async def worked(characters: int, work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns: on a thread of its own, unless it reads so few ``characters``."""
    if characters <= SHORT:
        return work(*args)
    return await run_in_threadpool(work, *args)
