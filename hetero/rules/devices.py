"""Device names of rule files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetero.core import InputError
from hetero.rules.source import Value, Where, did_you_mean, listed

_CUDA = re.compile(r"cuda(?::([0-9]{1,3}))?", re.ASCII)
DEFAULT_DEVICE = "cpu"


def normalise(name: str) -> str | None:
    """``cpu`` and ``cuda:N`` as they are, ``cuda`` as ``cuda:0``; None for anything else."""
    if name == "cpu":
        return name
    found = _CUDA.fullmatch(name)
    return f"cuda:{int(found[1] or 0)}" if found else None


def parse_devices(text: str) -> tuple[str, ...]:
    """A list as the command line writes it, ``cpu,cuda:0``."""
    words = [word.strip() for word in text.split(",")]
    devices = [normalise(word) for word in words]
    for word, device in zip(words, devices, strict=True):
        if device is None:
            raise InputError(f"--devices {text}: '{word}' is no device; write cpu, cuda:0, cuda:1, ...")
    return tuple(dict.fromkeys(device for device in devices if device))


def check_device(
    value: Value | None, where: Where, devices: Sequence[str] | None, what: str = "device"
) -> str:
    """The normalised device of a rule; ``cpu`` where the rule names none.

    Raises InputError for a word that is no device and for a device that ``devices`` does not have; None
    leaves the second check out.
    """
    if value is None:
        return DEFAULT_DEVICE
    name = value.string(f"'{what}'")
    device = normalise(name)
    if device is None:
        hint = did_you_mean(name, ("cpu", "cuda:0")) or "; write cpu, cuda or cuda:N"
        value.where.fail(f"unknown {what} '{name}'{hint}")
    if devices is not None and device not in devices:
        value.where.fail(f"{what} '{name}' does not exist here; the devices are: {listed(devices)}")
    return device
