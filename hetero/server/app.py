"""Routes. Everything that can be wrong with a request is found before its answer begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hetero.core import HeteroError, InputError
from hetero.engine.generate import Engine
from hetero.engine.request import Request as Job
from hetero.engine.request import Result
from hetero.server.answers import DONE, Writer, error_body, sse
from hetero.server.protocol import ChatBody, CompletionBody, Sampling
from hetero.server.worker import Ticket, Worker

# nginx's code for a client that left; nobody reads it.
CLIENT_LEFT = 499


class NoSuchModelError(InputError):
    """The request names a model that is not served here."""


def create_app(engine: Engine, name: str) -> FastAPI:
    """The application that serves ``engine`` as model ``name``."""
    worker = Worker(engine)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(worker.close)

    app = FastAPI(title="hetero", lifespan=life, docs_url=None, redoc_url=None)
    started = Writer("chat", name).created

    @app.get("/health")
    async def health() -> dict[str, Any]:
        running, waiting = worker.load()
        return {"status": "ok", "model": name, "running": running, "waiting": waiting}

    described = {"id": name, "object": "model", "created": started, "owned_by": "hetero"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _check_model(model, name)
        return described

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_model(body.model, name)
        job = await run_in_threadpool(_chat_job, engine, body)
        return await _answer(request, worker, job, Writer("chat", name, body.include_usage), body)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check_model(body.model, name)
        job = await run_in_threadpool(_completion_job, engine, body)
        return await _answer(request, worker, job, Writer("text", name, body.include_usage), body)

    app.state.stop = worker.stop
    _add_error_handlers(app)
    return app


def _check_model(asked: str | None, name: str) -> None:
    if asked is not None and asked != name:
        raise NoSuchModelError(f"model: '{asked}' is not served here; this server has '{name}'")


def _chat_job(engine: Engine, body: ChatBody) -> Job:
    tokenizer = engine.runnable.tokenizer
    if tokenizer is None:
        raise InputError("messages: this model has no tokenizer; use /v1/completions with token ids")
    prompt = tokenizer.chat([message.plain() for message in body.messages])
    return _job(engine, body, prompt, body.limit)


def _completion_job(engine: Engine, body: CompletionBody) -> Job:
    prompt = body.text_or_ids()
    tokenizer = engine.runnable.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("prompt: this model has no tokenizer; give a list of token ids")
        prompt = tokenizer.encode(prompt)
    return _job(engine, body, prompt, body.limit)


def _job(engine: Engine, body: Sampling, prompt: list[int], limit: int | None) -> Job:
    job = Job(tuple(prompt), body.sampling(), limit, body.stops)
    engine.check(job)
    return job


async def _answer(request: Request, worker: Worker, job: Job, writer: Writer, body: Sampling) -> Response:
    if body.stream:
        return StreamingResponse(_stream(worker, job, writer), media_type="text/event-stream")
    result = await _collect(request, worker.submit(job))
    if result is None:
        return Response(status_code=CLIENT_LEFT)
    if result.finish_reason == "cancelled":
        return JSONResponse(error_body("the server is shutting down", "server_error"), 503)
    return JSONResponse(writer.whole(result))


async def _stream(worker: Worker, job: Job, writer: Writer) -> AsyncIterator[str]:
    # Not before the first chunk is asked for: a client that has left by then leaves nothing to cancel.
    ticket = worker.submit(job)
    try:
        if writer.kind == "chat":
            yield sse(writer.opening())
        async for event in ticket.events():
            if isinstance(event, str):
                yield sse(writer.piece(event))
            elif event.finish_reason == "cancelled":
                yield sse(error_body("the server is shutting down", "server_error"))
                return
            else:
                if event.tail:
                    yield sse(writer.piece(event.tail))
                yield sse(writer.closing(event))
                if writer.include_usage:
                    yield sse(writer.usage(event))
        yield DONE
    except HeteroError as error:
        yield sse(error_body(str(error), "server_error"))
    finally:
        # Reached as well when the client has left: the task is then cancelled where it waits.
        ticket.cancel()


async def _collect(request: Request, ticket: Ticket) -> Result | None:
    """The result, or None when the client leaves before it."""
    reading = asyncio.ensure_future(_last(ticket))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await reading if reading.done() else None
    finally:
        ticket.cancel()
        reading.cancel()
        leaving.cancel()


async def _last(ticket: Ticket) -> Result:
    async for event in ticket.events():
        if isinstance(event, Result):
            return event
    raise HeteroError("the answer has no end")


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HeteroError)
    async def told(_: Request, error: HeteroError) -> JSONResponse:
        if isinstance(error, NoSuchModelError):
            return JSONResponse(
                error_body(str(error), "invalid_request_error", "model", "model_not_found"), 404
            )
        if isinstance(error, InputError):
            return JSONResponse(error_body(str(error), "invalid_request_error", _param(str(error))), 400)
        return JSONResponse(error_body(str(error), "server_error"), 500)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "json_invalid":
            return JSONResponse(error_body("the body is not valid JSON", "invalid_request_error"), 400)
        if not place and isinstance(error.body, bytes):
            # It has not been parsed: what curl -d sends without a header says that it is a form.
            what = "the body must be JSON, sent with the header 'content-type: application/json'"
            return JSONResponse(error_body(what, "invalid_request_error"), 400)
        if not place and first["type"] in ("missing", "model_attributes_type"):
            return JSONResponse(error_body("the body must be a JSON object", "invalid_request_error"), 400)
        what = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        where = ".".join(place) or "body"
        return JSONResponse(
            error_body(f"{where}: {what}", "invalid_request_error", place[0] if place else None), 400
        )

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)

    @app.exception_handler(Exception)
    async def defect(_: Request, __: Exception) -> JSONResponse:
        # The traceback goes to the log by the framework; the client is told nothing of our files.
        return JSONResponse(error_body("internal error", "server_error"), 500)


def _param(message: str) -> str | None:
    """The field at fault, with which our messages begin: ``stop: ...``, ``seed=-1: ...``."""
    head = message.split(":", 1)[0].split("=", 1)[0]
    return head if ":" in message and head.isidentifier() else None
