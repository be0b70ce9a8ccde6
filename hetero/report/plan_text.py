"""A plan as text: the verdict, what lies where, terms of a step, alternatives."""

from __future__ import annotations

from rich.table import Table

from hetero import terminal
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.planner import FORMAT, NO_GPU, Plan
from hetero.plan.roofline import Decode, Term
from hetero.plan.sizes import gib

_MUCH = 1.5  # times as fast that another format is named in the beginning


def show(made: Plan) -> None:
    """The plan for a person."""
    console = terminal.Console()
    if not console.is_terminal:
        console = terminal.Console(width=120)

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False)

    inventory, request = made.inventory, made.request
    say(verdict(made))
    if (better := advice(made)) is not None:
        say(better)
    say(f"{made.model}: {_weights(inventory)}, {inventory.layers} layers")
    experts = f"experts in {request.expert_format}, " if inventory.sites else ""
    say(f"{experts}dense layers in {made.dense}, {request.context} tokens x {request.concurrency}")
    if made.instead is not None:
        say(f"dense layers in {made.dense}: {made.instead}")
    say()
    console.print(_memory_table(made))
    say()
    console.print(_decode_table(made))
    for found in made.decode:
        say(f"bound, {found.routing} routing: {found.tok_s:.1f} tokens/s at most; {found.binds} binds")
    if made.fits:
        for found in made.expected:
            say(f"expected, {found.routing} routing: {found.tok_s:.1f} tokens/s")
    say()
    for way in made.prefill:
        speed = f"{way.ms / 1e3:.2f} s, {way.tok_s:.0f} tokens/s"
        say(f"bound, prefill of {way.tokens} tokens: {speed}, {way.way}")
    for way in made.today.prompts if made.fits else ():
        speed = f"{way.ms / 1e3:.2f} s, {way.tok_s:.0f} tokens/s"
        say(f"expected, prefill of {way.tokens} tokens: {speed}, {way.way}")
    say()
    console.print(_alternatives_table(made))
    if made.waits:
        say("\nthe bound needs what a run with the rules of this plan lacks:")
        for wait in made.waits:
            say(f"  - {wait}")
    for warning in made.warnings:
        say(f"warning: {warning}")
    say(f"\n{_basis(made.hardware)}")


def verdict(made: Plan) -> str:
    """The first line: whether the model runs on this machine by the rules of the plan, and how fast."""
    where = made.hardware.name
    if made.today.why_not is not None:
        return f"does NOT fit {where}: {made.today.why_not}"
    told = {d.routing: f"{d.tok_s:.3g}" for d in made.expected}
    speeds = " and ".join(f"{tok_s} ({routing} routing)" for routing, tok_s in told.items())
    if len(set(told.values())) == 1:  # without a cache it is all the same which experts are chosen
        speeds = next(iter(told.values()))
    prompts = made.today.prompts
    prompt = next((p for p in reversed(prompts) if p.tokens <= made.request.context), prompts[0])
    read = f"a prompt of {prompt.tokens} tokens at {prompt.tok_s:.0f} tokens/s"
    after = f"after {made.request.context} tokens"
    return f"fits {where}: {speeds} tokens/s expected {after}, {_manner(made)}; {read}"


def advice(made: Plan) -> str | None:
    """Another format of the experts where it makes much of a difference; None where none does."""
    now = made.today.decode.tok_s if made.fits else 0.0
    formats = [a for a in made.alternatives if a.expected_local is not None and a.change.startswith(FORMAT)]
    best = max(formats, key=lambda a: a.expected_local or 0.0, default=None)
    if best is None or best.expected_local is None or best.expected_local < _MUCH * now:
        alone = next((a.expected_local for a in made.alternatives if a.change == NO_GPU), None)
        return None if made.fits or alone is None else by_cpu_alone(alone)
    name, gain = best.change.removeprefix(FORMAT), "much faster" if made.fits else "it fits"
    return f"{gain} by --format '{name}': {best.expected_local:.3g} tokens/s expected (local routing)"


