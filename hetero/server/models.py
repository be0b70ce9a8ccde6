"""/v1/models, and the tokenizer by itself: /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from pydantic import model_validator

from hetero.core import InputError
from hetero.model.tokenizer import Tokenizer
from hetero.server.chat_protocol import Message, Tool
from hetero.server.errors import NoSuchModelError
from hetero.server.prompts import conversation
from hetero.server.protocol import Strict
from hetero.server.state import AppState


class TokenizeBody(Strict):
    """A text, or messages as the model would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Whether a plain text gets the begin-of-text token, where the tokenizer has one.
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InputError("prompt: give either prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise InputError("tools and chat_template_kwargs: only with messages")
        return self


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int]


def check_model(state: AppState, asked: str | None) -> None:
    """Raises NoSuchModelError when a request names a model that is not the one served."""
    if asked is not None and asked != state.name:
        raise NoSuchModelError(f"model: '{asked}' is not served here; this server has '{state.name}'")


def router(state: AppState) -> APIRouter:
    """``GET /v1/models[/NAME]``, ``POST /tokenize`` and ``POST /detokenize``."""
    routes = APIRouter()

    def described() -> dict[str, Any]:
        return {
            "id": state.name,
            "object": "model",
            "created": state.created,
            "owned_by": "hetero",
            "max_model_len": state.engine.runnable.context,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        check_model(state, model)
        return described()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(state, body.model)
        return await run_in_threadpool(_tokenize, state, body)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(state, body.model)
        return await run_in_threadpool(_detokenize, state, body)

    return routes


def _tokenize(state: AppState, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = _tokenizer(state)
    if body.prompt is not None:
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_rendered
        tokens = encode(body.prompt)
    else:
        text = conversation(tokenizer, body.messages or (), body.tools or (), body.chat_template_kwargs)
        tokens = tokenizer.encode_rendered(text)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": state.engine.runnable.context,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return answer


def _detokenize(state: AppState, body: DetokenizeBody) -> dict[str, Any]:
    tokenizer = _tokenizer(state)
    size = state.engine.runnable.vocabulary
    for token in body.tokens:
        if not 0 <= token < size:
            raise InputError(f"tokens: {token} is not in the vocabulary of {size}")
    return {"prompt": b"".join(map(tokenizer.token_bytes, body.tokens)).decode(errors="replace")}


def _tokenizer(state: AppState) -> Tokenizer:
    if state.tokenizer is None:
        raise InputError("prompt: this model has no tokenizer")
    return state.tokenizer
