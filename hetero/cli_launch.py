"""``hetero launch``: a tool's own settings for this server, printed for a shell or given to the tool itself.

Asks the server first, so that a wrong address, a missing key or a model that still loads is told here and not
by the tool, in its own words, an hour later.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from hetero.core import InputError, MachineError

KEY_VARIABLE = "HETERO_API_KEY"
# What tools that insist on a key get from a server that asks for none.
NO_KEY = "none"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server, as a tool must know it."""

    url: str  # without /v1 and without a slash at the end
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What a tool needs: variables, and words that its command begins with."""

    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()


def _claude(to: Target) -> Setup:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    env = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_AUTH_TOKEN": to.key}
    # Requests that go elsewhere than to the base URL would tell others that there is a session.
    env |= {f"ANTHROPIC_{name}": to.model for name in names}
    return Setup(env | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})


def _codex(to: Target) -> Setup:
    provider = "model_providers.hetero"
    settings = {
        "model": to.model,
        "model_provider": "hetero",
        f"{provider}.name": "hetero",
        f"{provider}.base_url": f"{to.url}/v1",
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.wire_api": "responses",
        # Tools that OpenAI's own servers run or group; this one takes functions.
        "web_search": "disabled",
        "features.multi_agent": False,
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Setup({KEY_VARIABLE: to.key}, tuple(words))


def _opencode(to: Target) -> Setup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "hetero",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {to.model: {"name": to.model}},
    }
    config = {"provider": {"hetero": provider}, "model": f"hetero/{to.model}"}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: to.key})


def _aider(to: Target) -> Setup:
    env = {"OPENAI_API_BASE": f"{to.url}/v1", "OPENAI_API_KEY": to.key, "AIDER_MODEL": f"openai/{to.model}"}
    return Setup(env)


def _openai(to: Target) -> Setup:
    env = {"OPENAI_BASE_URL": f"{to.url}/v1", "OPENAI_API_KEY": to.key, "OPENAI_MODEL": to.model}
    return Setup(env)


# "openai" stands for every program that reads the variables of OpenAI's own clients.
TOOLS: Mapping[str, Callable[[Target], Setup]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "openai": _openai,
}


def launch(
    ctx: typer.Context,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help=f"One of {', '.join(TOOLS)}.")],
    *,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8080",
    model: Annotated[str | None, typer.Option(help="Model name; default: the one that is served.")] = None,
    run: Annotated[bool, typer.Option("--exec", help="Run the tool instead of printing.")] = False,
) -> None:
    """Point a tool at the server: print its environment, or run it (--exec, or its arguments after --)."""
    if tool not in TOOLS:
        raise InputError(f"{tool}: not a tool that is known here; there are {', '.join(TOOLS)}")
    url = _base(url)
    key = os.environ.get(KEY_VARIABLE, "").strip()
    served = served_model(url, key)
    if model is not None and model != served:
        raise InputError(f"--model {model}: the server at {url} serves '{served}'")
    setup = TOOLS[tool](Target(url, key or NO_KEY, served))
    if not run and not ctx.args:
        typer.echo(as_shell(tool, setup))
        return
    # "openai" is no program: what follows it is.
    words = list(ctx.args) if tool == "openai" else [tool, *setup.args, *ctx.args]
    if not words:
        raise InputError(
            "openai: give the program to run after --, as in: hetero launch openai -- python x.py"
        )
    program = shutil.which(words[0])
    if program is None:
        raise InputError(
            f"{words[0]}: no such program on the PATH; without --exec its environment is printed"
        )
    os.execve(program, words, {**os.environ, **setup.env})


def as_shell(tool: str, setup: Setup) -> str:
    """Lines for ``eval`` in a POSIX shell. A key that is the user's own stays the variable it came from."""
    known = os.environ.get(KEY_VARIABLE, "").strip()
    lines = []
    for name, value in setup.env.items():
        if known and value == known:
            if name != KEY_VARIABLE:
                lines.append(f'export {name}="${KEY_VARIABLE}"')
            continue
        lines.append(f"export {name}={shlex.quote(value)}")
    if setup.args:
        lines.append(f"# then: {shlex.join([tool, *setup.args])}")
    return "\n".join(lines)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The library would send the key to whatever address an answer names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def served_model(url: str, key: str) -> str:
    """The model that the server at ``url`` has ready.

    Raises InputError for an address that no such server is at or a key that it does not take, MachineError
    for one that does not answer or is not ready.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    # A proxy of the environment is for other machines.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            body = json.loads(answer.read(1 << 20))
        health = f"{url}/health/ready"
        with opener.open(urllib.request.Request(health, headers=headers), timeout=ANSWER_S):
            pass
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            there = error.headers.get("location", "elsewhere")
            raise InputError(
                f"{url}: sends on to {there!r}, where a key would go too: give the server's own address "
                "(--url)"
            ) from None
        if error.code == 401:
            raise InputError(f"the server at {url} asks for an API key; set {KEY_VARIABLE}") from None
        if error.code == 503:
            raise MachineError(f"the server at {url} is not ready yet; try again soon") from None
        raise InputError(f"{url}: answers {error.code} to /v1/models; is it a hetero server?") from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise MachineError(
            f"no server answers at {url} ({reason}); start one with 'hetero serve', or give --url"
        ) from None
    except ValueError:
        raise InputError(f"{url}: does not answer as a hetero server does") from None
    return _first_model(body, url)


def _first_model(body: Any, url: str) -> str:
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise InputError(f"{url}: does not answer as a hetero server does") from None


def _base(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")
