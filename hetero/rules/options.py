"""What each operator may be told in a rule, and the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.config import MAX_THREADS
from hetero.core import InputError
from hetero.formats import GPU_FORMATS, GPU_LINEAR_FORMATS, Format, parse_format, parse_target
from hetero.hw.memory import parse_bytes
from hetero.hw.placement import NUMA_WORDS, parse_numa
from hetero.rules.devices import check_device
from hetero.rules.embedding_options import embedding_options, refuse_table
from hetero.rules.gpu_options import fused_options, read_cache, read_defer, read_share
from hetero.rules.mistakes import Mistakes
from hetero.rules.schema import EXPERT_KEYS, Replace, check_keys
from hetero.rules.source import Value, did_you_mean, listed

DEFAULT_FORMAT = "int8"
ISAS = ("auto", "scalar", "avx2", "avx512", "amx")
TIERS = ("ram", "disk")
BACKENDS = ("native", "torch", "kt_kernel")
_KT_FORMATS = ("bf16", "int8 g32", "int4 g32")

# Replace, devices that exist -> complete options.
OptionParser = Callable[[Replace, Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A rule's ``format``: the checkpoint's own values, a format, or the one where the other cannot be."""

    keeps: bool
    fallback: Format | None  # None: ``keep``, the checkpoint's own values or an error
    blocks: bool = False  # whether GGUF types of 1 and 2 bits stay in the blocks of their file


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One operator as the rules know it."""

    parse: OptionParser
    # Whether the operator builds everything below the module itself, so that no rule may look there.
    owns_subtree: bool = True
    # Whether it can only take the place of a MoE block.
    needs_moe_block: bool = False
    # Whether it can only take the place of an embedding.
    needs_embedding: bool = False


def parse_choice(text: str) -> FormatChoice:
    """``"keep"``, ``"keep blocks"``, ``"auto"`` (int8 where nothing is quantised), ``"auto int4 g64"`` or a
    format.

    Raises InputError on anything else.
    """
    word, _, rest = text.strip().partition(" ")
    if word.lower() == "keep" and rest.strip().lower() in ("", "blocks"):
        return FormatChoice(keeps=True, fallback=None, blocks=bool(rest))
    if word.lower() == "auto":
        return FormatChoice(keeps=True, fallback=parse_target(rest or DEFAULT_FORMAT))
    return FormatChoice(keeps=False, fallback=parse_target(text))


def expected_format(text: str) -> Format:
    """The format of a rule's word where no checkpoint is known: as if it were not quantised."""
    return parse_choice(text).fallback or parse_format("bf16")


def moe_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    """``experts: {device, format, isa, numa, threads, backend, tier, ram, cache, share, defer}`` with the
    defaults, and ``format`` of the block's linear layers, None: as they are."""
    mistakes = Mistakes()
    dense: str | None = None
    with mistakes:
        refuse_table(replace)
    with mistakes:
        if replace.kwargs is not None:
            dense = _linear_format(replace.kwargs, replace, devices, "'kwargs: {format: ...}' of op 'moe'")
    experts = replace.experts or Value({}, replace.where)
    with mistakes:
        check_keys(experts, "'experts'", ("device", *EXPERT_KEYS))
    get = experts.mapping("'experts'").get
    readers: dict[str, Callable[[], Any]] = {
        "device": lambda: _expert_device(experts, replace, devices),
        "format": lambda: _format(get("format"), get("backend")),
        "isa": lambda: _word(get("isa"), "isa", ISAS),
        "numa": lambda: _numa(get("numa")),
        "threads": lambda: _threads(get("threads")),
        "backend": lambda: _word(get("backend"), "backend", BACKENDS),
        "tier": lambda: _tier(get("tier"), get("backend")),
        "ram": lambda: _ram(get("ram"), get("tier")),
        "cache": lambda: read_cache(experts, replace),
        "share": lambda: read_share(experts, replace),
        "defer": lambda: read_defer(experts, replace),
    }
    options: dict[str, Any] = {}
    for key in ("isa", "numa"):
        with mistakes:
            given = get(key)
            if given is not None and given.data != "auto" and _is_kt(get("backend")):
                given.where.fail(f"experts: backend 'kt_kernel' takes no '{key}': it chooses by itself")
    for key, read in readers.items():
        with mistakes:
            options[key] = read()
    mistakes.tell()
    return {"experts": options, "format": dense}


