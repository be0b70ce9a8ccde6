#!/usr/bin/env python3
"""Checks the object of every instruction set: what it exports, and which instructions it holds.

A unit compiled for an instruction set must export its table and nothing else: above all no weak symbol, since
the linker may keep an AVX-512 copy of an inline function for the whole module. And it must hold only the
instructions that its table is selected for.

Usage: check_symbols.py [BUILD_FOLDER]. Without a folder: the newest below build/, or a new build.
Exit code 1 with one line for each violation.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPORTS = {
    "isa_scalar": "scalar_table",
    "isa_avx2": "avx2_table",
    "isa_avx512": "avx512_plain_unit",
    "isa_avx512_vnni": "avx512_vnni_unit",
    "isa_avx512_bf16": "avx512_bf16_unit",
    "isa_amx": "amx_unit",
    "isa_amx_twin": "amx_twin_unit",
}
IMPORTS = {"memcpy", "memset", "memmove", "fmaf", "__tls_get_addr", "_GLOBAL_OFFSET_TABLE_"}

# Kinds of instructions by mnemonic or operand, as objdump prints them.
KINDS = {
    "AVX": re.compile(r"^v[a-z]|%ymm|%zmm"),
    "AVX-512": re.compile(
        r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b|\{1to|^k(?:mov|and|or|xor|not|shift)"
    ),
    "VNNI": re.compile(r"^vpdp(?:bu|ws)s?"),
    "BF16": re.compile(r"^v(?:dpbf16|cvtne)"),
    "AMX": re.compile(r"^(?:ldtile|sttile|tile|tdp)|%tmm"),
    "BMI": re.compile(r"^(?:shlx|shrx|sarx|mulx|rorx|andn\b|bzhi|pdep|pext|bextr)"),
}
FORBIDDEN = {
    "isa_scalar": {"AVX", "AVX-512", "VNNI", "BF16", "AMX", "BMI"},
    "isa_avx2": {"AVX-512", "VNNI", "BF16", "AMX", "BMI"},
    "isa_avx512": {"VNNI", "BF16", "AMX", "BMI"},
    "isa_avx512_vnni": {"BF16", "AMX", "BMI"},
    "isa_avx512_bf16": {"VNNI", "AMX", "BMI"},
    "isa_amx": {"VNNI", "BMI"},
    "isa_amx_twin": {"AVX", "AVX-512", "VNNI", "BF16", "AMX", "BMI"},
}
# What each must hold, so that a unit compiled without its flags is noticed.
REQUIRED = {
    "isa_avx2": {"AVX"},
    "isa_avx512": {"AVX-512"},
    "isa_avx512_vnni": {"VNNI"},
    "isa_avx512_bf16": {"BF16"},
    "isa_amx": {"AMX"},
}


def check_symbols(unit: str, nm: str) -> list[str]:
    """Violations in the output of ``nm --demangle`` for one unit."""
    wanted = f"hetero::{EXPORTS[unit]}()"
    errors = []
    exported = set()
    for line in nm.splitlines():
        match = re.match(r"^[0-9a-f]*\s+([A-Za-z])\s+(.*)$", line)
        if not match:
            continue
        kind, name = match[1], match[2].strip()
        if kind in "WwVvu":
            errors.append(f"{unit}: weak symbol {name}")
        elif kind == "U":
            if name not in IMPORTS:
                errors.append(f"{unit}: refers to {name}")
        elif kind.isupper():
            exported.add(name)
    errors += [f"{unit}: exports {name}" for name in sorted(exported - {wanted})]
    if wanted not in exported:
        errors.append(f"{unit}: does not export {wanted}")
    return errors


def check_instructions(unit: str, disassembly: str) -> list[str]:
    """Violations in the output of ``objdump -d --no-show-raw-insn`` for one unit."""
    seen: dict[str, str] = {}
    for line in disassembly.splitlines():
        parts = line.split("\t")
        if len(parts) < 2:
            continue
        text = parts[-1].split("#")[0].split("<")[0].strip()
        for kind, pattern in KINDS.items():
            if kind not in seen and pattern.search(text):
                seen[kind] = text
    errors = [f"{unit}: holds {kind}: {seen[kind]}" for kind in sorted(FORBIDDEN[unit]) if kind in seen]
    return errors + [f"{unit}: holds no {kind}" for kind in sorted(REQUIRED.get(unit, set()) - set(seen))]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_object(folder: Path, unit: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"**/CMakeFiles/{unit}.dir/**/{unit}.cpp.o"))), None)


def sources(name: str, seen: set[str]) -> set[str]:
    """The file of cpu_ext and all that it includes from there."""
    if name not in seen:
        seen.add(name)
        for included in re.findall(r'^#include "([^"]+)"', (ROOT / "cpu_ext" / name).read_text(), re.M):
            sources(included, seen)
    return seen


def objects(folder: Path) -> dict[str, Path]:
    """Objects of all units below a build folder; empty if any is missing or older than its sources."""
    found = {}
    for unit in EXPORTS:
        path = find_object(folder, unit)
        newest = max((ROOT / "cpu_ext" / s).stat().st_mtime for s in sources(f"{unit}.cpp", set()))
        if path is None or path.stat().st_mtime < newest:
            return {}
        found[unit] = path
    return found


def build(folder: Path) -> dict[str, Path]:
    """A build of the units alone."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    beside = Path(sys.executable).parent / "cmake"
    cmake = str(beside) if beside.exists() else "cmake"
    output(cmake, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", python)
    output(cmake, "--build", str(folder), "--parallel", "2", "--target", *EXPORTS)
    return objects(folder)


def check(folder: Path | None) -> list[str]:
    """Violations of all units, in ``folder`` or wherever they are found."""
    if folder is not None:
        found = objects(folder)
        if not found:
            return [f"{folder}: no fresh objects of all units"]
        return check_objects(found)
    candidates = (ROOT / "build").glob("*") if (ROOT / "build").is_dir() else iter(())
    for candidate in sorted(candidates, key=lambda p: p.stat().st_mtime, reverse=True):
        if found := objects(candidate):
            return check_objects(found)
    with tempfile.TemporaryDirectory() as temporary:
        return check_objects(build(Path(temporary)))


def check_objects(found: dict[str, Path]) -> list[str]:
    errors = [] if found else ["no objects were built"]
    for unit, path in found.items():
        errors += check_symbols(unit, output("nm", "--demangle", str(path)))
        errors += check_instructions(unit, output("objdump", "-d", "--no-show-raw-insn", str(path)))
    return errors


def main() -> int:
    errors = check(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(
        "\n".join(errors)
        or f"{len(EXPORTS)} units export their tables alone and hold only their instructions"
    )
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
