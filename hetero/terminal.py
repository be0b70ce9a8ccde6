"""What the command line shows: progress, streamed answers, the line of figures, the chat loop.

Answers go to stdout; all else to stderr, so that a pipe gets the answer alone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console as _Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hetero.core import InputError

if TYPE_CHECKING:
    from hetero.engine.generate import Engine
    from hetero.engine.load import Loaded
    from hetero.engine.request import Request, Result

Message = dict[str, str]


class Console(_Console):
    """rich's, where a reader that has left ends the command as it does with any other write."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def note(text: str) -> None:
    """One line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def show(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr; nothing where that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C makes the yielded function true instead of tearing through a forward pass.

    A second one before the step has ended interrupts as usual.
    """
    pressed = threading.Event()

    def handler(_: int, __: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def stream_answer(engine: Engine, request: Request) -> Result:
    """Show an answer as it is made; token ids where the model has no tokenizer."""
    from hetero.engine.request import Result

    words = engine.runnable.tokenizer is not None
    written = ""
    with interruptible() as pressed:
        for event in engine.stream(request, pressed):
            if isinstance(event, Result):
                written = event.tail or written
                show(event.tail + ("" if written.endswith("\n") else "\n"))
                return event
            piece = event.text if words else f"{event.token} "
            if piece:
                written = piece
                show(piece)
    raise AssertionError("a stream ends with its result")


def summary(result: Result) -> str:
    """Speed and the kernels that ran, in a line."""
    times, usage = result.timings, result.usage
    kernels = ", ".join(f"{name} x{calls}" for name, calls in sorted(result.kernels.items())) or "none"
    read = str(usage.prompt_tokens)
    if usage.cached_tokens:
        read = f"{usage.prompt_tokens - usage.cached_tokens} of {usage.prompt_tokens}"
    return (
        f"[{times.decode_tok_s:.1f} tok/s, TTFT {times.ttft_s:.2f} s, {read} tokens read, "
        f"{usage.completion_tokens} made, ended by {result.finish_reason}; kernels: {kernels}]"
    )


def tiers(reads: Mapping[str, tuple[int, int]]) -> str:
    """Where the experts of decode steps were, in a line; ``reads`` as ``GpuRunner.reads`` tells."""
    total = sum(count for count, _ in reads.values())
    if not total:
        return "[experts: none]"
    words = {"gpu": "in GPU memory", "pcie": "read over the bus", "cpu": "computed by the CPU"}
    parts = (f"{reads[tier][0] / total:.0%} {text}" for tier, text in words.items())
    return f"[experts: {', '.join(parts)}]"


def result_json(loaded: Loaded, result: Result) -> str:
    """One object on one line, for machines."""
    times = result.timings
    body: dict[str, Any] = {
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
        },
        "timings": {
            "load_s": times.load_s,
            "ttft_s": times.ttft_s,
            "prefill_tok_s": times.prefill_tok_s,
            "decode_tok_s": times.decode_tok_s,
        },
        "kernels": result.kernels,
        "model": {"path": str(loaded.folder), "type": loaded.model_type, "dtype": loaded.dtype},
        "rules": {"file": loaded.rules, "variables": dict(loaded.placement.ruleset.variables)},
        "seed": result.seed,
    }
    if loaded.runnable.runner is not None:
        reads = loaded.runnable.runner.reads()
        body["experts"] = {tier: {"count": count, "bytes": size} for tier, (count, size) in reads.items()}
    return json.dumps(body)


def chat_loop(engine: Engine, make: Callable[[list[Message]], Request], system: str | None) -> None:
    """Read a line, answer it, remember both. Ends at /exit and at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    asking = sys.stdin.isatty()
    if asking:
        note("/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> " if asking else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            note("(forgotten)")
        elif line.startswith("/"):
            note(f"{line.split()[0]}: no such command; there are /reset and /exit")
        elif line:
            turn: list[Message] = [*messages, {"role": "user", "content": line}]
            try:
                result = stream_answer(engine, make(turn))
            except InputError as error:
                # A conversation that has outgrown the context is no reason to lose the session.
                note(f"{error} (/reset starts anew)")
                continue
            note(summary(result))
            messages = [*turn, {"role": "assistant", "content": result.text or ""}]
