"""Whole models from a checkpoint, from a file of packed experts and from disk: the same logits, and what is
told when a file or the memory does not serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hetero.cli import app
from hetero.core import InputError, MachineError
from hetero.engine import packing
from hetero.engine.experts import ExpertsOnTiers, StoreOptions, early_reads
from hetero.engine.load import Loaded, load_model, pack_model
from hetero.hw import memory
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import disk_experts, disk_reads
from hetero.store import bulk, packfile
from hetero.store.bulk import EarlyReads
from tests.model.checkpoints import write
from tests.model.quantised import SCHEMES, write_quantised
from tests.model.quiet import quiet  # noqa: F401  no progress bars
from tests.store.made import failing_disk

RULES = """
vars: {{format: int8}}
rules:
  - name: experts
    match: {{class: MoeBlock}}
    replace: {{op: moe, experts: {{format: "${{format}}", tier: {tier} {ram}}}}}
  - name: the rest
    match: {{name: '.*'}}
    replace: {{op: keep}}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "packed"
    memory.state(None)


def rules(tmp_path: Path, tier: str = "ram", ram: str = "") -> Path:
    path = tmp_path / f"{tier}{ram}.yaml"
    path.write_text(RULES.format(tier=tier, ram=f", ram: {ram}" if ram else ""))
    return path


def logits(loaded: Loaded) -> torch.Tensor:
    """Of a prompt of 40 tokens and of five more, one by one."""
    model = loaded.runnable.model
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 90, (1, 45), generator=generator)
    with torch.no_grad():
        first = model(ids[:, :40], use_cache=True)
        rows, cache = [first.logits], first.past_key_values
        for at in range(40, 45):
            step = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            rows.append(step.logits)
    return torch.cat(rows, dim=1)


