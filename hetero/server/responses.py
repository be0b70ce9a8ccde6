"""/v1/responses: OpenAI's newer way to ask for the same answers, without its store.

Thinking is a reasoning item with its text in ``content``. Arguments of a call are delivered as the model
wrote them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from hetero.core import HeteroError
from hetero.server.chat import Plan
from hetero.server.dialects import Content, Delta, Reasoning, ToolArgs, ToolEnd, ToolStart
from hetero.server.direct import DirectRoute
from hetero.server.errors import told
from hetero.server.generation import EventStream, Generation, begin, finished
from hetero.server.models import check_model
from hetero.server.replies import Reply, plan_for
from hetero.server.responses_protocol import ResponsesBody, sealed
from hetero.server.state import AppState
from hetero.server.turns import client_of

Event = dict[str, Any]


def router(state: AppState) -> APIRouter:
    """``POST /v1/responses``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
        check_model(state, body.model)
        client = client_of(http, body.safety_identifier or body.user)
        plan = await run_in_threadpool(plan_for, state, body, client)
        generations = begin(state, plan.requests)
        answer = _Response(state, body, plan, generations[0])
        if body.stream:
            return EventStream(generations, answer.lines())
        return JSONResponse(await finished(http, generations, answer.whole()))

    return routes


class _Response:
    """One response: its events as they come, and what they come to."""

    def __init__(self, state: AppState, body: ResponsesBody, plan: Plan, generation: Generation) -> None:
        self._body, self._model = body, state.name
        self._reply = Reply(plan, generation)
        self._id = "resp_" + secrets.token_hex(16)
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._state(self._status())

    async def lines(self) -> AsyncIterator[str]:
        number = 0
        try:
            async for event in self._events():
                yield _line(event, number)
                number += 1
        except HeteroError as error:
            failed = self._state("failed") | {
                "error": {"code": "server_error", "message": told(error).message}
            }
            yield _line({"type": "response.failed", "response": failed}, number)

    async def _events(self) -> AsyncIterator[Event]:
        yield {"type": "response.created", "response": self._state("in_progress")}
        yield {"type": "response.in_progress", "response": self._state("in_progress")}
        async for delta in self._reply.deltas():
            for event in self._take(delta):
                yield event
        status = self._status()
        for event in self._close(status):
            yield event
        yield {"type": f"response.{status}", "response": self._state(status)}

    def _take(self, delta: Delta) -> list[Event]:
        """Events of one delta, and the item that it belongs to brought up to it."""
        open_kind = self._items[-1]["type"] if self._items and self._open else None
        if isinstance(delta, Content):
            events = [] if open_kind == "message" else self._begin(_message())
            self._items[-1]["content"][0]["text"] += delta.text
            return [*events, self._part("response.output_text.delta", delta=delta.text, logprobs=[])]
        if isinstance(delta, Reasoning):
            events = [] if open_kind == "reasoning" else self._begin(_reasoning())
            self._items[-1]["content"][0]["text"] += delta.text
            return [*events, self._part("response.reasoning_text.delta", delta=delta.text)]
        if isinstance(delta, ToolStart):
            return self._begin(_call(delta))
        if isinstance(delta, ToolArgs):
            self._items[-1]["arguments"] += delta.fragment
            return [self._event("response.function_call_arguments.delta", delta=delta.fragment)]
        # A call that the end of the text cuts off is closed with the status of the whole.
        return self._close("completed") if isinstance(delta, ToolEnd) and self._reply.called else []

    @property
    def _open(self) -> bool:
        return bool(self._items) and self._items[-1]["status"] == "in_progress"

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        parts = item.get("content")
        shown = item if parts is None else item | {"content": []}
        events.append(self._at("response.output_item.added", item=shown))
        if parts is not None:
            events.append(self._part("response.content_part.added", part=dict(parts[0])))
        return events

    def _close(self, status: str) -> list[Event]:
        """The end of the last item, if it has not ended."""
        if not self._open:
            return []
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            text = item["arguments"]
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            events = [self._part(f"response.{kind}.done", text=part["text"], **more)]
            events.append(self._part("response.content_part.done", part=dict(part)))
            if item["type"] == "reasoning" and self._body.seals:
                item["encrypted_content"] = sealed(part["text"])
        return [*events, self._at("response.output_item.done", item=item)]

    def _at(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "output_index": len(self._items) - 1, **_copied(more)}

    def _event(self, kind: str, **more: Any) -> Event:
        return self._at(kind, item_id=self._items[-1]["id"], **more)

    def _part(self, kind: str, **more: Any) -> Event:
        return self._event(kind, content_index=0, **more)

    def _status(self) -> str:
        return "incomplete" if self._reply.result.finish_reason in ("length", "deadline") else "completed"

    def _state(self, status: str) -> dict[str, Any]:
        body = self._body
        ended = status in ("completed", "incomplete")
        reasoning = body.reasoning
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": _copied(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.result.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reply.thinking_tokens},
            "total_tokens": usage.total_tokens,
        }


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": "msg_" + secrets.token_hex(16),
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _reasoning() -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "rs_" + secrets.token_hex(16),
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }


def _call(start: ToolStart) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": "fc_" + secrets.token_hex(16),
        "status": "in_progress",
        "call_id": start.id,
        "name": start.name,
        "arguments": "",
    }


def _copied(value: Any) -> Any:
    """Items go on changing after they were shown."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _line(event: Event, number: int) -> str:
    body = json.dumps(event | {"sequence_number": number}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {body}\n\n"
