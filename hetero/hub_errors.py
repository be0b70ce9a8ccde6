"""What errors of the Hub mean for the user, and what to do then."""

from __future__ import annotations

import os

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers

from hetero.core import HeteroError, InputError, MachineError


class NoSuchRepositoryError(InputError):
    """The Hub has no repository of that name."""


class UnreachableError(MachineError):
    """Nothing that speaks the Hub's language answers."""


def endpoint() -> str:
    """The Hub's address, or that of a mirror. Raises InputError for one that is no address."""
    found = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not found.startswith(("https://", "http://")):
        raise InputError(f"HF_ENDPOINT={found}: must begin with https:// or http://")
    return found


def unreachable(error: Exception, repo: str) -> UnreachableError:
    return UnreachableError(
        f"{endpoint()} cannot be reached for {repo} ({first_line(error)}); check the network, "
        "HF_ENDPOINT and the proxy, or give a folder"
    )


def refused(error: HfHubHTTPError, repo: str, revision: str, path: str | None = None) -> HeteroError:
    """The error to tell. ``path``: the file that was asked for, where it was one."""
    where = endpoint()
    status = error.response.status_code
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the saved token"
    has_token = "authorization" in {key.lower() for key in build_hf_headers()}
    if isinstance(error, GatedRepoError):
        how = (
            f"{token} is of an account that has not been let in"
            if has_token
            else f"then set HF_TOKEN to a token of that account ({where}/settings/tokens)"
        )
        return InputError(f"{repo}: is gated: accept its terms at {where}/{repo} in a browser; {how}")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo}: has no revision {revision}; see {where}/{repo}/tree/main")
    if isinstance(error, RepositoryNotFoundError) or (status == 404 and path is None):
        private = "" if has_token else ", or it is private (then set HF_TOKEN)"
        return NoSuchRepositoryError(f"no folder {repo!r}, and no such repository at {where}{private}")
    if status == 401:
        return InputError(f"{repo}: {where} does not accept {token if has_token else 'a call without token'}")
    if status == 403:
        return InputError(
            f"{repo}: {where} refuses access"
            + (f": {token} lacks the permission to read it" if has_token else "; set HF_TOKEN")
        )
    if status == 404:
        return InputError(f"{repo}: {path} is listed, but {where} does not have it")
    if status == 429:
        return MachineError(f"{where} answers 429, too many requests: wait a while and run again")
    return UnreachableError(f"{where} answers {status} for {path or repo}; try again later")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
