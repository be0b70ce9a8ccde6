"""Files of packed experts: what is written is read, and whatever is wrong with one is found."""

from __future__ import annotations

import _thread
import errno
import multiprocessing
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero import cpu
from hetero.core import ExpertSpec, MachineError
from hetero.store import bulk, packfile, reads
from hetero.store.bulk import EarlyReads
from hetero.store.cache import find
from hetero.store.manifest import Manifest
from hetero.store.packfile import PackFile, PackUnusable, PackWriter
from tests.cpu.test_numa import paper
from tests.store.made import content, empty, failing_disk, made, manifest_of, never, read_block, written


@pytest.fixture(autouse=True)
def this_machine_again() -> Iterator[None]:
    yield
    cpu.use_machine(None)


real_open = os.open


def without_direct(path: Any, flags: int, mode: int = 0o777) -> int:
    """A file system without direct I/O."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return real_open(path, flags, mode)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("numa", ["off", "split", "replicate"])
def test_what_is_written_is_read_into_any_placement(
    tmp_path: Path, generator: torch.Generator, numa: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.use_machine(paper(2))
    if not direct:
        monkeypatch.setattr(os, "open", without_direct)
    experts = made(generator, numa=numa)
    with_bias = made(generator, 1, ExpertSpec(3, 72, 33, 2, has_gate=False, has_bias=True), "int4 g64/int8")
    file = written(tmp_path / "x.hpack", experts + with_bias)
    for index, one in enumerate(experts + with_bias):
        for target in ("off", "split", "replicate"):
            other = empty(one, target)
            assert read_block(file, index, other) == file.manifest.blocks[index].nbytes
            assert other.missing() == []
            assert content(other) == content(one)
    assert [p.name for p in tmp_path.iterdir()] == ["x.hpack"]
    file.close()


def wrong(tmp_path: Path) -> str:
    with pytest.raises(PackUnusable) as caught:
        PackFile(tmp_path / "x.hpack")
    return str(caught.value)


def test_torn_foreign_and_other_versions_are_told_apart(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator)
    file = written(tmp_path / "x.hpack", experts)
    file.close()
    path, whole = tmp_path / "x.hpack", (tmp_path / "x.hpack").read_bytes()
    for size in (0, 7, 39, 60, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "no file of packed experts" in wrong(tmp_path) or "torn" in wrong(tmp_path) or size == 60
        if size == 60:
            assert "damaged header" in wrong(tmp_path)
    path.write_bytes(whole + b"x")
    assert "torn" in wrong(tmp_path)
    path.write_bytes(b"GGUF" + whole[4:])
    assert "no file of packed experts" in wrong(tmp_path)
    path.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    assert "version 2" in wrong(tmp_path)
    at = whole.index(b'"hidden"')
    path.write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    assert "damaged header" in wrong(tmp_path)
    layout = packfile._Layout(file.manifest)
    row = layout.rows[1] + 8
    path.write_bytes(whole[:row] + bytes([whole[row] ^ 1]) + whole[row + 1 :])
    assert "not written to their end" in wrong(tmp_path)
    path.write_bytes(whole)
    PackFile(path).close()


def test_a_changed_byte_is_found_as_the_expert_is_read(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator)
    file = written(tmp_path / "x.hpack", experts)
    layout = packfile._Layout(file.manifest)
    with (tmp_path / "x.hpack").open("r+b") as raw:
        raw.seek(layout.expert(1, 4) + 100)
        (byte,) = raw.read(1)
        raw.seek(-1, 1)
        raw.write(bytes([byte ^ 0x10]))
    good, bad = empty(experts[0]), empty(experts[1])
    read_block(file, 0, good)
    with pytest.raises(MachineError, match=r"expert 4 of layers\.1 is damaged.*pack --force"):
        read_block(file, 1, bad)
    assert len(bad.missing()) == 6 * 3
    file.close()


def test_a_file_that_shrinks_and_a_disk_that_fails(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)
    with monkeypatch.context() as patched:
        failing_disk(patched)
        with pytest.raises(MachineError, match=r"x\.hpack.*layers\.0 cannot be read: Input/output error"):
            read_block(file, 0, empty(experts[0]))
    os.truncate(tmp_path / "x.hpack", 8192)
    with pytest.raises(MachineError, match="ends at byte"):
        read_block(file, 0, empty(experts[0]))
    file.close()


def test_manifests_say_what_differs(generator: torch.Generator) -> None:
    experts = made(generator, 2)
    one = manifest_of(experts)
    assert Manifest.from_json(one.to_json()) == one
    assert one.difference(manifest_of(experts)) is None
    assert "changed since (model.safetensors)" in str(one.difference(manifest_of(experts, time=2)))
    assert "other experts" in str(one.difference(manifest_of(experts[:1])))
    assert one.file_name("m") == manifest_of(experts, time=2).file_name("m")
    assert one.file_name("m") != manifest_of(experts[:1]).file_name("m")
    good = one.to_json()
    damaged = (good[:-1], good.replace(b"96", b'"96"'), good.replace(b"96", b"Infinity"))
    no_blocks = good[: good.index(b"[{")] + b"[1]" + good[good.index(b"}]") + 2 :]
    for text in (b"{}", b"[]", b"1", no_blocks, *damaged):
        with pytest.raises(ValueError, match=r"manifest|delimiter|value"):
            Manifest.from_json(text)


def test_what_an_interrupted_run_left_is_taken_up(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator)
    path, manifest = tmp_path / "x.hpack", manifest_of(experts)
    writer = PackWriter(path, manifest, never)
    writer.put_block(1, experts[1])
    data = experts[0].view(0)
    assert data is not None
    writer.settle([writer.put(0, 0, data)])  # one expert of block 0, then the end
    writer.stop(keep=True)
    assert not path.exists()
    again = PackWriter(path, manifest, never)
    assert [again.done(i) for i in range(3)] == [False, True, False]
    assert again.remaining == 2 * manifest.blocks[0].nbytes
    again.put_block(0, experts[0])
    again.put_block(2, experts[2])
    again.finish()
    file = PackFile(path)
    for index, one in enumerate(experts):
        other = empty(one)
        read_block(file, index, other)
        assert content(other) == content(one)
    file.close()


def test_a_part_of_other_experts_is_begun_anew(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator, 2)
    path = tmp_path / "x.hpack"
    writer = PackWriter(path, manifest_of(experts), never)
    writer.put_block(0, experts[0])
    writer.stop(keep=True)
    writer = PackWriter(path, manifest_of(experts, time=9), never)
    assert not writer.done(0)
    writer.stop(keep=True)  # with no whole block nothing stays
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "during", "at the end"])
def test_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    experts = made(generator, 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if when == "before":
        usage = packfile.shutil._ntuple_diskusage(100, 88, 12)  # type: ignore[attr-defined]
        monkeypatch.setattr(packfile.shutil, "disk_usage", lambda path: usage)
    elif when == "during":
        monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(full))
    else:
        monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(full))

    def write() -> None:
        writer = PackWriter(tmp_path / "x.hpack", manifest_of(experts), never)
        writer.put_block(0, experts[0])
        writer.finish()

    with pytest.raises(MachineError, match=r"need .*\(\d+ bytes\) in .*, .*\(\d+ bytes\) is free"):
        write()
    assert list(tmp_path.iterdir()) == []


def _pack(path: str, seed: int, started: Any, results: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = made(generator)
    manifest = manifest_of(experts)
    waited: list[str] = []
    started.wait()
    writer = PackWriter(Path(path), manifest, waited.append)
    if not writer.ready:
        for index, one in enumerate(experts):
            writer.put_block(index, one)
        writer.finish()
    results.put((writer.ready, len(waited)))


def test_of_two_processes_one_packs(tmp_path: Path, generator: torch.Generator) -> None:
    context = multiprocessing.get_context("spawn")
    started, results = context.Event(), context.Queue()
    path, seed = tmp_path / "x.hpack", int(torch.randint(0, 2**31, (), generator=generator))
    both = [context.Process(target=_pack, args=(str(path), seed, started, results)) for _ in range(2)]
    for one in both:
        one.start()
    started.set()
    found = sorted(results.get(timeout=100) for _ in both)
    for one in both:
        one.join()
    assert [ready for ready, _ in found] == [False, True]
    assert [p.name for p in tmp_path.iterdir()] == ["x.hpack"]
    PackFile(path).close()


def test_who_waits_is_told_and_takes_over_what_was_given_up(
    tmp_path: Path, generator: torch.Generator
) -> None:
    experts = made(generator, 2)
    path, manifest = tmp_path / "x.hpack", manifest_of(experts)
    first = PackWriter(path, manifest, never)
    told = threading.Event()
    second: list[PackWriter] = []
    thread = threading.Thread(
        target=lambda: second.append(PackWriter(path, manifest, lambda text: told.set()))
    )
    thread.start()
    assert told.wait(60)
    first.put_block(0, experts[0])
    first.stop(keep=True)
    thread.join(60)
    assert [second[0].done(i) for i in range(2)] == [True, False]
    second[0].stop(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_the_first_folder_with_a_file_that_serves(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator, 1)
    manifest = manifest_of(experts)
    folders = [tmp_path / name for name in ("none", "torn", "stale", "good")]
    for folder in folders[1:]:
        folder.mkdir()
    (folders[1] / "x.hpack").write_bytes(b"HETPACK\0")
    written(folders[2] / "x.hpack", experts).close()
    raw = PackWriter(folders[3] / "x.hpack", manifest_of(experts, time=3), never)
    raw.put_block(0, experts[0])
    raw.finish()
    found = find(folders, "x.hpack", manifest_of(experts, time=3))
    assert found.file is not None
    assert found.file.path == folders[3] / "x.hpack"
    found.file.close()
    assert len(found.notes) == 2
    assert "torn/x.hpack is no file" in found.notes[0]
    assert "the checkpoint has changed since" in found.notes[1]
    nothing = find(folders[:1], "x.hpack", manifest)
    assert (nothing.file, nothing.notes) == (None, ())


def test_reads_that_a_disk_cannot_do_directly_go_through_the_page_cache(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)
    real = os.preadv

    def picky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == file._file._direct:
            raise OSError(errno.EINVAL, "misaligned")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    cpu.use_machine(paper(2))
    other = empty(experts[0], "split")  # which is read expert by expert
    read_block(file, 0, other)
    assert not file.direct
    assert content(other) == content(experts[0])
    file.close()
    assert reads.aligned(1) == 4096


def test_whole_blocks_that_a_disk_cannot_read_directly_go_through_the_page_cache(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)
    folder, cached = os.open(tmp_path, os.O_RDONLY), file._file.descriptors[0]
    monkeypatch.setattr(reads.DirectFile, "descriptors", property(lambda file: (cached, folder)))
    other = empty(experts[0])
    read_block(file, 0, other)
    assert content(other) == content(experts[0])
    file.close()
    os.close(folder)


def test_reads_that_are_stopped_leave_memory_alone(tmp_path: Path, generator: torch.Generator) -> None:
    experts = made(generator, 2)
    file = written(tmp_path / "x.hpack", experts)
    early = EarlyReads(file)
    address = early.arenas[1].address
    with cpu.offered(early.arenas):
        # Whichever is made first takes the first that fits; one on nodes of its own takes none.
        others = [empty(one) for one in experts]
        assert empty(experts[0]).arena is not None
    assert others[1].arena is not None
    assert others[1].arena.address == address
    assert early.take({0: others[1], 1: others[0]}) is None
    assert early.take({0: others[0]}) is None
    reads = early.take(dict(enumerate(others)))
    assert reads is not None
    for number, one in enumerate(others):
        reads.finish(number, one)
        assert content(one) == content(experts[number])
    assert reads.nbytes == early.taken == file.manifest.nbytes
    early.drop()
    early.drop()
    assert early.taken == 0
    assert content(others[1]) == content(experts[1])
    stopped = PackFile(tmp_path / "x.hpack").read_blocks({1: empty(experts[1])})
    stopped.stop()
    stopped.stop()


def test_a_wait_for_blocks_can_be_interrupted(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)
    monkeypatch.setattr(bulk, "IN_FLIGHT", 0)  # threads that read: the block never comes
    block_reads = file.read_blocks({0: empty(experts[0])})
    native, waiting = block_reads._native, threading.Event()

    class Told:
        def wait(self, number: int, seconds: float) -> tuple[int, int] | None:
            waiting.set()
            return native.wait(number, seconds)

    def interrupt() -> None:
        waiting.wait()
        _thread.interrupt_main()

    monkeypatch.setattr(block_reads, "_native", Told())
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        block_reads.finish(0, empty(experts[0]))
    other.join()
    native.stop()
    file.close()


def test_an_interrupted_wait_leaves_no_reads_behind(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)
    cpu.use_machine(paper(2))
    begun, release, ended = threading.Event(), threading.Event(), []
    real = reads.DirectFile.read

    def slow(self: reads.DirectFile, offset: int, into: memoryview) -> None:
        begun.set()
        release.wait()
        real(self, offset, into)
        ended.append(offset)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reads.DirectFile, "read", slow)
    monkeypatch.setattr(bulk, "settle", interrupted)
    block_reads = file.read_blocks({0: empty(experts[0], "split")})
    begun.wait()
    with pytest.raises(KeyboardInterrupt):
        block_reads.finish(0, experts[0])
    threading.Timer(0.1, release.set).start()
    block_reads.stop()
    assert ended  # what had begun has ended by now
    file.close()


def test_a_system_without_threads_is_told(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = made(generator, 1)
    file = written(tmp_path / "x.hpack", experts)

    def none(*_: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(bulk, "BulkRead", none)
    with pytest.raises(MachineError, match=r"x\.hpack: no thread to read it: Resource temporarily"):
        read_block(file, 0, empty(experts[0]))
    file.close()


def test_reads_at_once_of_a_disk_that_cannot_do_them_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are under way before the first one fails."""
    (tmp_path / "x").write_bytes(bytes(range(256)) * 128)
    monkeypatch.setattr(os, "O_DIRECT", 0)  # wherever this runs
    file = reads.DirectFile(tmp_path / "x")
    together, real = threading.Barrier(4), os.preadv

    def picky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == file._direct:
            together.wait(60)
            raise OSError(errno.EINVAL, "misaligned")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    into = [reads.buffer(4096) for _ in range(4)]
    reads.settle([reads.submit(file.read, 4096 * i, view) for i, view in enumerate(into)])
    assert all(bytes(view) == bytes(range(256)) * 16 for view in into)
    file.close()
