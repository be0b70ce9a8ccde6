"""/v1/completions: plain text or token ids in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from hetero.core import HeteroError, InputError
from hetero.engine.logprobs import TokenLogprob
from hetero.engine.request import Piece, Request, Result
from hetero.server.answers import DONE, Head, TextLogprobs, sse, usage
from hetero.server.completion_protocol import CompletionBody, Prompt
from hetero.server.direct import DirectRoute, worked
from hetero.server.errors import told
from hetero.server.generation import EventStream, Generation, begin, finished, merged
from hetero.server.models import check_model
from hetero.server.state import AppState
from hetero.server.turns import client_of, finish_reason


def router(state: AppState) -> APIRouter:
    """``POST /v1/completions``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        check_model(state, body.model)
        size = sum(map(len, body.prompts)) * body.choices
        choices = await worked(size, _choices, state, body, client_of(http, body.user))
        answer = _Answer(state, body, choices)
        # From here on the engine works too, on what may be the last free core.
        generations = begin(state, [choice.request for choice in choices])
        if body.stream:
            return EventStream(generations, answer.lines(generations))
        return JSONResponse(await finished(http, generations, answer.whole(generations)))

    return routes


@dataclass(frozen=True, slots=True)
class _Choice:
    request: Request
    echo: str  # what stands before the answer


def _choices(state: AppState, body: CompletionBody, client: str) -> list[_Choice]:
    """One a choice, prompt by prompt; the first of a prompt asks for what is said of the prompt itself."""
    vocabulary = state.engine.runnable.vocabulary
    made: list[_Choice] = []
    for prompt in body.prompts:
        ids = _encoded(state, prompt)
        scored = (body.logprobs or 0) if body.echo and (body.logprobs is not None or not body.limit) else None
        for number in range(body.choices):
            request = Request(
                ids,
                body.sampling(vocabulary, number),
                body.limit,
                body.stops,
                ignore_eos=bool(body.ignore_eos),
                logprobs=body.logprobs,
                prompt_logprobs=scored,
                client=client,
            )
            made.append(_Choice(request, _text(state, prompt) if body.echo else ""))
            # Without an answer there is nothing that the other choices could do differently.
            scored = None if body.limit else scored
    return made


def _encoded(state: AppState, prompt: Prompt) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if state.tokenizer is None:
        raise InputError("prompt: this model has no tokenizer; give a list of token ids")
    state.check_text(prompt)
    return tuple(state.tokenizer.encode(prompt))


def _text(state: AppState, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if state.tokenizer is None:
        raise InputError("echo: this model has no tokenizer, and so no text of a prompt")
    # As one finds it in a prompt that was text; special tokens are part of it.
    return b"".join(map(state.tokenizer.token_bytes, prompt)).decode(errors="replace")


class _Answer:
    """Bodies of one call."""

    def __init__(self, state: AppState, body: CompletionBody, choices: Sequence[_Choice]) -> None:
        self._body, self._choices = body, choices
        self._tokenizer = state.tokenizer
        self._head = Head("cmpl", "text_completion", state.name)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        ends = [await generation.result() for generation in generations]
        shared: tuple[TokenLogprob | None, ...] = ()
        choices = []
        for index, (choice, (pieces, result)) in enumerate(zip(self._choices, ends, strict=True)):
            shared = result.prompt_logprobs or (shared if index % self._body.choices else ())
            entry = self._choice(index, choice.echo + (result.text or ""), finish_reason(result))
            if self._body.logprobs is not None:
                prompt = shared if self._body.echo else ()
                entries = [*prompt, *(piece.logprob for piece in pieces)]
                entry["logprobs"] = TextLogprobs(self._tokenizer).part(entries, choice.request.prompt[0])
            choices.append(entry)
        results = [result for _, result in ends]
        return self._head.body(choices) | {"usage": usage(results, self._body.choices)}

    async def lines(self, generations: Sequence[Generation]) -> AsyncIterator[str]:
        results: dict[int, Result] = {}
        parts = [_Part(TextLogprobs(self._tokenizer)) for _ in generations]
        try:
            for index, choice in enumerate(self._choices):
                if choice.echo:
                    yield sse(self._chunk(self._choice(index, choice.echo, None)))
            async for came in merged(generations):
                lines = []
                for index, event in came:
                    if isinstance(event, Result):
                        results[index] = event
                    lines += self._chunks(index, event, parts[index])
                if lines:
                    yield "".join(lines)
            if self._body.include_usage:
                ended = [results[index] for index in range(len(generations))]
                yield sse(self._head.body([]) | {"usage": usage(ended, self._body.choices)})
            yield DONE
        except HeteroError as error:
            yield sse(told(error).body())

    def _chunks(self, index: int, event: Piece | Result, part: _Part) -> list[str]:
        if isinstance(event, Piece):
            part.waiting.append(event.logprob)
            return [sse(self._chunk(self._piece(index, event.text, part)))] if event.text else []
        chunks = []
        if event.tail or any(part.waiting):
            chunks.append(sse(self._chunk(self._piece(index, event.tail, part))))
        return [*chunks, sse(self._chunk(self._choice(index, "", finish_reason(event))))]

    def _piece(self, index: int, text: str, part: _Part) -> dict[str, Any]:
        choice = self._choice(index, text, None)
        if self._body.logprobs is not None:
            choice["logprobs"] = part.writer.part(part.waiting)
        part.waiting.clear()
        return choice

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head.body([choice]) | ({"usage": None} if self._body.include_usage else {})


class _Part:
    """Log-probabilities of one choice that wait for their text."""

    def __init__(self, writer: TextLogprobs) -> None:
        self.writer = writer
        self.waiting: list[TokenLogprob | None] = []
