"""A small Hub on 127.0.0.1: as much of its interface as a client of models uses, and its ways to fail.

Listings (/api/models/...) give sizes and hashes. /OWNER/NAME/resolve/COMMIT/FILE gives small files at once
and sends clients of large ones to another host name (localhost), where ranges are served and no key may
arrive.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Files from this size on, and all weights, are large files: listed with SHA-256.
LARGE = 1000


def commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()


def is_large(name: str, data: bytes) -> bool:
    return len(data) >= LARGE or name.endswith((".safetensors", ".gguf", ".bin"))


@dataclass
class Repo:
    """One repository: files by revision, and who may read it."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None  # needed for its files
    hidden: bool = False  # listed only with the token
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    # Sent instead of what the listing tells.
    lies: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Hub:
    """The server's state; tests change it while it runs."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    # Called with the path before a request is answered: a status to answer with, or None.
    fail: Callable[[str], int | None] = lambda _: None
    # Bytes after which the body of a large file is cut, one for each request; empty: none is cut.
    cuts: list[int] = field(default_factory=list)
    # Seconds before each piece of a large file.
    delay: float = 0.0
    ranges: bool = True

    def bodies(self, name: str) -> list[str]:
        """Ranges that were asked for of a file, in order."""
        return [headers.get("range", "") for verb, path, headers in self.requests if path == f"/blob/{name}"]


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.state.requests.append((self.command, path, headers))
        try:
            if (status := self.state.fail(path)) is not None:
                self._error(status, None, "as the test wants it")
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._listing(found[1], found[2] or "main", "blobs" in parse_qs(parts.query))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(*found.groups())
            elif found := re.fullmatch(r"/blob/(.+)", path):
                self._blob(found[1])
            else:
                self._error(404, "EntryNotFound", "no such page")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files, or None after an error has been sent."""
        repo = self.state.repos.get(name)
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repo is None or (repo.hidden and key != repo.token):
            # The real one hides what is private, and from strangers what is missing.
            self._error(404 if key else 401, "RepoNotFound", "Repository not found")
            return None
        for known, files in repo.revisions.items():
            if revision in (known, commit_of(files)):
                return commit_of(files), files
        self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _listing(self, name: str, revision: str, blobs: bool) -> None:
        found = self._files(name, revision)
        if found is None:
            return
        commit, files = found
        siblings: list[dict[str, Any]] = []
        for path, data in files.items():
            entry: dict[str, Any] = {"rfilename": path}
            if blobs:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
                entry |= {"size": len(data), "blobId": git}
                if is_large(path, data):
                    sha = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False}
        self._send(200, json.dumps(body | {"cardData": self.state.repos[name].card}).encode())

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.state.repos.get(name)
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repo is not None and repo.token is not None and key != repo.token:
            if repo.gated:
                self._error(403 if key else 401, "GatedRepo", f"Access to model {name} is restricted")
            else:
                self._error(401, None, "Invalid credentials in Authorization header")
            return
        found = self._files(name, revision)
        if found is None:
            return
        commit, files = found
        assert repo is not None
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        data = repo.lies.get(path, files[path])
        extra = {"X-Repo-Commit": commit}
        if not is_large(path, files[path]):
            git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            self._send(200, data, extra | {"ETag": f'"{git}"'})
            return
        sha = hashlib.sha256(files[path]).hexdigest()
        extra |= {"X-Linked-Size": str(len(files[path])), "X-Linked-ETag": f'"{sha}"', "ETag": f'"{sha}"'}
        other = self.state.url.replace("127.0.0.1", "localhost")
        self._send(302, b"", extra | {"Location": f"{other}/blob/{name}/{path}"})

    def _blob(self, name: str) -> None:
        owner, repo_name, path = name.split("/", 2)
        repo = self.state.repos[f"{owner}/{repo_name}"]
        data = repo.lies.get(path, next(f[path] for f in repo.revisions.values() if path in f))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if asked and self.state.ranges:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            body = data[start:end]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        else:
            body = data
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        self.end_headers()
        cut = self.state.cuts.pop(0) if self.state.cuts else None
        for at in range(0, len(body), 256):
            if cut is not None and at >= cut:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if self.state.delay:
                time.sleep(self.state.delay)
            self.wfile.write(body[at : at + 256])

    def _error(self, status: int, code: str | None, message: str) -> None:
        extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), extra)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
