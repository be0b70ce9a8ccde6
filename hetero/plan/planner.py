"""A plan: what lies where, how long a step takes, what else is possible, what a run lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero.core import InputError, MachineError
from hetero.formats import Format, parse_format
from hetero.plan.hardware import Hardware, hardware_names, load_hardware
from hetero.plan.inventory import Inventory
from hetero.plan.prefill import Prefill, prefill
from hetero.plan.roofline import Decode, both_rates, decode
from hetero.plan.routing import Routing
from hetero.plan.sizes import gib
from hetero.plan.tiers import (
    DENSE_WIDTH,
    GIB,
    Layout,
    Request,
    lay_out,
)
from hetero.plan.today import SHORT_PROMPT, Today, in_graph, plan_today
from hetero.plan.workspace import DENSE_PACKED
from hetero.rules.defaults import default_rules_for
from hetero.rules.load import load_rules
from hetero.rules.options import expected_format

DENSE_WORDS = ("auto", *DENSE_WIDTH, *DENSE_PACKED)
_WORTH = 1.1  # what dense layers in 8 bits must gain to be chosen where bfloat16 fits
_WORTH_ROUNDING = 1.05  # what bfloat16 must gain on the CPU where float32, which rounds nothing, fits as well
_SMALLER = ("int8", "int4", "int4 g128")  # formats to fall back to where experts do not fit, in this order
NO_GPU = "no GPU"
FORMAT = "experts in "  # of alternatives that differ in the experts' format


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same model with one thing changed. ``why``: what keeps it from fitting, None where it fits."""

    change: str
    local_tok_s: float | None = None  # the bound
    uniform_tok_s: float | None = None
    expected_local: float | None = None  # None where no rules can be written for it
    expected_uniform: float | None = None
    on_gpu: float = 0.0
    on_disk: float = 0.0
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``hetero plan`` tells."""

    model: str
    inventory: Inventory
    hardware: Hardware
    request: Request
    layout: Layout
    decode: tuple[Decode, ...]  # the bound, by routing
    today: Today  # the rules as they are written, and what they are expected to give
    prefill: tuple[Prefill, ...]  # the bound of a short prompt and of the one asked for, fastest way each
    ways: tuple[Prefill, ...]  # all ways of the prompt asked for
    alternatives: tuple[Alternative, ...]
    waits: tuple[str, ...]  # what the bound needs and a run with these rules lacks
    instead: str | None  # on the CPU: the other dtype that dense layers could have, and what that would give
    warnings: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Dtype that a run gives the dense layers."""
        return self.today.dtype

    @property
    def fits(self) -> bool:
        """Whether a run with the rules of this plan loads."""
        return self.today.why_not is None

    @property
    def dense(self) -> str:
        """What a run has the dense layers in, which differs from the layout's where they are not fused."""
        return self.layout.dense if self.today.fused is not None else self.today.dtype

    @property
    def expected(self) -> tuple[Decode, ...]:
        """A decode step with these rules, by routing: an estimate."""
        return self.today.steps


def check_request(request: Request, inventory: Inventory) -> None:
    """Raises InputError for numbers that mean nothing."""
    for name, value, least, most in (
        ("--ctx", request.context, 1, 1 << 30),
        ("--concurrency", request.concurrency, 1, 1 << 16),
        ("--draft", request.draft, 0, 64),
        ("--prompt", request.prompt, 1, 1 << 30),
    ):
        if not least <= value <= most:
            raise InputError(f"{name} {value}: must be from {least} to {most}")
    if not 0 <= request.accept <= 1:
        raise InputError(f"--accept {request.accept:g}: must be from 0 to 1")
    if request.dense not in DENSE_WORDS:
        raise InputError(f"--dense {request.dense}: must be one of {', '.join(DENSE_WORDS)}")
    if inventory.context is not None and request.context > inventory.context:
        raise InputError(f"--ctx {request.context}: the model attends to at most {inventory.context} tokens")
    if request.counts:
        shape = [len(row) for row in request.counts]
        wanted = [s.spec.num_experts for s in inventory.sites]
        if shape != wanted:
            raise InputError(
                f"counts of {len(shape)} layers with {sorted(set(shape))} experts; the model has "
                f"{len(wanted)} with {sorted(set(wanted))}"
            )
        if any(count < 0 for row in request.counts for count in row):
            raise InputError("counts of experts must not be negative")


def family_format(model_type: str, has_gpu: bool) -> Format:
    """The format that the rule file of a model's family gives the experts."""
    variables = load_rules(default_rules_for(model_type, has_gpu)).variables
    return expected_format(str(variables.get("experts", "int4")))