def _manner(made: Plan) -> str:
    now, layout, sites = made.today, made.layout, len(made.inventory.sites)
    if now.fused is not None:
        count = _experts(made.inventory)
        words = [f"layers fused by {now.fused}, {layout.slots} of {count} experts on the GPU too"]
    elif layout.gpu is None:
        words = ["on the CPU alone"]
    else:
        words = [
            f"transformers' modules on the GPU with the experts of {len(now.gpu_layers)} of {sites} layers"
        ]
    if now.tier == "disk":
        words.append(f"{1 - now.ram_share:.0%} of the CPU's experts read from disk")
    if now.table == "disk":
        words.append("the n-gram table on disk")
    return ", ".join(words)


def _experts(inventory: Inventory) -> int:
    return sum(site.spec.num_experts for site in inventory.sites)


def _weights(inventory: Inventory) -> str:
    """How many, those of an n-gram table apart: a token reads a few rows of it."""
    table = inventory.of(Kind.TABLE)
    active = f"{inventory.active_params / 1e9:.2f} billion a token"
    if not table:
        return f"{inventory.params / 1e9:.1f} billion weights, {active}"
    model = f"{(inventory.params - table) / 1e9:.1f} billion weights, {active}"
    return f"{model}, and {table / 1e9:.1f} billion of an n-gram table"


def _memory_table(made: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for tier in made.today.tiers:
        if not tier.items:
            continue
        for number, item in enumerate(tier.items):
            table.add_row(tier.name if number == 0 else "", item.name, gib(item.bytes))
        of = "" if tier.capacity is None else f" of {gib(tier.capacity)}"
        table.add_row("", "together", f"{gib(tier.used)}{of}")
    return table


def _decode_table(made: Plan) -> Table:
    """Terms of a step by routing: of the bound, and as the rules of this plan are expected to give."""
    columns: list[tuple[str, Decode]] = [(f"bound, {d.routing}", d) for d in made.decode]
    if made.fits:
        columns += [(f"expected, {d.routing}", d) for d in made.expected if d.routing != "counts"]
    table = Table(box=None, pad_edge=False)
    table.add_column("a decode step, ms (*: at once)")
    for name, _ in columns:
        table.add_column(name, justify="right")
    names = list(dict.fromkeys((t.name, t.beside) for _, d in columns for t in d.terms))
    for name, beside in names:
        cells = [_cell(d, name, beside) for _, d in columns]
        table.add_row(f"{name}{' *' if beside else ''}", *cells)
    table.add_row("step", *(f"{d.step_ms:.2f}" for _, d in columns))
    table.add_row("hits in GPU memory", *(f"{d.hit_rate:.0%}" for _, d in columns))
    return table


def _cell(found: Decode, name: str, beside: bool) -> str:
    term: Term | None = next((t for t in found.terms if (t.name, t.beside) == (name, beside)), None)
    if term is None:
        return ""
    return (
        f"{term.ms:.2f}" if not term.gb_s else f"{term.bytes / 1e9:.2f} GB at {term.gb_s:.0f}  {term.ms:.2f}"
    )


def _alternatives_table(made: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("instead, tokens/s")
    for name in ("bound, local", "uniform", "expected, local", "uniform", "on the GPU", "on disk"):
        table.add_column(name, justify="right")
    for a in made.alternatives:
        if a.local_tok_s is None or a.uniform_tok_s is None:
            table.add_row(a.change, "does not fit", *5 * ("",))
            continue
        expected = (
            ("does not fit", "")
            if a.expected_local is None or a.expected_uniform is None
            else (f"{a.expected_local:.1f}", f"{a.expected_uniform:.1f}")
        )
        shares = (f"{a.on_gpu:.0%}", f"{a.on_disk:.0%}" if a.on_disk else "")
        table.add_row(a.change, f"{a.local_tok_s:.1f}", f"{a.uniform_tok_s:.1f}", *expected, *shares)
    return table


def _basis(hardware: Hardware) -> str:
    """How much of the profile was measured."""
    by: dict[str, list[str]] = {}
    for name, figure in hardware.figures():
        by.setdefault(figure.basis, []).append(name)
    words = {"measured": "measured", "sheet": "from data sheets", "estimate": "estimated"}
    return "figures of the profile: " + "; ".join(
        f"{words[basis]}: {', '.join(by[basis])}" for basis in words if basis in by
    )


def by_cpu_alone(tok_s: float) -> str:
    """What is told where the CPU alone has room."""
    return f"it fits by --vram 0, on the CPU alone: {tok_s:.3g} tokens/s expected (local routing)"
