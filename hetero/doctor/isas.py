"""Whether every instruction set computes what it should, tiles included.

A processor that claims what it cannot do kills the process, so this runs in one of its own
(``python -m hetero.doctor.isas``), which prints a line of JSON for each set as it goes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from hetero.doctor.finding import Finding, ok, problem, warning

_COMMAND = (sys.executable, "-m", "hetero.doctor.isas")
TIMEOUT_S = 120.0


def check_isas(command: Sequence[str] = _COMMAND, timeout: float = TIMEOUT_S) -> Iterator[Finding]:
    """One finding for each instruction set, by running its kernels against the plain ones."""
    environment = {**os.environ, "HETERO_TUNE": "off", "HETERO_ISA": "auto"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield warning("instruction sets", f"could not be tried: {error}", "")
        return
    last = ""
    for line in done.stdout.splitlines():
        told = json.loads(line)
        last = told["isa"]
        if "error" in told:
            yield (
                _denied(told) if told["error"] == "denied" else problem(f"set {last}", told["error"], _ADVICE)
            )
        elif "kernels" in told:
            yield ok(f"set {last}", told["kernels"])
            last = ""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        yield problem(f"set {last or 'unknown'}", f"ended by {name} when it was used", _ADVICE)
    elif done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield problem("instruction sets", reason, "reinstall hetero, so that its extension is built here")


_ADVICE = "set HETERO_ISA to another set; a virtual machine may claim what its host does not give"


def _denied(told: dict[str, str]) -> Finding:
    return warning(
        f"set {told['isa']}",
        "the processor has tiles, the operating system refuses them (arch_prctl)",
        "a kernel of 5.16 or newer, or a container's seccomp profile that lets arch_prctl through",
    )


def main() -> None:
    """Run 16 rows through every set: by contract all give the same bits."""
    import torch

    from hetero import cpu
    from hetero.core import ExpertSpec
    from hetero.cpu import CpuExperts
    from hetero.formats import parse_format

    def say(**fields: str) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    if cpu.tiles_refused():
        say(isa="amx", error="denied")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    spec = ExpertSpec(num_experts=2, hidden=256, intermediate=128, top_k=2)
    x = torch.randn(16, 256, generator=generator)
    ids = torch.tensor([[0, 1]] * 16)
    weights = torch.rand(16, 2, generator=generator)
    made = {name: CpuExperts(spec, parse_format(name), isa="scalar", threads=1) for name in ("int4", "int8")}
    for experts in made.values():
        for expert in range(2):
            experts.put(expert, "gate", torch.randn(128, 256, generator=generator) / 16)
            experts.put(expert, "up", torch.randn(128, 256, generator=generator) / 16)
            experts.put(expert, "down", torch.randn(256, 128, generator=generator) / 12)
    wanted = {name: experts.forward(x, ids, weights) for name, experts in made.items()}
    for isa in cpu.isas():
        say(isa=isa)
        used: set[str] = set()
        wrong = []
        for name, experts in made.items():
            experts.use(isa)
            cpu.reset_kernel_counts()
            if not torch.equal(experts.forward(x, ids, weights), wanted[name]):
                wrong.append(name)
            used |= set(cpu.kernel_counts())
        tiles = [p.instruction for p in cpu.probes() if p.isa == isa]
        for instruction in tiles:
            cpu.run_probe(instruction, 100)
        if wrong:
            say(isa=isa, error=f"computes other results than the plain code ({', '.join(wrong)})")
        else:
            say(
                isa=isa,
                kernels=f"right by {', '.join(sorted(used))}" + (f"; {', '.join(tiles)}" if tiles else ""),
            )


if __name__ == "__main__":
    main()
