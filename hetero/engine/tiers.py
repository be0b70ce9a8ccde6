"""Where the experts of a model go: all in RAM, or on disk with some in RAM; decided before a byte is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero.core import ExpertSpec, InputError, MachineError, ModuleInfo
from hetero.cpu import WORKSPACE_BYTES, packed_nbytes
from hetero.formats import parse_format
from hetero.hw import memory
from hetero.rules import Assignment, Placement
from hetero.rules.options import TIERS
from hetero.store.manifest import Block, Manifest, SourceIdentity, block_of
from hetero.store.reads import aligned


@dataclass(frozen=True, slots=True)
class Site:
    """The experts of one module that this package's own operator computes."""

    name: str  # of the experts module
    owner: str  # of the module that its rule replaces
    spec: ExpertSpec
    options: Mapping[str, Any]
    block: Block

    @property
    def on_disk(self) -> bool:
        return self.options.get("tier") == "disk"

    @property
    def stride(self) -> int:
        """Bytes of one expert in an arena."""
        return aligned(self.block.expert_bytes) * self.copies

    @property
    def copies(self) -> int:
        """How many nodes have a copy."""
        if self.options.get("numa") != "replicate":
            return 1
        from hetero.cpu import machine
        from hetero.hw.placement import place

        return place("replicate", machine()).copies

    @property
    def nbytes(self) -> int:
        """Of all experts in RAM."""
        return self.spec.num_experts * self.stride


@dataclass(frozen=True, slots=True)
class Tiers:
    """What was decided: for each site of the disk tier, by name, how many experts RAM holds."""

    sites: tuple[Site, ...]
    slots: Mapping[str, int] = field(default_factory=dict)

    @property
    def miss_bytes(self) -> int:
        """Bytes of experts that one token would read from disk, if each were as likely as any other."""
        total = 0.0
        for site in self.sites:
            if site.name in self.slots:
                absent = 1 - self.slots[site.name] / site.spec.num_experts
                total += site.spec.top_k * site.block.expert_bytes * absent
        return int(total)


def find_sites(modules: Sequence[ModuleInfo], placement: Placement) -> tuple[Site, ...]:
    """The experts that op "moe" gives to the native backend, in the order of the tree."""
    sites = []
    for module in modules:
        assignment = placement.by_module.get(module.name)
        if module.experts is None or assignment is None:
            continue
        acting = placement.by_module[assignment.owner] if assignment.owner is not None else assignment
        options = acting.options.get("experts")
        if acting.op != "moe" or not isinstance(options, Mapping):
            continue
        if options.get("backend", "native") != "native" or options.get("device", "cpu") != "cpu":
            continue
        spec = module.experts
        default = (options.get("format", "f32"),) * 2
        first, down = (parse_format(each) for each in options.get("formats", {}).get(module.name, default))
        size = packed_nbytes(spec, first, down) // spec.num_experts
        block = block_of(module.name, spec, (str(first), str(down)), size)
        sites.append(Site(module.name, acting.module, spec, options, block))
    return tuple(sites)


def manifest_of(sites: Sequence[Site], tensors: Mapping[str, Any]) -> Manifest:
    """What a file of the packed experts of these sites must hold."""
    try:
        return Manifest(SourceIdentity.of(tensors), tuple(site.block for site in sites))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from None


def with_tier(placement: Placement, tier: str | None) -> Placement:
    """The placement with all native experts on ``tier``; None: as the rules say."""
    if tier is None:
        return placement
    if tier not in TIERS:
        raise InputError(f"--tier {tier}: must be one of {', '.join(TIERS)}")

    def change(experts: Mapping[str, Any]) -> Mapping[str, Any]:
        if experts.get("backend", "native") != "native":
            return experts
        return {**experts, "tier": tier, "ram": experts.get("ram") if tier == "disk" else None}

    return change_experts(placement, change)


def change_experts(placement: Placement, change: Any) -> Placement:
    """The placement with ``change`` made to the ``experts`` options of every op "moe"."""

    def one(assignment: Assignment) -> Assignment:
        experts = assignment.options.get("experts")
        if assignment.op != "moe" or not isinstance(experts, Mapping):
            return assignment
        return replace(assignment, options={**assignment.options, "experts": change(experts)})

    return replace(placement, assignments=tuple(map(one, placement.assignments)))


