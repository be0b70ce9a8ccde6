"""Options of rules that are about a GPU: the experts' cache, the share that it reads, experts that are added
one layer later, fused layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.core import InputError
from hetero.hw.memory import parse_bytes
from hetero.rules.devices import check_device
from hetero.rules.embedding_options import refuse_table
from hetero.rules.mistakes import Mistakes
from hetero.rules.schema import Replace, check_keys
from hetero.rules.source import Value

AUTO = "auto"
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much of the experts of all blocks of a rule lies in GPU memory too: ``nbytes``, or a ``part`` from
    0 to 1; neither: as much as there is room for."""

    nbytes: int | None = None
    part: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.nbytes is None and self.part is None

    def of(self, total: int) -> int | None:
        """Bytes where the experts take ``total``; None for auto."""
        if self.part is not None:
            return int(total * self.part)
        return None if self.nbytes is None else min(self.nbytes, total)

    def slots(self, experts: int, total: int) -> int | None:
        """Experts of a block of ``experts``, where those of all the rule's blocks take ``total`` bytes."""
        if self.part is not None:
            return round(experts * self.part)
        held = self.of(total)
        return None if held is None else experts * held // total


def parse_cache(text: str) -> CacheSize:
    """``auto``, ``0``, a size such as ``12GiB`` or a part such as ``30%``. Raises InputError."""
    word = text.strip()
    if word == AUTO:
        return CacheSize()
    if word == "0":
        return CacheSize(nbytes=0)
    if found := _PERCENT.fullmatch(word):
        part = float(found[1]) / 100
        if part > 1:
            raise InputError(f"'{text}' is more than all experts")
        return CacheSize(part=part)
    try:
        return CacheSize(nbytes=parse_bytes(word))
    except InputError:
        raise InputError(f"'{text}' must be auto, 0, a size like 12GiB or a part like 30%") from None


def read_cache(experts: Value, replace: Replace) -> CacheSize:
    """``experts: cache``."""
    value = experts.data.get("cache")
    if value is None:
        return CacheSize()
    try:
        size = parse_cache(value.text or value.kind)
    except InputError as error:
        value.where.fail(f"experts: cache: {error}")
    if not size.is_auto and size.of(1 << 40):
        _needs_both(value, "cache", experts, replace)
    return size


def read_share(experts: Value, replace: Replace) -> float | None:
    """``experts: share``: from 0 to 1; None: as measured."""
    value = experts.data.get("share")
    if value is None or value.data == AUTO:
        return None
    share = value.data
    number = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share)
    if not number or not 0 <= share <= 1:
        value.where.fail(f"experts: 'share' must be auto or a number from 0 to 1, not {value.kind}")
    if share:
        _needs_both(value, "share", experts, replace)
    return float(share)


def read_defer(experts: Value, replace: Replace) -> int:
    """``experts: defer``: how many of a token's experts that the CPU computes are added one layer later."""
    value = experts.data.get("defer")
    if value is None:
        return 0
    count = value.data
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        value.where.fail(f"experts: 'defer' must be a number of experts, 0 or more, not {value.kind}")
    if count:
        _needs_both(value, "defer", experts, replace)
    return int(count)


def _needs_both(value: Value, key: str, experts: Value, replace: Replace) -> None:
    """Refuse what needs experts in main memory and their block on a GPU."""
    where = experts.data.get("device")
    if where is not None and where.data != "cpu":
        value.where.fail(f"experts: '{key}' is of experts on the CPU, and these are on '{where.data}'")
    if check_device(replace.device, replace.where, None) == "cpu":
        value.where.fail(f"experts: '{key}' needs its block on a GPU: write 'device: cuda:0' by 'op: moe'")
    backend, tier = experts.data.get("backend"), experts.data.get("tier")
    if backend is not None and backend.data != "native":
        value.where.fail(f"experts: '{key}' needs backend 'native', not '{backend.data}'")
    if tier is not None and tier.data == "disk":
        value.where.fail(f"experts: '{key}' needs all experts in main memory, not 'tier: disk'")


def fused_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    """``kwargs: {lanes}``: 1, 2, or 0 for auto, whether halves of a step's rows take turns; the device must
    be a GPU."""
    mistakes = Mistakes()
    lanes = 1
    with mistakes:
        refuse_table(replace)
    with mistakes:
        if replace.experts is not None:
            where = replace.experts.where
            where.fail("op 'fused' takes no 'experts': what lies in the layer has rules of its own")
    with mistakes:
        if replace.kwargs is not None:
            lanes = _read_lanes(replace.kwargs)
    with mistakes:
        if check_device(replace.device, replace.where, devices) == "cpu":
            replace.where.fail("op 'fused' runs on a GPU: write 'device: cuda:0', or 'op: keep' for the CPU")
    mistakes.tell()
    return {"lanes": lanes}


def _read_lanes(kwargs: Value) -> int:
    check_keys(kwargs, "'kwargs'", ("lanes",))
    value = kwargs.data.get("lanes")
    if value is None:
        return 1
    if value.data == AUTO:
        return 0
    if isinstance(value.data, bool) or value.data not in {1, 2}:
        value.where.fail(f"op 'fused': 'lanes' must be 1, 2 or auto, not {value.kind}")
    return int(value.data)