def keep_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    mistakes = Mistakes()
    with mistakes:
        refuse_table(replace)
    for given, key in ((replace.experts, "experts"), (replace.kwargs, "kwargs")):
        with mistakes:
            if given is not None:
                given.where.fail(f"op 'keep' takes no '{key}': it leaves the module as it is")
    mistakes.tell()
    return {}


def linear_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    """``kwargs: {format}``."""
    mistakes = Mistakes()
    with mistakes:
        refuse_table(replace)
    with mistakes:
        if replace.experts is not None:
            replace.experts.where.fail(
                "'experts' belongs to op 'moe'; op 'linear' takes 'kwargs: {format: ...}'"
            )
    fmt: str | None = None
    with mistakes:
        fmt = _linear_format(replace.kwargs or Value({}, replace.where), replace, devices, "op 'linear'")
    mistakes.tell()
    return {"format": fmt or DEFAULT_FORMAT}


def free_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    """``kwargs`` as they are: a user's operator, or one of another package, checks them itself."""
    refuse_table(replace)
    if replace.experts is not None:
        replace.experts.where.fail("'experts' belongs to op 'moe'; options of other operators go in 'kwargs'")
    return dict(replace.kwargs.plain()) if replace.kwargs is not None else {}


BUILTIN: Mapping[str, OpSchema] = {
    "moe": OpSchema(moe_options, needs_moe_block=True),
    "keep": OpSchema(keep_options, owns_subtree=False),
    "linear": OpSchema(linear_options),
    "fused": OpSchema(fused_options, owns_subtree=False),
    "embedding": OpSchema(embedding_options, needs_embedding=True),
}
FOREIGN = OpSchema(free_options)


def find_schema(replace: Replace, known: Mapping[str, OpSchema]) -> OpSchema:
    """The schema of a rule's operator. Raises InputError for an operator that nobody registered."""
    if replace.op is None:
        return FOREIGN
    name = replace.op.data
    if name not in known:
        hint = did_you_mean(name, known) or f"; the operators are: {listed(sorted(known))}"
        replace.op.where.fail(f"unknown op '{name}'{hint}")
    return known[name]


def schemas_for(names: Sequence[str]) -> dict[str, OpSchema]:
    """Schemas of registered operators by name; those that this package does not know take ``kwargs``."""
    return {**BUILTIN, **{name: BUILTIN.get(name, FOREIGN) for name in names}}


def _expert_device(experts: Value, replace: Replace, devices: Sequence[str]) -> str:
    """The CPU, or the GPU that the block is on."""
    given = experts.data.get("device")
    device = check_device(given, experts.where, devices, "experts: device")
    if device != "cpu":
        block = check_device(replace.device, replace.where, devices)
        if block != device:
            experts.where.fail(f"experts on '{device}' need their block there, which is on '{block}'")
        for key in ("backend", "isa", "numa", "threads", "tier", "ram"):
            value = experts.data.get(key)
            if value is not None and value.data not in ("native", "auto", TIERS[0]):
                value.where.fail(f"experts: '{key}' is about the CPU, and these experts are on '{device}'")
        _gpu_format(experts.data.get("format"), device, "experts", GPU_FORMATS)
    return device


def _gpu_format(value: Value | None, device: str, what: str, names: Sequence[str]) -> None:
    """Kernels on a GPU read some formats only."""
    if value is None:
        return
    try:
        choice = parse_choice(value.string("'format'"))
    except InputError as error:
        value.where.fail(f"{what}: {error}")
    parsed = choice.fallback
    if parsed is None:
        if choice.blocks:
            value.where.fail(f"{what} on '{device}' are not read from the blocks of a file: write 'keep'")
        if what != "experts":
            value.where.fail(f"{what} on '{device}' cannot keep a checkpoint's values; write a format")
    elif parsed.name not in names:
        valid = listed([name for name in names if not Format(name).kept_only])
        value.where.fail(f"{what} on '{device}': no kernels for {parsed}; it is one of {valid}")


