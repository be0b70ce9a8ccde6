"""One file of a repository of the Hub into the Hub's own cache folder: resumed, verified, moved there whole.

The layout is that of ``huggingface_hub``, so that what other tools have fetched is used and the other way
round. The library itself starts an interrupted file anew and takes its contents on trust, which is why the
transfer is here: a part is kept under a name of its own until its size and hash are those that the
repository tells, and only then gets the name by which it is found.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import hf_raise_for_status

from hetero.core import InputError, MachineError

_BLOCK = 1 << 20
# The Hub's content network refuses to send more than 50 GB at once.
PIECE = 32 << 30
# Without a byte for this long, a connection is taken for dead, seconds.
SILENCE_S = 30.0
# Attempts in a row that bring nothing.
ATTEMPTS = 4
WAIT_S = 1.0
_PASSING = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of one revision of a repository, as the Hub lists it."""

    path: str  # in the repository
    size: int  # bytes
    sha256: str | None  # of its bytes, for large files
    blob_id: str  # git's hash of it; of its stand-in for large files

    @property
    def key(self) -> str:
        """The name of its contents in the cache."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True)
class RepoCache:
    """The folder of one repository in the Hub's cache."""

    hub: Path  # the cache's own folder
    repo: str  # owner/name

    @property
    def folder(self) -> Path:
        return self.hub / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """The folder that looks like the repository at ``commit``."""
        return self.folder / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.key

    def part(self, file: RemoteFile) -> Path:
        """Where the beginning of a file is kept until the rest has come."""
        return self.folder / "blobs" / f"{file.key}.hetero-part"

    def holds(self, file: RemoteFile) -> bool:
        """Whether a file is there, whole and verified when it came."""
        return _size(self.blob(file)) == file.size

    def missing(self, file: RemoteFile) -> int:
        """Bytes that are still to come."""
        if self.holds(file):
            return 0
        part = _size(self.part(file)) or 0
        return file.size - part if part <= file.size else file.size

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag was when it was last fetched."""
        try:
            return (self.folder / "refs" / revision).read_text().strip() or None
        except OSError:
            return None

    def remember(self, revision: str, commit: str) -> None:
        """Note that ``revision`` is ``commit``."""
        if revision != commit and self.commit_of(revision) != commit:
            path = self.folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
            fresh.write_text(commit)
            fresh.replace(path)

    def link(self, file: RemoteFile, commit: str) -> None:
        """Show a file that is there in the snapshot of ``commit``."""
        name = self.snapshot(commit) / file.path
        blob = self.blob(file)
        if name.exists() and name.samefile(blob):
            return
        name.parent.mkdir(parents=True, exist_ok=True)
        fresh = name.with_name(f".{name.name}.{uuid.uuid4().hex[:8]}")
        try:
            fresh.symlink_to(os.path.relpath(blob, name.parent))
        except OSError:  # a file system without such links
            os.link(blob, fresh)
        fresh.replace(name)


def fetch_file(
    file: RemoteFile,
    url: str,
    headers: dict[str, str],
    cache: RepoCache,
    *,
    arrived: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Bring ``file`` into the cache, going on where an earlier attempt ended; nothing if it is there.

    ``arrived`` gets numbers of bytes as they come, below 0 where some have to come again. Raises InputError
    for contents that are not those of the repository, MachineError for a full disk or a connection that is
    lost for good, HfHubHTTPError for what the Hub refuses. The beginning is kept then, except when it is
    wrong.
    """
    blob, part = cache.blob(file), cache.part(file)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cache.hub / ".locks" / cache.folder.name / f"{file.key}.lock", file, say):
            if blob.exists() and _size(blob) != file.size:
                say(f"{blob}: {_size(blob)} bytes, not the {file.size} of {file.path}; fetched again")
                blob.unlink()
            if not blob.exists():
                _complete(file, url, headers, part, arrived)
                _verify(file, part, cache.repo)
                part.replace(blob)
    except HfHubHTTPError:  # an OSError too
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"{cache.hub}: the disk is full at {_size(part) or 0} of {file.size} bytes of {file.path}; "
                f"free some space, or set HF_HOME to a folder on a larger disk, and run again to go on"
            ) from None
        raise MachineError(f"{error.filename or part}: cannot be written: {error.strerror}") from None


def _complete(
    file: RemoteFile, url: str, headers: dict[str, str], part: Path, arrived: Callable[[int], None]
) -> None:
    """Append to ``part`` until it has the file's size."""
    if (_size(part) or 0) > file.size:
        part.unlink()
    failures = 0
    with part.open("ab") as out:
        while (done := out.seek(0, os.SEEK_END)) < file.size:
            try:
                _piece(file, url, headers, start=done, out=out.fileno(), arrived=arrived)
                failed: Exception | None = None
            except httpx2.TransportError as error:
                failed = error
            except HfHubHTTPError as error:
                if error.response.status_code not in _PASSING:
                    raise
                failed = error
            failures = 0 if out.seek(0, os.SEEK_END) > done else failures + 1
            if failures >= ATTEMPTS:
                reason = str(failed or "it sends nothing").splitlines()[0] or type(failed).__name__
                raise MachineError(
                    f"{file.path}: the connection was lost at {done} of {file.size} bytes ({reason}); "
                    "run again to go on from there"
                )
            if failures:
                time.sleep(WAIT_S * 2 ** (failures - 1))


def _piece(
    file: RemoteFile,
    url: str,
    headers: dict[str, str],
    *,
    start: int,
    out: int,
    arrived: Callable[[int], None],
) -> None:
    """Write bytes from ``start`` on, as many as one answer brings."""
    wanted = {"Range": f"bytes={start}-{min(file.size, start + PIECE) - 1}", "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(SILENCE_S)
    with get_session().stream("GET", url, headers={**headers, **wanted}, timeout=timeout) as answer:
        if answer.is_error:
            answer.read()
        hf_raise_for_status(answer)
        if answer.status_code != 206 and start:  # it sends the whole
            os.ftruncate(out, 0)
            arrived(-start)
            start = 0
        elif answer.status_code == 206 and not answer.headers.get("content-range", "").startswith(
            f"bytes {start}-"
        ):
            raise InputError(f"{file.path}: the server sends other bytes than those that it was asked for")
        for chunk in answer.iter_bytes():
            if start + len(chunk) > file.size:
                raise InputError(
                    f"{file.path}: the server sends more than the {file.size} bytes of the listing"
                )
            view = memoryview(chunk)
            while view:
                view = view[os.write(out, view) :]
            start += len(chunk)
            arrived(len(chunk))


def _verify(file: RemoteFile, part: Path, repo: str) -> None:
    """Raises InputError, and deletes the file, when its contents are not what the repository lists."""
    if file.sha256 is not None:
        name, wanted, digest = "SHA-256", file.sha256, hashlib.sha256()
    else:
        name, wanted = "git's SHA-1", file.blob_id
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with part.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != wanted:
        part.unlink()
        raise InputError(
            f"{repo}: {file.path} arrived with other contents than the repository lists "
            f"({name} {digest.hexdigest()}, not {wanted}); it was deleted: run again to fetch it anew"
        )


@contextmanager
def _locked(path: Path, file: RemoteFile, say: Callable[[str], None]) -> Iterator[None]:
    """Alone among processes; the library's own downloads take the same lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    try:
        told = False
        while not _try_lock(descriptor):
            if not told:
                say(f"waiting for another process, which fetches {file.path}")
                told = True
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks. Two writers would spoil a part, which its hash would then tell.
        return True
    return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
