"""``hetero serve``: a model behind OpenAI's and Anthropic's interfaces.

Errors are raised as HeteroError; ``hetero.cli`` tells them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from hetero import terminal
from hetero.cli_model import (
    CtxOption,
    ModelArg,
    ModelOptions,
    RevisionOption,
    StatsOption,
    TraceOption,
    checkpoint,
    takes_model,
)
from hetero.config import settings
from hetero.trace_file import to_file

if TYPE_CHECKING:
    from hetero.engine.load import Loaded


@takes_model
def serve(
    model: ModelArg = None,
    *,
    revision: RevisionOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8080,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="API keys, one a line; default: the one of HETERO_API_KEY."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a host that others can reach, without a key.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Answer to this name in the Host header; may be repeated."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of this origin use the server; may be repeated."),
    ] = None,
    slots: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more is answered 429.")] = 64,
    ctx: CtxOption = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that the KV cache holds in all.")] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse what earlier prompts began with.")
    ] = True,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Refuse longer prompts.")] = None,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Refuse larger requests (413).")] = 16 << 20,
    request_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End an answer after this time, as it is.")
    ] = None,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="Let answers end at SIGTERM.")] = 10.0,
    log_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Append a line for every request.")
    ] = None,
    tool_format: Annotated[str, typer.Option(help="Of tool calls; auto: by the chat template.")] = "auto",
    reasoning_format: Annotated[str, typer.Option(help="Of reasoning; auto: by the chat template.")] = "auto",
    options: ModelOptions,
    trace: TraceOption = None,
    no_stats: StatsOption = False,
) -> None:
    """Serve a model to OpenAI and Anthropic clients, with a page at /."""
    from hetero.server.options import Options, is_loopback, open_socket
    from hetero.server.safety import Policy, own_names, read_keys
    from hetero.server.serve import serve as serve_model
    from hetero.server.state import Limits

    options.claim()
    keys = read_keys(api_key_file)
    policy = Policy(keys=keys, origins=tuple(cors_origin or ()), body_bytes=max_body)
    serving = Options(
        policy=policy,
        limits=Limits(prompt_tokens=max_prompt_tokens, request_timeout_s=request_timeout),
        slots=slots,
        max_queue=max_queue,
        context=ctx,
        kv_tokens=kv_tokens,
        prefix_cache=prefix_cache,
        drain_s=drain,
        log_file=log_file,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        stats=not no_stats and settings().stats,
    )
    folder, name = checkpoint(model, revision)
    with open_socket(host, port, allow_remote or bool(keys)) as listener:
        if keys and not is_loopback(listener.getsockname()[0]):
            # Under a key a foreign page that reaches the server by a rebound name still gets nothing.
            policy = dataclasses.replace(policy, hosts=None)
        else:
            policy = dataclasses.replace(policy, hosts=own_names(host, allow_host or ()))
        serving = dataclasses.replace(serving, policy=policy)

        def load() -> Loaded:
            return options.load(folder, name, context=ctx, concurrency=slots, kv_tokens=kv_tokens)

        with to_file(trace, terminal.note):
            serve_model(listener, name, load, serving)
