"""The command line: parses, calls, prints. Torch starts only inside the commands that need it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hetero import (
    cli_bench,
    cli_doctor,
    cli_launch,
    cli_pack,
    cli_plan,
    cli_profile,
    cli_rules,
    cli_serve,
    cli_stats,
    terminal,
)
from hetero.cli_model import (
    CtxOption,
    ModelArg,
    ModelOptions,
    RevisionOption,
    StatsOption,
    TraceOption,
    checkpoint,
    counted,
    takes_model,
)
from hetero.config import debug, wait_passively
from hetero.core import HeteroError, InputError, MachineError
from hetero.trace_file import check_writable, to_file

if TYPE_CHECKING:
    from hetero.engine.load import Loaded


# The exit code of a command whose output nobody reads any more: as a shell tells of SIGPIPE.
BROKEN_PIPE = 141
# What the system says of a path that a user gave.
_USERS_FILES = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
# What it says where the disk is at fault.
_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class _Group(TyperGroup):
    """The one place where errors become a message and an exit code."""

    def make_context(self, *args: Any, **named: Any) -> Any:
        try:
            return super().make_context(*args, **named)
        except BrokenPipeError:  # of --help and --version
            _leave_quietly()
            raise typer.Exit(BROKEN_PIPE) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except HeteroError as error:
            for line in str(error).splitlines():
                terminal.note(f"hetero: {line}")
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            _leave_quietly()
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:
            if error.errno == errno.ENOSPC and error.filename is None:
                terminal.note(f"hetero: the output cannot be written: {error.strerror}")
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(MachineError.exit_code) from None
            if error.errno in _DISKS and error.filename is not None:
                terminal.note(f"hetero: {error.filename}: cannot be written: {error.strerror}")
                raise typer.Exit(MachineError.exit_code) from None
            if error.errno not in _USERS_FILES or error.filename is None:
                raise _defect(error) from None
            terminal.note(f"hetero: {error.filename}: {error.strerror}")
            raise typer.Exit(InputError.exit_code) from None
        except Exception as error:
            # Exits and usage errors are the framework's own, and it tells them.
            if isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code"):
                raise
            raise _defect(error) from None


def _leave_quietly() -> None:
    """The reader has left, as ``| head`` does. Python would complain once more while it shuts down."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())


def _defect(error: Exception) -> typer.Exit:
    """Tell what nobody has foreseen; called while it is handled."""
    if debug():
        traceback.print_exc()
    first = (str(error).strip().splitlines() or ["no message"])[0]
    hint = "HETERO_DEBUG=1 shows the traceback"
    terminal.note(f"hetero: internal error, {type(error).__name__}: {first} ({hint})")
    return typer.Exit(1)