def make_plan(
    model: str,
    inventory: Inventory,
    hardware: Hardware,
    request: Request,
    *,
    any_format: bool = False,
    alternatives: bool = True,
) -> Plan:
    """Plan a model for a machine. ``any_format``: a smaller format may take the place of the request's.
    ``alternatives``: plan those as well.

    Raises InputError for a request that makes no sense, MachineError with needed and available bytes where
    nothing fits.
    """
    check_request(request, inventory)
    request, layout = _choose(inventory, hardware, request, any_format)
    routings = [Routing("local"), Routing("uniform")]
    if request.counts:
        routings.insert(0, Routing("counts", request.counts))
    now = plan_today(inventory, hardware, request, layout, routings)
    ways = prefill(inventory, hardware, request, layout, request.prompt)
    short = prefill(inventory, hardware, request, layout, min(SHORT_PROMPT, request.prompt))
    plan = Plan(
        model=model,
        inventory=inventory,
        hardware=hardware,
        request=request,
        layout=layout,
        decode=tuple(decode(inventory, hardware, request, layout, r) for r in routings),
        today=now,
        prefill=(short[0], ways[0]) if request.prompt > SHORT_PROMPT else (ways[0],),
        ways=tuple(ways),
        alternatives=(),
        waits=tuple(_waits(inventory, hardware, request, layout, now)),
        instead=_other_dtype(inventory, hardware, request, layout, now),
        warnings=tuple(_warnings(inventory, hardware, request, now)),
    )
    return replace(plan, alternatives=tuple(_alternatives(plan))) if alternatives else plan


def _choose(
    inventory: Inventory, hardware: Hardware, request: Request, any_format: bool
) -> tuple[Request, Layout]:
    """The request with its format decided, and the layout: the first that keeps experts off the disk, else
    the one with the fewest there. Where a format may be chosen, one whose experts all fit main memory, which
    fused layers need, comes before larger ones that do not."""
    formats = [request.expert_format]
    if any_format:
        bits = request.expert_format.bits_per_weight
        formats += [f for f in map(parse_format, _SMALLER) if f.bits_per_weight < bits]
    best: tuple[Request, Layout] | None = None
    failure: MachineError | None = None
    for fmt in formats:
        asked = replace(request, expert_format=fmt)
        for layout in _layouts(inventory, hardware, asked):
            if isinstance(layout, MachineError):
                failure = layout  # the last one tried needs the least
                continue
            if layout.on_disk <= 0 and not (any_format and _keeps_from_fusing(layout)):
                return asked, layout
            if best is None or layout.on_disk < best[1].on_disk:
                best = asked, layout
    if best is None:
        assert failure is not None
        raise failure
    return best


def _keeps_from_fusing(layout: Layout) -> bool:
    """Layers could be fused, but main memory lacks room for all experts."""
    return layout.fused and not (layout.copies and layout.in_ram >= 1.0)


def _layouts(inventory: Inventory, hardware: Hardware, request: Request) -> Iterator[Layout | MachineError]:
    """Layouts in order of preference, and errors of those that do not fit."""
    if request.dense != "auto":
        words: Sequence[str] = (request.dense,)
    elif request.vram == 0 or hardware.gpu is None:
        words = ("float32", "bfloat16")
    else:
        words = ("bfloat16", "int8")
    found: list[Layout] = []
    for word in words:
        try:
            found.append(lay_out(inventory, hardware, request, word))
        except MachineError as error:
            yield error
    if request.dense == "auto" and [layout.dense for layout in found] == ["float32", "bfloat16"]:
        exact, half = (_answer_s(inventory, hardware, request, layout) for layout in found)
        if _WORTH_ROUNDING * half < exact:
            found.reverse()
    if request.dense == "auto" and [layout.dense for layout in found] == ["bfloat16", "int8"]:
        local = Routing("local")
        wide, narrow = (decode(inventory, hardware, request, layout, local) for layout in found)
        if narrow.tok_s > _WORTH * wide.tok_s:
            found.reverse()
    yield from found


def _answer_s(inventory: Inventory, hardware: Hardware, request: Request, layout: Layout) -> float:
    """Seconds that a short prompt and an answer of as many tokens are expected to take."""
    now = plan_today(inventory, hardware, request, layout, [Routing("local")])
    prompt = now.prompts[0]
    return prompt.ms / 1e3 + prompt.tokens / now.decode.tok_s


def _other_dtype(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, now: Today
) -> str | None:
    """On the CPU dense layers are float32 or bfloat16: what the one that was not chosen would give."""
    if layout.gpu is not None or request.dense != "auto":
        return None
    other = "bfloat16" if layout.dense == "float32" else "float32"

    def told(one: Today) -> str:
        return f"{one.decode.tok_s:.3g} tokens/s and {one.prompts[0].tok_s:.0f} of a prompt"

    try:
        placed = lay_out(inventory, hardware, request, other)
    except MachineError:
        return f"{other} does not fit"
    found = plan_today(inventory, hardware, request, placed, [Routing("local")])
    if found.why_not is not None:
        return f"{other} does not fit"
    if placed.on_disk > layout.on_disk:
        return f"{other} would leave {placed.on_disk:.0%} of the experts on disk: {told(found)}"
    return f"{told(now)} expected; in {other} {told(found)}"


