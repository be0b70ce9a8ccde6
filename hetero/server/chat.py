"""/v1/chat/completions: messages in, the assistant's turn out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from hetero.core import HeteroError, InputError
from hetero.engine.grammar import Grammar
from hetero.engine.logprobs import TokenLogprob
from hetero.engine.request import Piece, Request, Result
from hetero.server.answers import DONE, Head, chat_logprobs, sse, usage
from hetero.server.chat_protocol import ChatBody
from hetero.server.dialects import Dialect
from hetero.server.direct import DirectRoute
from hetero.server.errors import told
from hetero.server.generation import EventStream, Generation, begin, finished, merged
from hetero.server.grammars import MAX_CALLS, Calls, forced, writes_calls
from hetero.server.models import check_model
from hetero.server.prompts import conversation
from hetero.server.state import AppState
from hetero.server.tools import Offer, offer, schema_of
from hetero.server.turns import Reader, Turn, client_of, finish_reason


def router(state: AppState) -> APIRouter:
    """``POST /v1/chat/completions``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        check_model(state, body.model)
        plan = await run_in_threadpool(plan_of, state, body, client_of(http, body.user))
        answer = _Answer(state, body, plan)
        generations = begin(state, plan.requests)
        if body.stream:
            return EventStream(generations, answer.lines(generations))
        return JSONResponse(await finished(http, generations, answer.whole(generations)))

    return routes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call comes to: a request for each choice, and how their text is read."""

    requests: list[Request]
    prompt: str
    offer: Offer
    dialect: Dialect
    one_call: bool

    def reader(self) -> Reader:
        """Of one answer."""
        return Reader(self.dialect.parser(self.prompt, self.offer.offered), one_call=self.one_call)


def plan_of(state: AppState, body: ChatBody, client: str) -> Plan:
    tokenizer = state.tokenizer
    if tokenizer is None:
        raise InputError("messages: this model has no tokenizer; use /v1/completions with token ids")
    wanted = offer(body)
    if wanted.tools and not state.dialect.tools:
        raise InputError(
            "tools: this model's chat template has no format of tool calls that this server knows; "
            "--tool-format names one"
        )
    variables = _variables(body, tokenizer.template)
    prompt = conversation(tokenizer, body.messages, wanted.tools, variables)
    one_call = body.parallel_tool_calls is False
    grammar, dialect = _held(state, body, prompt, wanted)
    visible = tokenizer.special(dialect.tags)
    state.check_text(prompt)
    ids = tuple(tokenizer.encode_rendered(prompt))
    vocabulary = state.engine.runnable.vocabulary
    alike: tuple[int, ...] = ()
    if state.engine.states:
        alike = state.openings.of(tokenizer, body.messages, wanted.tools, variables)
    requests = [
        Request(
            ids,
            body.sampling(vocabulary, number),
            body.limit,
            body.stops,
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.alternatives,
            client=client,
            grammar=grammar,
            visible=visible,
            alike=alike,
        )
        for number in range(body.choices)
    ]
    return Plan(requests, prompt, wanted, dialect, one_call)


def _variables(body: ChatBody, template: str) -> dict[str, Any]:
    """What the template reads besides the messages. Raises InputError for an effort that it cannot set."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort} | variables
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"} | variables
    if effort != "medium":
        raise InputError("reasoning_effort: this model's chat template has no such setting; leave it out")
    return variables


def _held(state: AppState, body: ChatBody, prompt: str, wanted: Offer) -> tuple[Grammar | None, Dialect]:
    """The grammar that the answer is held to, None for none; and the dialect in which it will be."""
    schema, field = schema_of(body)
    dialect, mode = state.dialect, wanted.mode
    native = writes_calls(dialect)
    if mode != "required" and schema is None and not (native and wanted.strict):
        return None, dialect
    if mode == "auto" and not native:
        raise InputError(
            "response_format: not together with tools that may be called or not, for a model of the format "
            f"{dialect.tool_format}; leave out one of them"
        )
    calls = None
    if wanted.tools:
        dialect = forced(dialect)
        # A model that does not know the format does not know that another call may follow.
        most = MAX_CALLS if native and body.parallel_tool_calls is not False else 1
        calls = Calls(wanted.offered, mode == "required", most)
    if mode == "required":
        schema, field = None, "tool_choice"
    elif schema is None:
        field = "tools"
    return state.grammars.answer(field, dialect, prompt, schema, calls), dialect


