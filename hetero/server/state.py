"""What all routes share: the engine, the name of the model, limits and counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from hetero.core import HeteroError, InputError
from hetero.engine.request import Piece, QueueFull, Request, Result
from hetero.server.dialects import Dialect, choose
from hetero.server.grammars import Grammars
from hetero.server.metrics import Metrics
from hetero.server.openings import Openings

if TYPE_CHECKING:
    from hetero.engine.scheduler import Handle, Scheduler
    from hetero.model.tokenizer import Tokenizer

Event = Piece | Result | HeteroError
Sink = Callable[[Event], None]
Phase = Literal["loading", "ready", "draining"]


class NotReadyError(HeteroError):
    """The model is still being loaded, or the server is about to stop: 503 to the client."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. None: no limit beyond the model's own."""

    body_bytes: int = 16 << 20
    prompt_tokens: int | None = None
    request_timeout_s: float | None = None


@dataclass(slots=True)
class AppState:
    """One server. Made before the model is loaded; ``attach`` makes it ready.

    ``tool_format`` and ``reasoning_format`` are what the options say: "auto" or the name of a format.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    openings: Openings = field(default_factory=Openings)
    _engine: Scheduler | None = None
    _dialect: Dialect | None = None
    _grammars: Grammars | None = None

    def attach(self, engine: Scheduler) -> None:
        """From here on requests are served by ``engine``, which is started.

        Raises InputError for the name of a format that there is not.
        """
        tokenizer = engine.runnable.tokenizer
        template = "" if tokenizer is None else tokenizer.template
        self._dialect = choose(template, self.tool_format, self.reasoning_format)
        self._grammars = Grammars(engine.runnable)
        self._engine = engine
        self.metrics.watch(engine.status)

    @property
    def phase(self) -> Phase:
        if self.draining:
            return "draining"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> Scheduler:
        """Raises NotReadyError while there is none."""
        if self._engine is None:
            raise self._not_ready()
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.runnable.tokenizer

    @property
    def dialect(self) -> Dialect:
        """How the model writes thinking and tool calls. Raises NotReadyError while there is no model."""
        if self._dialect is None:
            raise self._not_ready()
        return self._dialect

    @property
    def grammars(self) -> Grammars:
        """Grammars over the model's tokenizer. Raises NotReadyError while there is no model."""
        if self._grammars is None:
            raise self._not_ready()
        return self._grammars

    def _not_ready(self) -> NotReadyError:
        return NotReadyError(f"the model {self.name} is still being loaded; try again soon")

    def _check_size(self, request: Request) -> None:
        """Raises InputError for a prompt that is longer than the limit."""
        most = self.limits.prompt_tokens
        if most is not None and len(request.prompt) > most:
            raise InputError(
                f"the prompt has {len(request.prompt)} tokens and this server takes at most {most} "
                "(--max-prompt-tokens)"
            )

    def check_text(self, text: str) -> None:
        """Raises InputError for a text that is too long for a prompt whatever its tokens, before seconds go
        into reading it."""
        tokenizer = self.tokenizer
        context, most = self.engine.runnable.context, self.limits.prompt_tokens
        if tokenizer is None:
            return
        least = tokenizer.least_tokens(text)
        if most is not None and least > most:
            raise InputError(
                f"the prompt has at least {least} tokens and this server takes at most {most} "
                "(--max-prompt-tokens)"
            )
        if context is not None and least >= context:
            raise InputError(
                f"the prompt has at least {least} tokens ({len(text)} characters) and the context of this "
                f"model holds {context}"
            )

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Queue ``request``; ``sink`` gets its events from the engine's thread. The way of every route.

        Raises InputError, NotReadyError and QueueFull, all before the first event.
        """
        if self.draining:
            raise NotReadyError("the server is shutting down")
        self._check_size(request)
        timeout = self.limits.request_timeout_s
        if timeout is not None:
            own = request.deadline_s
            request = replace(request, deadline_s=timeout if own is None else min(own, timeout))
        watch = self.metrics.request(request)

        def observed(event: Event) -> None:
            watch(event)
            sink(event)

        try:
            return self.engine.submit(request, observed)
        except QueueFull:
            self.metrics.rejected()
            raise
        except InputError:
            raise
        except HeteroError:
            # It came between the two steps by which a server begins to drain.
            if self.draining:
                raise NotReadyError("the server is shutting down") from None
            raise