def _waits(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, now: Today
) -> Iterator[str]:
    """What the bound takes for granted and the rules of this plan lack."""
    if layout.gpu is not None and now.fused is None:
        if layout.slots and inventory.sites:
            yield (
                f"the cache of {layout.slots} experts of any layer on the GPU: those of "
                f"{len(now.gpu_layers)} of {len(inventory.sites)} layers lie there, whole"
            )
        if both_rates(hardware)[1]:
            yield "the PCIe share of the experts: the CPU computes all that are not on the GPU"
        why = _unfused(layout)
        if in_graph(inventory, request, layout, now.ram_share):
            yield f"fused layers: transformers' modules run, as a graph for one sequence, since {why}"
        else:
            yield f"fused layers in one CUDA graph: transformers' modules run one by one, since {why}"
            yield "the hand-off inside the graph: activations are copied, and waited for, in every layer"
        if layout.dense in DENSE_PACKED:
            yield f"dense layers in {layout.dense}: modules keep bfloat16"
    if request.draft:
        yield "drafts: there is no speculative decoding"


def _unfused(layout: Layout) -> str:
    """Why modules run as they are."""
    if not layout.fused:
        return "there are none for this model, or not with these dense layers"
    held = sum(item.bytes for item in layout.ram.items if item.name == "experts")
    missing = layout.expert_bytes - held - layout.ram.free
    return f"fused layers need all experts in main memory, which lacks {gib(missing)} for them"


def _warnings(inventory: Inventory, hardware: Hardware, request: Request, now: Today) -> Iterator[str]:
    yield from inventory.notes
    if now.ram_share < 1.0:
        where = "the disk" if hardware.disk is not None else "a disk whose speed the profile does not tell"
        yield (
            f"{1 - now.ram_share:.0%} of the CPU's experts do not fit memory: a token that chooses one waits "
            f"for {where}; a faster disk, more memory or a smaller --format helps"
        )
    if not inventory.sites:
        yield "the model has no routed experts: nothing but the dense layers is planned"
    if request.vram and hardware.gpu and request.vram > hardware.gpu.bytes:
        yield f"--vram {gib(request.vram)} is more than the {gib(hardware.gpu.bytes)} of {hardware.gpu.name}"
    if request.counts:
        yield "hits by measured counts are of a fixed list on its own data: other prompts hit less often"


def _alternatives(plan: Plan) -> Iterator[Alternative]:
    request, hardware = plan.request, plan.hardware
    for fmt in map(parse_format, ("int4", "int4 g128", "int8")):
        if str(fmt) != str(request.expert_format):
            yield _alternative(plan, f"{FORMAT}{fmt}", hardware, replace(request, expert_format=fmt))
    ram = (hardware.ram.bytes if request.ram is None else request.ram) * 2
    bigger = hardware.model_copy(update={"ram": hardware.ram.model_copy(update={"bytes": ram})})
    more = replace(request, ram=None if request.ram is None else ram)
    yield _alternative(plan, f"{gib(ram)} of main memory", bigger, more)
    if plan.layout.gpu is not None and hardware.gpu is not None:
        for change in (8 * GIB, -8 * GIB):
            vram = (plan.layout.gpu.capacity or 0) + change
            if vram >= 4 * GIB:
                yield _alternative(plan, f"{gib(vram)} of GPU memory", hardware, replace(request, vram=vram))
        yield _alternative(plan, NO_GPU, hardware, replace(request, vram=0, dense="auto"))
    for name in hardware_names():
        other = load_hardware(name)
        # Another machine brings its own memory; a cap of this one would say nothing about it.
        if other.gpu is not None and name != hardware.name:
            card = replace(request, vram=None, ram=None)
            yield _alternative(plan, f"on {name}", other, card)
    if not request.draft and plan.layout.gpu is not None:
        drafted = replace(request, draft=3)
        yield _alternative(plan, f"3 drafted tokens, {request.accept:.0%} right each", hardware, drafted)


def _alternative(plan: Plan, change: str, hardware: Hardware, request: Request) -> Alternative:
    try:
        request, layout = _choose(plan.inventory, hardware, request, False)
    except (MachineError, InputError) as error:
        return Alternative(change, why=str(error))
    routings = [Routing("local"), Routing("uniform")]
    bound = [decode(plan.inventory, hardware, request, layout, one).tok_s for one in routings]
    now = plan_today(plan.inventory, hardware, request, layout, routings)
    expected = [None if now.why_not else step.tok_s for step in now.steps]
    return Alternative(
        change,
        bound[0],
        bound[1],
        expected[0],
        expected[1],
        on_gpu=layout.on_gpu,
        on_disk=layout.on_disk,
        why=now.why_not,
    )