class _Answer:
    """Bodies of one call."""

    def __init__(self, state: AppState, body: ChatBody, plan: Plan) -> None:
        assert state.tokenizer is not None
        self._body, self._tokenizer = body, state.tokenizer
        self._turns = [Turn(plan.reader()) for _ in plan.requests]
        self._eos = frozenset() if body.ignore_eos else state.engine.runnable.eos
        self._head = Head("chatcmpl", "chat.completion", state.name)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        choices = []
        results = []
        scores: list[list[TokenLogprob]] = [[] for _ in generations]
        ends: dict[int, Result] = {}
        async for came in merged(generations):
            for index, event in came:
                self._read(index, event, generations[index])
                if isinstance(event, Piece):
                    self._keep(event, scores[index])
                else:
                    ends[index] = event
        for index, turn in enumerate(self._turns):
            results.append(ends[index])
            choices.append(
                {
                    "index": index,
                    "message": turn.message(),
                    "logprobs": self._logprobs(scores[index]),
                    "finish_reason": finish_reason(ends[index], called=turn.reader.called),
                }
            )
        return self._head.body(choices) | {"usage": self._usage(results)}

    async def lines(self, generations: Sequence[Generation]) -> AsyncIterator[str]:
        ends: dict[int, Result] = {}
        scores: list[list[TokenLogprob]] = [[] for _ in generations]
        try:
            for index in range(len(generations)):
                yield self._chunk(index, {"role": "assistant", "content": ""}, [])
            async for came in merged(generations):
                lines = []
                for index, event in came:
                    if isinstance(event, Result):
                        ends[index] = event
                    lines += self._chunks(index, event, generations[index], scores[index])
                if lines:
                    yield "".join(lines)
            if self._body.include_usage:
                counts = {"usage": self._usage([ends[index] for index in range(len(generations))])}
                yield sse(self._head.body([], "chat.completion.chunk") | counts)
            yield DONE
        except HeteroError as error:
            yield sse(told(error).body())

    def _chunks(
        self, index: int, event: Piece | Result, generation: Generation, waiting: list[TokenLogprob]
    ) -> list[str]:
        """``waiting``: scores that wait for their text."""
        if isinstance(event, Piece):
            self._keep(event, waiting)
        chunks = []
        for part in self._read(index, event, generation):
            chunks.append(self._chunk(index, part, waiting))
            waiting.clear()
        if isinstance(event, Result):
            reason = finish_reason(event, called=self._turns[index].reader.called)
            chunks.append(self._chunk(index, {}, waiting, reason))
        return chunks

    def _read(self, index: int, event: Piece | Result, generation: Generation) -> list[dict[str, Any]]:
        """Parts of the message that an event makes certain."""
        turn = self._turns[index]
        if isinstance(event, Result):
            return turn.finish(event.tail)
        parts = turn.feed(event.text)
        if turn.reader.over:
            generation.cancel()
        return parts

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        thinking = sum(turn.reader.thinking_tokens for turn in self._turns)
        return usage(results, len(results)) | {"completion_tokens_details": {"reasoning_tokens": thinking}}

    def _keep(self, piece: Piece, scores: list[TokenLogprob]) -> None:
        # The end of the text is no part of the content.
        if piece.logprob is not None and piece.token not in self._eos:
            scores.append(piece.logprob)

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(scores, self._tokenizer) if self._body.logprobs else None

    def _chunk(
        self, index: int, delta: dict[str, Any], scores: Sequence[TokenLogprob], reason: str | None = None
    ) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(scores) if scores else None,
            "finish_reason": reason,
        }
        body = self._head.body([choice], "chat.completion.chunk")
        return sse(body | ({"usage": None} if self._body.include_usage else {}))
