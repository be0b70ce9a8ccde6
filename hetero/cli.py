"""The command line: parses, calls, prints. Torch starts only inside the commands that need it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
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
    cli_stats,
    terminal,
)
from hetero.config import MAX_THREADS, debug, settings, wait_passively
from hetero.core import HeteroError, InputError, MachineError
from hetero.trace_file import check_writable, to_file

if TYPE_CHECKING:
    from hetero.engine.experts import StoreOptions
    from hetero.engine.load import Loaded


# What the system says of a path that a user gave.
_USERS_FILES = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
# What it says where the disk is at fault.
_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class _Group(TyperGroup):
    """The one place where errors become a message and an exit code."""

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
            # The reader has left, as `| head` does. Python would complain once more while it shuts down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
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
app.add_typer(cli_rules.app, name="rules")
app.command("profile")(cli_profile.profile)
app.command("bench")(cli_bench.bench)
app.command("stats")(cli_stats.show)
app.command("plan")(cli_plan.plan)
app.command("pack")(cli_pack.pack)
app.command("doctor")(cli_doctor.doctor)
app.command("launch", context_settings=cli_launch.CONTEXT)(cli_launch.launch)

ModelArg = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A folder, a .gguf file, OWNER/NAME of the Hub or synthetic:NAME; default: the demo model.",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the Hub.")
]
RulesOption = Annotated[
    str | None,
    typer.Option("--rules", metavar="FILE", help="Rule file; default: that of the model's family."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the rule file."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Of dense layers: float32 (the default), bfloat16 (with fused layers) or float16; "
        "with --auto the plan's."
    ),
]
AutoOption = Annotated[
    bool, typer.Option("--auto", help="Plan for this machine: formats and places that fit, as a rule file.")
]
IsaOption = Annotated[str, typer.Option(help="Of CPU experts: auto, scalar, avx2, avx512 or amx.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads; default: the physical cores.")]
TierOption = Annotated[
    str | None, typer.Option(help="Of experts: ram, or disk (those used most in RAM); default: the rules'.")
]
RamOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to count on, e.g. 60GiB, whatever the machine says it has."),
]
PackCacheOption = Annotated[
    str,
    typer.Option(
        metavar="WORD|DIR",
        help="Files of packed experts: auto uses them, write also makes them, off; or a folder for both.",
    ),
]
VramOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most of a GPU's memory to take, all included, e.g. 24GiB."),
]
CtxOption = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's.")
]
HandoffOption = Annotated[
    str, typer.Option(help="Between a graph and the CPU, with fused layers: auto, memop, spin or hostfunc.")
]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one's.")]
PenaltyOption = Annotated[float, typer.Option(help="Above 1: repeat less.")]
SeedOption = Annotated[int | None, typer.Option(help="Repeats a sampled answer.")]
StopOption = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
# Stands in a request that is checked before there is a tokenizer.
_ANY_PROMPT = (0,)

TraceOption = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write when what ran, for chrome://tracing and Perfetto."),
]
StatsOption = Annotated[
    bool, typer.Option("--no-stats", help="Do not add to the statistics of experts (hetero stats).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")]


@app.command()
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
    rules: RulesOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = None,
    auto: AutoOption = False,
    isa: IsaOption = "auto",
    threads: ThreadsOption = None,
    tier: TierOption = None,
    ram: RamOption = None,
    vram: VramOption = None,
    handoff: HandoffOption = "auto",
    pack_cache: PackCacheOption = "auto",
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
    store, size = _store(tier, ram, pack_cache), _vram(vram)
    request = Request(tuple(_ANY_PROMPT if given_ids is None else given_ids), sampling, max_tokens, stops)

    loaded = _load(
        *_folder(model, revision),
        rules=rules,
        sets=set_,
        dtype=dtype,
        isa=isa,
        threads=threads,
        store=store,
        auto=auto,
        context=ctx,
        vram=size,
        handoff=handoff,
    )
    ids = given_ids if given_ids is not None else _prompt_ids(loaded, prompt or "", system, raw)
    request = dataclasses.replace(request, prompt=tuple(ids), ignore_eos=ignore_eos)
    engine = Engine(loaded.runnable)
    with _counted(loaded, no_stats), to_file(trace, terminal.note):
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
def chat(
    model: ModelArg = None,
    *,
    revision: RevisionOption = None,
    ctx: CtxOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    rules: RulesOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = None,
    auto: AutoOption = False,
    isa: IsaOption = "auto",
    threads: ThreadsOption = None,
    tier: TierOption = None,
    ram: RamOption = None,
    vram: VramOption = None,
    handoff: HandoffOption = "auto",
    pack_cache: PackCacheOption = "auto",
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
    store, size = _store(tier, ram, pack_cache), _vram(vram)

    loaded = _load(
        *_folder(model, revision),
        rules=rules,
        sets=set_,
        dtype=dtype,
        isa=isa,
        threads=threads,
        store=store,
        auto=auto,
        context=ctx,
        vram=size,
        handoff=handoff,
    )
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{loaded.folder}: has no tokenizer; a chat needs one (hetero run takes --prompt-ids)"
        )
    tokenizer.chat([{"role": "user", "content": "x"}])  # tells now if there is no chat template

    def make(messages: list[terminal.Message]) -> Request:
        return dataclasses.replace(asked, prompt=tuple(tokenizer.chat(messages)))

    with _counted(loaded, no_stats):
        terminal.chat_loop(Engine(loaded.runnable), make, system)


@app.command()
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
    rules: RulesOption = None,
    set_: SetOption = None,
    dtype: DtypeOption = None,
    auto: AutoOption = False,
    isa: IsaOption = "auto",
    threads: ThreadsOption = None,
    tier: TierOption = None,
    ram: RamOption = None,
    vram: VramOption = None,
    handoff: HandoffOption = "auto",
    pack_cache: PackCacheOption = "auto",
    trace: TraceOption = None,
    no_stats: StatsOption = False,
) -> None:
    """Serve a model to OpenAI and Anthropic clients, with a page at /."""
    from hetero.server.options import Options, is_loopback, open_socket
    from hetero.server.safety import Policy, own_names, read_keys
    from hetero.server.serve import serve as serve_model
    from hetero.server.state import Limits

    store, size = _store(tier, ram, pack_cache), _vram(vram)
    keys = read_keys(api_key_file)
    policy = Policy(keys=keys, origins=tuple(cors_origin or ()), body_bytes=max_body)
    options = Options(
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
    folder, name = _folder(model, revision)
    with open_socket(host, port, allow_remote or bool(keys)) as listener:
        if keys and not is_loopback(listener.getsockname()[0]):
            # Under a key a foreign page that reaches the server by a rebound name still gets nothing.
            policy = dataclasses.replace(policy, hosts=None)
        else:
            policy = dataclasses.replace(policy, hosts=own_names(host, allow_host or ()))
        options = dataclasses.replace(options, policy=policy)

        def load() -> Loaded:
            return _load(
                folder,
                name,
                rules=rules,
                sets=set_,
                dtype=dtype,
                isa=isa,
                threads=threads,
                store=store,
                auto=auto,
                context=ctx,
                concurrency=slots,
                kv_tokens=kv_tokens,
                vram=size,
                handoff=handoff,
            )

        with to_file(trace, terminal.note):
            serve_model(listener, name, load, options)


@contextlib.contextmanager
def _counted(loaded: Loaded, no_stats: bool) -> Iterator[None]:
    """Add the use of experts within it to the statistics."""
    # Random weights choose experts that tell nothing of the model.
    if no_stats or loaded.synthetic or not settings().stats:
        yield
        return
    from hetero.engine.load import stats_recorder

    recorder = stats_recorder(loaded, terminal.note)
    try:
        yield
    finally:
        recorder.save()


def _store(tier: str | None, ram: str | None, pack_cache: str) -> StoreOptions:
    """What was said of memory and disk; ``ram`` holds from now on."""
    from hetero.engine.experts import StoreOptions
    from hetero.hw import memory
    from hetero.plan.sizes import parse_size

    if ram is not None and parse_size(ram, "--ram") == 0:
        raise InputError(f"--ram {ram}: must be above 0")
    memory.state(None if ram is None else parse_size(ram, "--ram"))
    return StoreOptions(pack_cache, tier)


def _vram(text: str | None) -> int | None:
    from hetero.plan.sizes import parse_size

    return None if text is None else parse_size(text, "--vram")


def _load(
    folder: Path,
    name: str,
    *,
    rules: str | None,
    sets: list[str] | None,
    dtype: str | None,
    isa: str,
    threads: int | None,
    store: StoreOptions,
    auto: bool = False,
    context: int | None = None,
    concurrency: int = 1,
    kv_tokens: int | None = None,
    vram: int | None = None,
    handoff: str = "auto",
) -> Loaded:
    from hetero.rules.variables import parse_set

    if auto and (rules is not None or sets):
        raise InputError("--auto chooses the rules itself: leave out --rules and --set, or take its file")
    overrides = parse_set(sets or [])
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InputError(f"--threads {threads}: must be from 1 to {MAX_THREADS}")

    if context is not None and context < 2:
        raise InputError(f"--ctx {context}: must be at least 2")

    from hetero.engine.gpu.loading import gpu_options
    from hetero.engine.load import load_model, with_context
    from hetero.model import hf

    gpu = gpu_options(vram, slots=concurrency, context=context, kv_tokens=kv_tokens, handoff=handoff)
    hf.quiet()
    if auto:
        import torch

        from hetero.auto import plan_run

        device = None
        if torch.cuda.is_available():
            free = torch.cuda.mem_get_info(0)[0]
            device = (torch.cuda.get_device_name(0), free if vram is None else min(vram, free))
        chosen = plan_run(folder, name, context=context, concurrency=concurrency, device=device, dtype=dtype)
        terminal.note(chosen.note)
        rules, dtype = str(chosen.rules), chosen.dtype
    with terminal.progress_bar(f"loading {name}") as progress:
        loaded = load_model(
            folder,
            rules=rules,
            overrides=overrides,
            dtype=dtype,
            isa=isa,
            threads=threads,
            progress=progress,
            store=store,
            gpu=gpu,
            tell=lambda text: terminal.note(f"note: {text}"),
        )
    for text in loaded.notes:
        terminal.note(f"note: {text}")
    return with_context(dataclasses.replace(loaded, name=name), context)


def _folder(model: str | None, revision: str | None) -> tuple[Path, str]:
    """The checkpoint folder or file, and what to call the model. One of the Hub is fetched."""
    if model is None:
        from hetero.model.demo import default_model

        default = default_model()
        if default.note is not None:
            terminal.note(default.note)
        return default.path, "demo" if default.note is None else default.path.name
    from hetero.model.shapes import resolve_model

    found = resolve_model(
        model, revision=revision, weights=True, say=terminal.note, bar=terminal.progress_bar
    )
    if found.kind not in ("folder", "gguf", "synthetic"):
        raise InputError(
            f"{model}: has a configuration but no weights; to run it, give the folder of its checkpoint "
            "(hetero rules works with a configuration alone)"
        )
    return found.path, found.name


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