app = typer.Typer(
    cls=_Group,
    help="Run Mixture-of-Experts models with their experts on the CPU, placed by a rule file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hetero {version('hetero')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models with their experts on the CPU, placed by a rule file."""


app.add_typer(cli_rules.app, name="rules")
app.command("profile")(cli_profile.profile)
app.command("bench")(cli_bench.bench)
app.command("stats")(cli_stats.show)
app.command("plan")(cli_plan.plan)
app.command("pack")(cli_pack.pack)
app.command("doctor")(cli_doctor.doctor)
app.command("serve")(cli_serve.serve)
app.command("launch", context_settings=cli_launch.CONTEXT)(cli_launch.launch)

TemperatureOption = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one's.")]
PenaltyOption = Annotated[float, typer.Option(help="Above 1: repeat less.")]
SeedOption = Annotated[int | None, typer.Option(help="Repeats a sampled answer.")]
StopOption = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
# Stands in a request that is checked before there is a tokenizer.
_ANY_PROMPT = (0,)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")]


@app.command()
@takes_model
def run(
    model: ModelArg = None,
    *,
    revision: RevisionOption = None,
    ctx: CtxOption = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="What to answer.")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="1,2,3", help="Token ids instead of a text.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, for the chat template.")] = None,
    options: ModelOptions,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 256,
    stop: StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    trace: TraceOption = None,
    no_stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt. A text goes through the model's chat template if it has one, unless --raw."""
    given_ids = _parse_ids(prompt_ids) if prompt_ids is not None else None
    if (prompt is None) == (given_ids is None):
        raise InputError("give either a text (-p TEXT) or token ids (--prompt-ids 1,2,3)")
    if prompt == "":
        raise InputError("-p '': the prompt is empty")
    if system is not None and (raw or given_ids is not None):
        raise InputError("--system: only with a text and without --raw")
    if given_ids is None:
        _refuse_shapes(model, "give --prompt-ids 1,2,3")

    from hetero.engine.generate import Engine
    from hetero.engine.request import Request
    from hetero.engine.sample import SamplingParams

    if trace is not None:
        check_writable(Path(trace))
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    # What is wrong with the request is told before the weights are read, which may take minutes.
    stops = tuple(stop or ())
    options.claim()
    request = Request(tuple(_ANY_PROMPT if given_ids is None else given_ids), sampling, max_tokens, stops)

    loaded = options.load(*checkpoint(model, revision), context=ctx)
    ids = given_ids if given_ids is not None else _prompt_ids(loaded, prompt or "", system, raw)
    request = dataclasses.replace(request, prompt=tuple(ids), ignore_eos=ignore_eos)
    engine = Engine(loaded.runnable)
    with counted(loaded, no_stats), to_file(trace, terminal.note):
        if as_json:
            typer.echo(terminal.result_json(loaded, engine.complete(request)))
            return
        result = terminal.stream_answer(engine, request)
        terminal.note(terminal.summary(result))
        if loaded.runnable.runner is not None:
            terminal.note(terminal.tiers(loaded.runnable.runner.reads()))
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


@app.command()
@takes_model
def chat(
    model: ModelArg = None,
    *,
    revision: RevisionOption = None,
    ctx: CtxOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    options: ModelOptions,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    stop: StopOption = None,
    no_stats: StatsOption = False,
) -> None:
    """Talk to a model; /reset forgets, /exit leaves, Ctrl-C stops an answer."""
    _refuse_shapes(model, "hetero run takes --prompt-ids")

    from hetero.engine.generate import Engine
    from hetero.engine.request import Request
    from hetero.engine.sample import SamplingParams

    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    asked = Request(_ANY_PROMPT, sampling, max_tokens, tuple(stop or ()))
    options.claim()

    loaded = options.load(*checkpoint(model, revision), context=ctx)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{loaded.folder}: has no tokenizer; a chat needs one (hetero run takes --prompt-ids)"
        )
    tokenizer.chat([{"role": "user", "content": "x"}])  # tells now if there is no chat template

    def make(messages: list[terminal.Message]) -> Request:
        return dataclasses.replace(asked, prompt=tuple(tokenizer.chat(messages)))

    with counted(loaded, no_stats):
        terminal.chat_loop(Engine(loaded.runnable, reuse=True), make, system)


def _refuse_shapes(model: str | None, instead: str) -> None:
    """Before gigabytes of random weights are made: they come without a tokenizer."""
    from hetero.model.shapes import SYNTHETIC

    if model is not None and model.startswith(SYNTHETIC):
        raise InputError(f"{model}: random weights have no tokenizer; {instead}")


def _prompt_ids(loaded: Loaded, text: str, system: str | None, raw: bool) -> list[int]:
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        from hetero.model.tokenizer import no_tokenizer

        raise InputError(no_tokenizer(loaded.folder))
    if raw or (not tokenizer.has_template and system is None):
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.chat([*messages, {"role": "user", "content": text}])


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    # int() alone would take 1_0 for 10, and digits of every script.
    if not all(re.fullmatch("[+-]?[0-9]{1,20}", word) for word in words):
        raise InputError(f"--prompt-ids {text}: must be whole numbers with commas, such as 1,2,3")
    return [int(word) for word in words]


def main() -> None:
    """Entry point of the ``hetero`` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a mark for it; an answer must not end there.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        # Bytes that are no text reach the tokenizer's check, whose message says so.
        reconfigure(errors="surrogateescape")
    wait_passively()
    app(prog_name="hetero")


if __name__ == "__main__":
    main()