def decide(sites: Sequence[Site], other: int, largest: int, what: str) -> Tiers:
    """How many experts of each site RAM holds, of those that the rules put on disk.

    ``other``: bytes of all else that the plan puts into RAM; ``largest``: of the tensor that is in flight
    while loading. A rule's ``ram`` is for all its blocks; without one they get what is available, but for a
    tenth and the workspace of a step. Where a rule's experts fit whole, they are taken into RAM like any
    others. Raises MachineError, with the numbers, where it does not fit; swap never counts.
    """
    have = memory.available()
    fixed = other + largest + sum(site.nbytes for site in sites if not site.on_disk)
    rules: dict[int | None, list[Site]] = {}
    for site in sites:
        if site.on_disk:
            rules.setdefault(site.options.get("ram"), []).append(site)
    slots: dict[str, int] = {}
    held = 0
    for ram, group in sorted(rules.items(), key=lambda item: item[0] is None):
        budget = ram if ram is not None else int(have.bytes * 0.9) - WORKSPACE_BYTES - fixed - held
        found = _share(group, budget, what, have, fixed + held)
        slots |= found
        held += sum(found.get(site.name, site.spec.num_experts) * site.stride for site in group)
    if fixed + held > have.bytes:
        raise MachineError(_too_much(sites, fixed, held, what, have))
    return Tiers(tuple(sites), slots)


def _share(
    group: Sequence[Site], budget: int, what: str, have: memory.Available, fixed: int
) -> dict[str, int]:
    """Slots of the sites of one rule, each the same share of its experts; none where all fit."""
    total = sum(site.nbytes for site in group)
    if budget >= total:
        return {}
    # Fewer than a token needs would read experts twice a step.
    least = sum(min(site.spec.top_k, site.spec.num_experts) * site.stride for site in group)
    if budget < least and group[0].options.get("ram") is not None:
        raise MachineError(
            f"{what}: the rule's 'ram' is {memory.gib(budget)}, and the experts of one token take "
            f"{memory.gib(least)}: that is the least"
        )
    if budget < least:
        raise MachineError(
            f"{what}: {memory.gib(max(0, budget))} of RAM is left for the experts of the disk tier, and "
            f"those of one token take {memory.gib(least)}; {memory.gib(have.bytes)} is available "
            f"({have.limit}), all else needs {memory.gib(fixed)}, and a tenth and "
            f"{WORKSPACE_BYTES >> 20} MiB are kept for steps and what else runs: a smaller format, or "
            f"--ram {_round(_with_reserve(fixed + least))} where the machine has that much"
        )
    share = (budget - least) / max(1, total - least)
    slots = {}
    for site in group:
        few = min(site.spec.top_k, site.spec.num_experts)
        slots[site.name] = few + int((site.spec.num_experts - few) * share)
    return slots


def _too_much(sites: Sequence[Site], fixed: int, held: int, what: str, have: memory.Available) -> str:
    """What is lacking, and what would work."""
    experts = sum(site.nbytes for site in sites if not site.on_disk) + held
    least = fixed + held - experts + sum(min(s.spec.top_k, s.spec.num_experts) * s.stride for s in sites)
    text = (
        f"{what} needs {memory.gib(fixed + held)} of memory, {memory.gib(experts)} of it for experts; "
        f"{memory.gib(have.bytes)} is available ({have.limit}), and swap would be too slow to count. "
    )
    ways = ["a smaller weight format"]
    least = _with_reserve(least)
    if any(not site.on_disk for site in sites) and least <= have.bytes:
        ways.append(
            f"--tier disk (experts stay on disk, those used most in RAM: from {memory.gib(least)} on, "
            f"a tenth and {WORKSPACE_BYTES >> 20} MiB of it kept for steps and what else runs)"
        )
    ways.append(f"--ram {_round(fixed + held)} where the machine has more than it says")
    return f"{text}What works: {'; '.join(ways)}"


def _with_reserve(nbytes: int) -> int:
    """The RAM of which ``decide`` gives so much to weights, where it shares it out itself."""
    return math.ceil((nbytes + WORKSPACE_BYTES) / 0.9)


def _round(nbytes: int) -> str:
    """A size that ``--ram`` takes, not below ``nbytes`` and what a process needs beside weights."""
    mib = -(-(nbytes + WORKSPACE_BYTES + (512 << 20)) // 2**20)
    return f"{-(-mib // 1024)}GiB" if mib > 4096 else f"{mib}MiB"


def apply_slots(placement: Placement, tiers: Tiers) -> Placement:
    """The placement that ``hetero.inject`` takes: ``slots`` by name of experts module."""
    return change_experts(placement, lambda experts: {**experts, "slots": dict(tiers.slots)})


def slow_note(tiers: Tiers, speed: float, file: Path) -> str:
    """The warning of a disk tier, with an estimate from a measured ``speed`` in bytes a second."""
    held = sum(tiers.slots[s.name] * s.stride for s in tiers.sites if s.name in tiers.slots)
    total = sum(s.nbytes for s in tiers.sites if s.name in tiers.slots)
    seconds = tiers.miss_bytes / max(speed, 1.0)
    rate = 1 / seconds if seconds else float("inf")
    return (
        f"disk tier: RAM holds {memory.gib(held)} of {memory.gib(total)} of experts, the rest is read from "
        f"{file} at {speed / 1e9:.2f} GB/s (measured). If all experts were equally likely, a token would "
        f"read {memory.gib(tiers.miss_bytes)}: at most {rate:.2g} tok/s; real use repeats experts and is "
        "faster"
    )