def kept(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A checkpoint, rules for it, and logits of a first run, which has kept its packed experts."""
    folder, in_ram = tmp_path / "m", rules(tmp_path)
    write("qwen3_moe", folder)
    return folder, in_ram, logits(load_model(folder, rules=in_ram, store=StoreOptions("write")))


def only(found: tuple[str, ...], word: str) -> str:
    (line,) = [line for line in found if word in line]
    return line


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "gemma4_text"])
def test_the_same_logits_from_everywhere(tmp_path: Path, own_cache: Path, model_type: str) -> None:
    """gpt_oss has biases, gemma4 a norm after each expert, which torch computes between two calls."""
    folder = tmp_path / "Model-2.5-7B"
    write(model_type, folder)
    in_ram, small = rules(tmp_path), rules(tmp_path, "disk", "170KiB")
    direct = load_model(folder, rules=in_ram)
    want = logits(direct)
    assert not own_cache.exists()

    kept = load_model(folder, rules=in_ram, store=StoreOptions("write"))
    only(kept.notes, "are kept in")
    (file,) = own_cache.iterdir()
    assert file.name.startswith("Model-2.5-7B-")
    cached = load_model(folder, rules=in_ram)
    only(cached.notes, "were read from")
    assert torch.equal(logits(kept), want)
    assert torch.equal(logits(cached), want)
    assert "packed" not in "".join(load_model(folder, rules=in_ram, store=StoreOptions("off")).notes)

    tiered = load_model(folder, rules=small)
    warning = only(tiered.notes, "disk tier")
    assert str(file) in warning
    assert "tok/s" in warning
    assert torch.equal(logits(tiered), want)
    backends = disk_experts(tiered.runnable.model)
    reads = disk_reads(backends)
    assert reads.nbytes > 0
    assert reads.cache.misses > 0
    # gemma4's routers see more than the block's input.
    assert (backends[0].guessed.read > 0) == (model_type != "gemma4_text")
    assert sum(one.slots for one in backends) < sum(one.spec.num_experts for one in backends)
    assert tiered.expert_bytes == sum(one.nbytes for one in backends) < direct.expert_bytes
    assert list(own_cache.iterdir()) == [file]


@pytest.mark.parametrize("scheme", ["fp8", "w4a16-asym", "gptq-order"])
def test_values_that_a_checkpoint_keeps_stay_the_same(tmp_path: Path, own_cache: Path, scheme: str) -> None:
    """Experts that come as codes pass through the file unchanged."""
    folder = tmp_path / "m"
    write_quantised(folder, "qwen3_moe", SCHEMES[scheme])
    sets = {"format": "keep"}
    direct = load_model(folder, rules=rules(tmp_path), overrides=sets)
    want = logits(direct)
    backend = next(module.backend for module in direct.runnable.model.modules() if hasattr(module, "backend"))
    assert str(backend.format) == SCHEMES[scheme].format
    packed = pack_model(folder, own_cache, rules=rules(tmp_path), overrides=sets)
    cached = load_model(folder, rules=rules(tmp_path), overrides=sets)
    assert str(packed.path) in only(cached.notes, "were read from")
    assert torch.equal(logits(cached), want)
    few = 2 * backend.nbytes // 5 * 2
    tiered = load_model(folder, rules=rules(tmp_path, "disk", str(few)), overrides=sets)
    assert disk_experts(tiered.runnable.model)
    assert torch.equal(logits(tiered), want)


def test_pack_ahead_equals_what_a_run_keeps(tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "m"
    write("qwen3_moe", folder)
    told: list[str] = []
    packed = pack_model(folder, folder, rules=rules(tmp_path), tell=told.append)
    assert not packed.reused
    assert packed.path.parent == folder
    assert told == []
    loaded = load_model(folder, rules=rules(tmp_path))
    assert str(packed.path) in only(loaded.notes, "were read from")
    kept = load_model(folder, rules=rules(tmp_path), store=StoreOptions(str(tmp_path / "other")))
    assert str(packed.path) in only(kept.notes, "were read from")
    assert pack_model(folder, folder, rules=rules(tmp_path)).reused
    again = pack_model(folder, folder, rules=rules(tmp_path), force=True)
    assert not again.reused
    packed.path.rename(tmp_path / "ahead.hpack")
    load_model(folder, rules=rules(tmp_path), store=StoreOptions("write"))
    (kept_file,) = own_cache.iterdir()
    assert kept_file.read_bytes() == (tmp_path / "ahead.hpack").read_bytes()


def test_a_file_that_does_not_serve_is_told_once_and_made_anew(tmp_path: Path, own_cache: Path) -> None:
    folder, in_ram, want = kept(tmp_path)
    (file,) = own_cache.iterdir()
    whole = file.read_bytes()

    def reloaded(word: str) -> None:
        found = load_model(folder, rules=in_ram, store=StoreOptions("write"))
        only(found.notes, word)
        only(found.notes, "are kept in")
        assert len(found.notes) == 2
        assert torch.equal(logits(found), want)
        assert len(load_model(folder, rules=in_ram).notes) == 1
        assert [p.name for p in own_cache.iterdir()] == [file.name]

    file.write_bytes(whole[:-1])
    reloaded("is torn")
    file.write_bytes(b"something else")
    reloaded("is no file of packed experts")
    at = len(whole) - 9000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    reloaded("is damaged")
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    reloaded("the checkpoint has changed since (model.safetensors)")


def test_a_disk_that_fails_once_costs_no_file(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, in_ram, want = kept(tmp_path)
    (file,) = own_cache.iterdir()

    with monkeypatch.context() as patched:
        failing_disk(patched)
        found = load_model(folder, rules=in_ram)
    only(found.notes, "cannot be read: Input/output error; these experts were packed anew")
    assert torch.equal(logits(found), want)
    only(load_model(folder, rules=in_ram).notes, f"were read from {file}")


def test_a_file_is_read_before_it_is_known_to_serve(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, in_ram, want = kept(tmp_path)
    begun: list[EarlyReads] = []
    taken: list[bool] = []
    begin, take = EarlyReads.__init__, EarlyReads.take

    def noted(self: EarlyReads, file: Any) -> None:
        begun.append(self)
        begin(self, file)

    def counted(self: EarlyReads, experts: Any) -> Any:
        found = take(self, experts)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(EarlyReads, "__init__", noted)
    monkeypatch.setattr(EarlyReads, "take", counted)
    found = load_model(folder, rules=in_ram)
    assert torch.equal(logits(found), want)
    only(found.notes, "were read from")
    assert (len(begun), taken) == (1, [True])
    # Another format, of which there is no file; then the disk tier, which reads what it needs alone.
    other = load_model(folder, rules=in_ram, overrides={"format": "bf16"})
    assert other.notes == ()
    assert torch.equal(logits(load_model(folder, rules=rules(tmp_path, "disk", "170KiB"))), want)
    assert (len(begun), taken) == (3, [True])
    assert all(one.taken == 0 for one in begun)
    # Which of several files is wanted is not guessed.
    load_model(folder, rules=in_ram, overrides={"format": "bf16"}, store=StoreOptions("write"))
    assert torch.equal(logits(load_model(folder, rules=in_ram)), want)
    assert (len(begun), taken) == (4, [True])
    # What is wrong with a model is told as ever.
    next(own_cache.glob("*.hpack")).unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="config"):
        load_model(folder, rules=in_ram)
    assert begun[-1].taken == 0


def test_memory_that_was_taken_early_is_counted_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, in_ram, want = kept(tmp_path)
    held: list[int] = []
    keep = ExpertsOnTiers.keep

    def after_reads(self: ExpertsOnTiers, sinks: Any) -> None:
        held.append(sum(count() for count in memory._ahead))
        keep(self, sinks)

    monkeypatch.setattr(ExpertsOnTiers, "keep", after_reads)
    found = load_model(folder, rules=in_ram)
    only(found.notes, "were read from")
    assert held == [0]
    assert torch.equal(logits(found), want)


def test_early_reads_that_the_system_refuses_are_no_error(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, in_ram, want = kept(tmp_path)

    class Refused:
        def __init__(self, nbytes: int) -> None:
            raise MemoryError

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(bulk, "Arena", Refused)
        with early_reads(folder, StoreOptions()) as early:
            assert early is None
            assert len(os.listdir("/proc/self/fd")) == descriptors
        found = load_model(folder, rules=in_ram)
    only(found.notes, "were read from")
    assert torch.equal(logits(found), want)


def test_a_moved_checkpoint_is_known_again(tmp_path: Path, own_cache: Path) -> None:
    write("qwen3_moe", tmp_path / "m")
    in_ram = rules(tmp_path)
    load_model(tmp_path / "m", rules=in_ram, store=StoreOptions("write"))
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "m", tmp_path / "elsewhere" / "m")
    only(load_model(tmp_path / "elsewhere" / "m", rules=in_ram).notes, "were read from")


def test_a_run_goes_on_where_its_file_cannot_be_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    write("qwen3_moe", folder)
    usage = packfile.shutil._ntuple_diskusage(100, 88, 12)  # type: ignore[attr-defined]
    with monkeypatch.context() as full:
        full.setattr(packfile.shutil, "disk_usage", lambda path: usage)
        found = load_model(folder, rules=rules(tmp_path), store=StoreOptions("write"))
        assert "12 bytes) is free" in only(found.notes, "not kept")
        assert list(own_cache.iterdir()) == []
        with pytest.raises(MachineError, match="is free there"):
            load_model(folder, rules=rules(tmp_path, "disk", "170KiB"))
    (tmp_path / "a file").write_text("")
    with pytest.raises(InputError, match="not a folder"):
        load_model(folder, rules=rules(tmp_path), store=StoreOptions(str(tmp_path / "a file")))
    blocked = StoreOptions(str(tmp_path / "a file" / "below"))
    assert "Not a directory" in only(load_model(folder, rules=rules(tmp_path), store=blocked).notes, "kept")


def test_an_interrupted_pack_goes_on_by_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "m", tmp_path / "out"
    write("qwen3_moe", folder)
    closed: list[int] = []
    real = packing.PackWriter.close_block

    def interrupted(self: Any, block: int) -> None:
        real(self, block)
        closed.append(block)
        if len(closed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(packing.PackWriter, "close_block", interrupted)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pack_model(folder, out, rules=rules(tmp_path), tell=told.append)
    (part,) = out.iterdir()
    assert part.suffix == ".part"
    assert f"blocks are kept in {part}" in told.pop()
    packed = pack_model(folder, out, rules=rules(tmp_path), tell=told.append)
    assert packed.resumed == 2
    assert len(closed) == packed.blocks
    assert "going on after 2 of" in told[0]
    fresh = pack_model(folder, tmp_path / "fresh", rules=rules(tmp_path))
    assert fresh.path.read_bytes() == packed.path.read_bytes()


def test_what_would_need_swap_is_refused_with_what_works(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write("qwen3_moe", folder)
    held = memory._status(Path("/"), "RssAnon:")
    memory.state(held + (64 << 10))
    with pytest.raises(MachineError, match=r"needs .* of memory, .* of it for experts; .*--ram .*swap .*"):
        load_model(folder, rules=rules(tmp_path))
    with pytest.raises(MachineError, match=r"is left for the experts of the disk tier.*--ram \d+MiB"):
        load_model(folder, rules=rules(tmp_path), store=StoreOptions(tier="disk"))
    with pytest.raises(MachineError, match=r"the rule's 'ram' is .* of one token take .*: that is the least"):
        load_model(folder, rules=rules(tmp_path, "disk", "20KiB"))
    memory.state(held + (2 << 30))
    load_model(folder, rules=rules(tmp_path))
    with pytest.raises(InputError, match="--tier swap: must be one of ram, disk"):
        load_model(folder, rules=rules(tmp_path), store=StoreOptions(tier="swap"))
    # All of a rule's experts fit what it says: they are taken into RAM, and no file is needed.
    whole = load_model(folder, rules=rules(tmp_path, "disk", "1GiB"))
    assert disk_experts(whole.runnable.model) == []
    assert any(isinstance(module, CpuExpertsOp) for module in whole.runnable.model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tier: tape", "unknown tier 'tape'"),
        ("tier: disk, ram: much", "'much' is no size"),
        ("ram: 1GiB", "'ram' belongs to 'tier: disk'"),
        ("tier: disk, backend: torch, format: f32", "needs backend 'native'"),
    ],
)
def test_rules_that_make_no_sense(tmp_path: Path, options: str, message: str) -> None:
    folder = tmp_path / "m"
    write("qwen3_moe", folder)
    path = tmp_path / "r.yaml"
    path.write_text(
        "rules:\n  - name: e\n    match: {class: MoeBlock}\n"
        f"    replace: {{op: moe, experts: {{{options}}}}}\n"
    )
    with pytest.raises(InputError, match=message):
        load_model(folder, rules=path)


def test_the_command_packs_and_runs(tmp_path: Path) -> None:
    folder, out = tmp_path / "m", tmp_path / "out"
    write("qwen3_moe", folder)
    run = CliRunner().invoke
    packed = json.loads(run(app, ["pack", str(folder), "-o", str(out), "--json"]).stdout)
    assert Path(packed["file"]).stat().st_size > packed["bytes"] > 0
    assert not packed["reused"]
    assert "there already" in run(app, ["pack", str(folder), "-o", str(out)]).stdout
    asked = ["run", str(folder), "--prompt-ids", "1,2,3,4", "--max-tokens", "6", "--json", "--no-stats"]
    plain = run(app, asked)
    tiered = run(app, [*asked, "--tier", "disk", "--ram", "16GiB", "--pack-cache", str(out)])
    assert json.loads(plain.stdout)["token_ids"] == json.loads(tiered.stdout)["token_ids"]
    assert "were read from" in tiered.stderr  # it fits, so that it is in RAM
    refused = run(app, [*asked, "--ram", "1MiB"])
    assert refused.exit_code == 3
    assert "(--ram 1.0 MiB" in refused.stderr
    assert run(app, [*asked, "--ram", "lots"]).exit_code == 2


def test_a_full_disk_of_its_own(tmp_path: Path) -> None:
    """A file system of 64 KiB: what the fault injections stand for."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here (not root)")
    try:
        write("qwen3_moe", tmp_path / "m")
        with pytest.raises(MachineError, match=r"need .* in .*disk, 64.0 KiB|need .* in .*, 0.1 MiB"):
            pack_model(tmp_path / "m", disk, rules=rules(tmp_path))
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
