"""Models by their name on the Hub: what a name means, which files it takes, and where they are.

Only what is read is fetched: configuration, tokenizer, chat template, safetensors or one quantisation of a
GGUF repository. Never code, and never a format that can hold code (.bin, .pt).
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._headers import build_hf_headers

from hetero import jsonfile
from hetero.core import InputError, MachineError
from hetero.hub_errors import (
    NoSuchRepositoryError,
    UnreachableError,
    endpoint,
    first_line,
    refused,
    unreachable,
)
from hetero.hub_names import (
    CONFIG,
    INDEX,
    SINGLE,
    SMALL,
    WEIGHTS,
    HubName,
    chosen_group,
    fits,
    group_gguf,
    has,
    is_plain,
    parts,
    whole,
)
from hetero.transfer import RemoteFile, RepoCache, fetch_file

# Called with bytes that are there and bytes in all.
Progress = Callable[[int, int], None]
# Makes a progress bar of a title; gives None where nobody looks.
Bar = Callable[[str], AbstractContextManager[Progress | None]]

_REVISION = re.compile(r"(?!.*\.\.)[\w.][\w./-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ON = ("1", "on", "yes", "true")
_ANSWER_S = 15.0
_CONNECTIONS = 4
# Left on the disk for others, bytes.
_SPARE = 64 << 20


def hub_cache() -> Path:
    """The folder in which the Hub's own tools keep what they have fetched."""
    env = os.environ
    if own := env.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def offline() -> bool:
    """Whether the environment forbids the network."""
    return any(os.environ.get(name, "").lower() in _ON for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cached_repos() -> list[str]:
    """Repositories of models in the cache, whole or not."""
    found = (path.name.removeprefix("models--") for path in hub_cache().glob("models--*--*"))
    return sorted(name.replace("--", "/", 1) for name in found)


def fetch(
    name: HubName,
    *,
    revision: str | None = None,
    weights: bool = True,
    check: Callable[[Path], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    bar: Bar = lambda _: nullcontext(None),
) -> Path:
    """Where the model is on this machine, fetched if need be: a folder, or a GGUF file (its first part).

    Without ``weights`` the folder holds the configuration alone. ``check`` is called with the folder when the
    configuration is there and before weights are fetched, and may raise. ``revision`` is a branch, a tag or a
    commit; None: main. Raises InputError for what is not there, not allowed or not what the repository lists,
    MachineError where the network or the disk fails.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        raise InputError(f"--revision {revision}: must be a branch, a tag or a commit")
    wanted = revision or "main"
    cache = RepoCache(hub_cache(), name.repo)
    commit = wanted if _COMMIT.fullmatch(wanted) else cache.commit_of(wanted)
    there = whole(cache.snapshot(commit), name, weights) if commit and _COMMIT.fullmatch(commit) else None
    if offline():
        if there is None:
            raise InputError(
                f"{name.repo}: the cache {cache.hub} has no complete copy"
                f"{f' of revision {revision}' if revision else ''}, and HF_HUB_OFFLINE forbids to fetch one"
            )
        return there
    if there is not None and _COMMIT.fullmatch(wanted):
        return there
    try:
        return _Fetch(cache, name, wanted, say, bar).run(weights, check)
    except (UnreachableError, NoSuchRepositoryError) as error:
        if there is None:
            raise
        say(f"{error}; the copy in the cache is used")
        return there
    except OSError as error:
        where = error.filename or cache.hub
        raise MachineError(f"{where}: cannot be written: {error.strerror or error}") from None


class _Fetch:
    """One model at one commit on its way into the cache."""

    def __init__(
        self, cache: RepoCache, name: HubName, revision: str, say: Callable[[str], None], bar: Bar
    ) -> None:
        self._cache, self._name, self._say, self._bar = cache, name, say, bar
        self._revision = revision
        self._commit, self._files, self._base = self._listing()

    def run(self, weights: bool, check: Callable[[Path], None]) -> Path:
        """All that is needed is in the cache: small files first, so that a whole model is whole in all."""
        folder = self._cache.snapshot(self._commit)
        if not weights and self._has(CONFIG) and not self._name.wants_gguf:
            return self._configuration(folder)
        gguf = self._gguf() if self._name.wants_gguf or not self._has(WEIGHTS) else ()
        if not weights:
            if gguf and (local := folder / gguf[0].path).is_file():
                return local
            if not self._has(CONFIG):
                raise InputError(self._no_config(bool(gguf)))
            return self._configuration(folder)
        small = [file for path, file in self._files.items() if any(fits(path, one) for one in SMALL)]
        if not gguf:
            if not self._has(CONFIG):
                raise InputError(self._no_config(False))
            if self._has(INDEX) and not self._has(SINGLE):
                small.append(self._files[INDEX])
            self._get(small)
            check(folder)
        shards = gguf or self._safetensors(folder)
        self._get(shards, f"downloading {self._name.repo}")
        self._cache.remember(self._revision, self._commit)
        return folder / gguf[0].path if gguf else folder

    def _configuration(self, folder: Path) -> Path:
        self._get([self._files[CONFIG]])
        # The branch stays where a whole model was last fetched from it.
        if self._cache.commit_of(self._revision) is None:
            self._cache.remember(self._revision, self._commit)
        return folder

    def _listing(self) -> tuple[str, dict[str, RemoteFile], str | None]:
        """Commit, files by path and the model that this one was made from."""
        repo = self._name.repo
        try:
            info = HfApi(endpoint=endpoint()).model_info(
                repo,
                revision=None if self._revision == "main" else self._revision,
                files_metadata=True,
                timeout=_ANSWER_S,
            )
            if not _COMMIT.fullmatch(info.sha or ""):
                raise ValueError("no commit")
            files = {
                one.rfilename: RemoteFile(
                    one.rfilename,
                    int(one.lfs.size if one.lfs else one.size or 0),
                    str(one.lfs.sha256) if one.lfs else None,
                    str(one.blob_id),
                )
                for one in info.siblings or ()
                if is_plain(one.rfilename)
            }
            if not all(re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.key) for file in files.values()):
                raise ValueError("no hashes")
        except HfHubHTTPError as error:
            raise refused(error, repo, self._revision) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise unreachable(error, repo) from None
        except HFValidationError as error:
            raise InputError(f"{repo}: no name of a repository: {first_line(error)}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreachableError(
                f"{endpoint()} does not answer as the Hub does ({first_line(error)}); check HF_ENDPOINT and "
                "what stands between"
            ) from None
        base = getattr(info.card_data, "base_model", None)
        base = base[0] if isinstance(base, list) and base else base
        return str(info.sha), files, base if isinstance(base, str) else None

    def _has(self, *patterns: str) -> bool:
        return has(self._files, *patterns)

    def _no_config(self, gguf: bool) -> str:
        if gguf:
            base = f"; it was made from {self._base}, whose configuration can be read" if self._base else ""
            return (
                f"{self._name.repo}: has no {CONFIG}, and the GGUF file, which has one inside, is not in "
                f"the cache yet{base}"
            )
        return f"{self._name.repo}: has no {CONFIG}; it is no model that transformers or hetero can read"

    def _safetensors(self, folder: Path) -> list[RemoteFile]:
        """The files that a loader will read of the folder."""
        if self._has(SINGLE):
            return [self._files[SINGLE]]
        if not self._has(INDEX):
            return [file for path, file in self._files.items() if fits(path, WEIGHTS)]
        index = folder / INDEX
        try:
            names = set(jsonfile.parse(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f"{self._name.repo}: {INDEX} has no 'weight_map' from tensors to files"
            ) from None
        absent = sorted(str(name) for name in names if name not in self._files)
        if absent:
            raise InputError(
                f"{self._name.repo}: {INDEX} names {absent[0]!r}, which the repository does not have"
            )
        return [self._files[name] for name in sorted(names)]

    def _gguf(self) -> tuple[RemoteFile, ...]:
        """The parts of the one quantisation that was asked for."""
        repo = self._name.repo
        groups = group_gguf(self._files)
        if not groups:
            held = sorted(
                {PurePosixPath(path).suffix for path in self._files} & {".bin", ".pt", ".pth", ".ckpt"}
            )
            if self._name.wants_gguf:
                raise InputError(f"{repo}: holds no GGUF files")
            raise InputError(
                f"{repo}: holds no safetensors and no GGUF files"
                + (
                    f"; {', '.join(held)} files can hold code and are never read: find a conversion"
                    if held
                    else ""
                )
            )
        chosen = chosen_group(groups, self._name)
        if chosen is None:
            raise InputError(self._choices(groups))
        if len(chosen) != parts(chosen):
            raise InputError(
                f"{repo}: {chosen[0]} is one of {parts(chosen)} parts, and the repository has {len(chosen)}"
            )
        return tuple(self._files[path] for path in chosen)

    def _choices(self, groups: Mapping[str, Sequence[str]]) -> str:
        repo, name = self._name.repo, self._name
        if name.file is not None:
            near = ", ".join(sorted(path for paths in groups.values() for path in paths)[:8])
            return f"{repo}: has no file {name.file}; there are {near}"
        sizes = {label: sum(self._files[path].size for path in paths) for label, paths in groups.items()}
        ordered = sorted(sizes.items(), key=lambda item: item[1])
        known = ", ".join(f"{label} ({_human(size)})" for label, size in ordered)
        asked = f"has no quantisation {name.quant}" if name.quant else "holds several models"
        return f"{repo}: {asked}; choose one of {known}, as in {repo}:{ordered[0][0]}"

    def _get(self, files: Iterable[RemoteFile], title: str | None = None) -> None:
        """Have ``files`` in the snapshot, several at a time."""
        files = list(files)
        missing = {file: left for file in files if (left := self._cache.missing(file))}
        self._check_space(sum(missing.values()))
        total = sum(file.size for file in files)
        if title is not None and missing:
            self._say(
                f"{title}: {len(missing)} of {len(files)} files, {_human(sum(missing.values()))} to come, "
                f"into {self._cache.folder}"
            )
        with self._bar(title) if title is not None and missing else nullcontext(None) as show:
            try:
                _Crew(self._one, total - sum(missing.values()), total, show).work(files)
            except KeyboardInterrupt:
                self._say("stopped; what has come is kept, and the same command goes on from there")
                raise

    def _one(self, file: RemoteFile, arrived: Callable[[int], None]) -> None:
        url = f"{endpoint()}/{self._name.repo}/resolve/{self._commit}/{quote(file.path)}"
        try:
            # A cache that others fill may be read-only.
            if not self._cache.holds(file):
                fetch_file(file, url, build_hf_headers(), self._cache, arrived=arrived, say=self._say)
        except HfHubHTTPError as error:
            raise refused(error, self._name.repo, self._revision, file.path) from None
        self._cache.link(file, self._commit)

    def _check_space(self, needed: int) -> None:
        there = self._cache.hub
        while not there.exists() and there != there.parent:
            there = there.parent
        free = shutil.disk_usage(there).free
        if needed and needed + _SPARE > free:
            raise MachineError(
                f"{self._name.repo}: {_human(needed)} are to be fetched, and the disk of {self._cache.hub} "
                f"has {_human(free)} free; free some space, or set HF_HOME to a folder on a larger disk"
            )


class _Crew:
    """A few threads that bring files. They are daemons: an interrupt ends the program at once, and what has
    come by then is kept for the next run."""

    def __init__(
        self,
        bring: Callable[[RemoteFile, Callable[[int], None]], None],
        done: int,
        total: int,
        show: Progress | None,
    ) -> None:
        self._bring, self._done, self._total, self._show = bring, done, total, show
        self._lock = threading.Lock()
        self._left: list[RemoteFile] = []
        self._errors: list[BaseException] = []

    def work(self, files: Sequence[RemoteFile]) -> None:
        """Raises the first error, when the others have ended with the files that they were at."""
        self._left = list(reversed(files))
        crew = [threading.Thread(target=self._member, daemon=True) for _ in files[:_CONNECTIONS]]
        for member in crew:
            member.start()
        for member in crew:
            while member.is_alive() and not self._errors:
                member.join(0.1)
        if self._errors:
            raise self._errors[0]

    def _member(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._left or self._errors:
                        return
                    file = self._left.pop()
                self._bring(file, self._arrived)
        except BaseException as error:
            self._errors.append(error)

    def _arrived(self, count: int) -> None:
        if self._errors:
            raise InterruptedError("another file has failed")
        with self._lock:
            self._done += count
            if self._show is not None:
                self._show(self._done, self._total)


def _human(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
