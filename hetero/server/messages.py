"""/v1/messages: Anthropic's way to ask for the same answers.

Every version of the API is served alike; ``temperature``, ``top_k`` and ``top_p``, which newer ones have no
more, are honoured in all. Thinking is shown unless the request switches it off; its blocks are signed by a
word that says so, since nothing here checks them when they come back. Arguments of a call that are not JSON
become ``{"INVALID_JSON": "..."}`` in a whole answer, and are streamed as they are.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from hetero.core import HeteroError, InputError
from hetero.engine.request import Result
from hetero.server.chat import Plan
from hetero.server.dialects import Content, Delta, Reasoning, ToolArgs, ToolStart
from hetero.server.direct import DirectRoute
from hetero.server.errors import Told, told
from hetero.server.generation import EventStream, Generation, begin, finished
from hetero.server.messages_protocol import CountBody, MessagesBody
from hetero.server.models import check_model
from hetero.server.replies import Reply, object_of, plan_for
from hetero.server.state import AppState
from hetero.server.turns import client_of

log = logging.getLogger("hetero.server")

# A stream that says nothing for this long says that it lives, seconds.
PING_S = 15.0
_VERSION = re.compile(r"\d{4}-\d\d-\d\d")
SIGNATURE = "unsigned"

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: Told) -> dict[str, Any]:
    """In the form of Anthropic's API."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.body()["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesRoute(DirectRoute):
    """Errors in this API's form, and the id of each request in a header."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handle(http: HttpRequest) -> Response:
            try:
                response = await inner(http)
            except (HeteroError, RequestValidationError, HTTPException) as error:
                what = told(error)
                response = JSONResponse(error_body(what), what.status, what.headers)
            except Exception as error:
                log.exception("a request failed")
                response = JSONResponse(error_body(told(error)), 500)
            response.headers["request-id"] = "req_" + secrets.token_hex(12)
            return response

        return handle


def router(state: AppState) -> APIRouter:
    """``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""
    routes = APIRouter(route_class=MessagesRoute)

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, http: HttpRequest) -> Response:
        _check(state, body, http)
        plan = await run_in_threadpool(plan_for, state, body, client_of(http, body.user))
        generations = begin(state, plan.requests)
        answer = _Message(state, body, plan, generations[0])
        if body.stream:
            return EventStream(generations, answer.events())
        return JSONResponse(await finished(http, generations, answer.whole()))

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountBody, http: HttpRequest) -> Response:
        _check(state, body, http)
        plan = await run_in_threadpool(plan_for, state, body, "")
        return JSONResponse({"input_tokens": len(plan.requests[0].prompt)})

    return routes


def _check(state: AppState, body: CountBody, http: HttpRequest) -> None:
    version = http.headers.get("anthropic-version")
    if version is not None and not _VERSION.fullmatch(version):
        raise InputError(f"anthropic-version: must be a date such as 2023-06-01, got '{version}'")
    check_model(state, body.model)


class _Message:
    """One answer, whole or as events."""

    def __init__(self, state: AppState, body: MessagesBody, plan: Plan, generation: Generation) -> None:
        self._body, self._model = body, state.name
        self._prompt = plan.requests[0].prompt
        self._reply = Reply(plan, generation)
        self._id = "msg_" + secrets.token_hex(12)
        self._blocks: list[dict[str, Any]] = []

    async def whole(self) -> dict[str, Any]:
        arguments: dict[int, list[str]] = {}
        async for delta in self._reply.deltas():
            if self._hidden(delta):
                continue
            opened = self._open(delta)
            if opened is not None:
                self._blocks.append(opened)
            block = self._blocks[-1]
            if isinstance(delta, Content):
                block["text"] += delta.text
            elif isinstance(delta, Reasoning):
                block["thinking"] += delta.text
                block["signature"] = SIGNATURE
            elif isinstance(delta, ToolArgs):
                arguments.setdefault(len(self._blocks) - 1, []).append(delta.fragment)
        for place, parts in arguments.items():
            text = "".join(parts)
            found = object_of(text)
            self._blocks[place]["input"] = {"INVALID_JSON": text} if found is None else found
        return self._head(self._blocks, self._usage(self._reply.result)) | self._end()

    async def events(self) -> AsyncIterator[str]:
        try:
            yield _event("message_start", message=self._head([], self._usage(None)))
            async for delta in with_pauses(self._reply.deltas(), PING_S):
                if delta is None:
                    yield _event("ping")
                elif not self._hidden(delta):
                    for line in self._lines(delta):
                        yield line
            for line in self._close():
                yield line
            yield _event("message_delta", delta=self._end(), usage=self._usage(self._reply.result))
            yield _event("message_stop")
        except HeteroError as error:
            yield _event("error", **error_body(told(error)))

    def _hidden(self, delta: Delta) -> bool:
        return isinstance(delta, Reasoning) and not self._body.shows_thinking

    def _open(self, delta: Delta) -> dict[str, Any] | None:
        """The block that begins with this delta, if one does."""
        kind = self._blocks[-1]["type"] if self._blocks else None
        if isinstance(delta, Content) and kind != "text":
            return {"type": "text", "text": "", "citations": None}
        if isinstance(delta, Reasoning) and kind != "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if isinstance(delta, ToolStart):
            return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        return None

    def _lines(self, delta: Delta) -> list[str]:
        lines = []
        opened = self._open(delta)
        if opened is not None:
            lines += self._close()
            self._blocks.append(opened)
            lines.append(_event("content_block_start", index=len(self._blocks) - 1, content_block=opened))
            if len(self._blocks) == 1:
                lines.append(_event("ping"))
        if isinstance(delta, Content):
            lines.append(self._delta(type="text_delta", text=delta.text))
        elif isinstance(delta, Reasoning):
            lines.append(self._delta(type="thinking_delta", thinking=delta.text))
        elif isinstance(delta, ToolArgs):
            lines.append(self._delta(type="input_json_delta", partial_json=delta.fragment))
        return lines

    def _close(self) -> list[str]:
        """The end of the last block."""
        if not self._blocks:
            return []
        lines = []
        if self._blocks[-1]["type"] == "thinking":
            lines.append(self._delta(type="signature_delta", signature=SIGNATURE))
        return [*lines, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _delta(self, **delta: str) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, result: Result | None) -> dict[str, Any]:
        """The parts of the input add up to the prompt. Before the end, none is known to be reused."""
        cached = 0 if result is None else result.usage.cached_tokens
        return {
            "input_tokens": len(self._prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if result is None else result.usage.completion_tokens,
        }

    def _end(self) -> dict[str, Any]:
        result = self._reply.result
        reason = "end_turn"
        if result.finish_reason == "length" and result.usage.completion_tokens < self._body.max_tokens:
            reason = "model_context_window_exceeded"
        elif result.finish_reason in ("length", "deadline"):
            reason = "max_tokens"
        elif result.stop is not None:
            reason = "stop_sequence"
        elif self._reply.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": result.stop}


def _event(name: str, **fields: Any) -> str:
    body = json.dumps({"type": name, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {body}\n\n"


async def with_pauses(deltas: AsyncIterator[Delta], pause_s: float) -> AsyncIterator[Delta | None]:
    """The deltas, and None whenever none has come for ``pause_s``."""
    waiting: asyncio.Future[Delta] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(deltas))
            done, _ = await asyncio.wait({waiting}, timeout=pause_s)
            if not done:
                yield None
                continue
            ended, waiting = waiting, None
            try:
                delta = ended.result()
            except StopAsyncIteration:
                return
            yield delta
    finally:
        if waiting is not None:
            waiting.cancel()