def _linear_format(kwargs: Value, replace: Replace, devices: Sequence[str], op: str) -> str | None:
    """``kwargs: {format}`` of linear layers on a GPU; None where it says nothing."""
    mistakes = Mistakes()
    with mistakes:
        check_keys(kwargs, "'kwargs'", ("format",))
    value = kwargs.mapping("'kwargs'").get("format")
    with mistakes:
        device = check_device(replace.device, replace.where, devices)
        if device == "cpu":
            replace.where.fail(f"{op} runs on a GPU: write 'device: cuda:0', or 'op: keep' for the CPU")
        _gpu_format(value, device, "linear layers", GPU_LINEAR_FORMATS)
    mistakes.tell()
    return None if value is None else str(value.data)


def _is_kt(backend: Value | None) -> bool:
    return backend is not None and backend.data == "kt_kernel"


def _format(value: Value | None, backend_value: Value | None) -> str:
    backend = BACKENDS[0] if backend_value is None else backend_value.data
    if value is None:
        if backend == BACKENDS[0]:
            return f"auto {DEFAULT_FORMAT}"
        return "f32" if backend == "torch" else DEFAULT_FORMAT
    text = value.string("'format'")
    try:
        parsed = parse_choice(text).fallback
    except InputError as error:
        value.where.fail(f"experts: {error}")
    if backend != BACKENDS[0] and parsed is None:
        value.where.fail(f"experts: backend '{backend}' cannot keep a checkpoint's values; write a format")
    if backend == "torch" and str(parsed) != "f32":
        value.where.fail(f"experts: backend 'torch' computes in float32: write 'format: f32', not '{text}'")
    if backend == "kt_kernel" and str(parsed) not in _KT_FORMATS:
        value.where.fail(f"experts: backend 'kt_kernel' has the formats bf16, int8 and int4, not '{text}'")
    return text


def _numa(value: Value | None) -> str:
    """How experts lie over memory nodes. Whether "node N" exists is for the machine that loads them."""
    if value is None:
        return NUMA_WORDS[0]
    shown = value.text or value.kind
    try:
        parse_numa(str(value.data) if isinstance(value.data, str) else shown)
    except InputError:
        listed_words = listed((*NUMA_WORDS, "node N"))
        hint = did_you_mean(shown, NUMA_WORDS) or f"; it is one of {listed_words}"
        value.where.fail(f"experts: unknown numa '{shown}'{hint}")
    return str(value.data)


def _word(value: Value | None, key: str, words: Sequence[str]) -> str:
    """One of a list of words; the first is the default."""
    return words[0] if value is None else value.one_of("experts", key, words)


def _tier(value: Value | None, backend: Value | None) -> str:
    word = _word(value, "tier", TIERS)
    if value is not None and word == "disk" and backend is not None and backend.data != BACKENDS[0]:
        value.where.fail(f"experts: 'tier: disk' needs backend '{BACKENDS[0]}', not '{backend.data}'")
    return word


def _ram(value: Value | None, tier: Value | None) -> int | None:
    """Bytes of RAM for the experts of all blocks that the rule places; None: what there is."""
    if value is None:
        return None
    if tier is None or tier.data != "disk":
        value.where.fail("experts: 'ram' belongs to 'tier: disk': how much of them RAM holds")
    try:
        return parse_bytes(value.data if isinstance(value.data, int) else str(value.text or value.data))
    except InputError as error:
        value.where.fail(f"experts: ram: {error}")


def _threads(value: Value | None) -> int | None:
    if value is None:
        return None
    count = value.data
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_THREADS:
        value.where.fail(f"experts: 'threads' must be a number from 1 to {MAX_THREADS}, not {value.kind}")
    return count
