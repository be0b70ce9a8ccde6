"""Models by name from a small Hub of our own: what is fetched, resumed, verified and refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero import hub as client
from hetero import transfer
from hetero.core import InputError, MachineError
from hetero.hub_errors import NoSuchRepositoryError
from hetero.hub_names import HubName, choose_gguf, group_gguf, parse_name
from hetero.model.shapes import resolve_model
from tests.hub.small_hub import Hub, Repo, commit_of

NAME = "lab/tiny-moe"
CONFIG = json.dumps({"model_type": "qwen3_moe"}).encode()


def shards(count: int, size: int) -> dict[str, bytes]:
    """Weights in parts with an index; contents do not matter to who fetches them."""
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    files = {name: random.randbytes(size) for name in names}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


@pytest.fixture
def repo(hub: Hub) -> Repo:
    """With everything that such repositories hold, wanted or not."""
    wanted = {
        "config.json": CONFIG,
        "generation_config.json": b"{}",
        "tokenizer.json": random.randbytes(3000),
        "tokenizer_config.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ x }}",
        **shards(3, 5000),
    }
    unwanted = {
        "README.md": b"# hi",
        ".gitattributes": b"*.bin",
        "modeling_tiny.py": b"import os",
        "pytorch_model.bin": b"pickle" * 300,
        "original/model.safetensors": random.randbytes(2000),
        "consolidated.safetensors": random.randbytes(2000),
        "onnx/config.json": b"{}",
        "../../escaped.json": b"{}",
    }
    hub.repos[NAME] = Repo({"main": wanted | unwanted})
    return hub.repos[NAME]


def unwanted(path: str) -> bool:
    return path.endswith((".md", ".py", ".bin", ".gitattributes")) or path.startswith(
        ("original/", "consolidated", "onnx/", "..")
    )


def fetch(text: str = NAME, **more: Any) -> Path:
    name = parse_name(text)
    assert name is not None
    return client.fetch(name, **more)


def same(folder: Path, files: dict[str, bytes]) -> None:
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert set(there) == {name for name in files if not unwanted(name)}
    for name, path in there.items():
        assert path.read_bytes() == files[name], name


def parts(hub_home: Path) -> list[Path]:
    return sorted(hub_home.rglob("*.hetero-part"))


def home() -> Path:
    return Path(os.environ["HF_HOME"])


def test_what_is_needed_and_nothing_else(hub: Hub, repo: Repo) -> None:
    said: list[str] = []
    folder = fetch(say=said.append)
    files = repo.revisions["main"]
    same(folder, files)
    assert folder.parent.name == "snapshots"
    assert folder.name == commit_of(files)
    assert len(said) == 1
    assert "3 of 3 files, 15.0 kB to come" in said[0]
    assert not (home().parent / "escaped.json").exists()
    asked = [path for _, path, _ in hub.requests]
    assert not [path for path in asked if unwanted(path.rpartition("/resolve/")[2].partition("/")[2])]
    hub.requests.clear()
    assert fetch(say=said.append) == folder
    # One question about what is new, and no file.
    assert [path for _, path, _ in hub.requests] == [f"/api/models/{NAME}"]
    assert len(said) == 1


def test_the_library_finds_what_we_fetched_and_we_what_it_did(hub: Hub, repo: Repo) -> None:
    from huggingface_hub import hf_hub_download

    folder = fetch()
    hub.requests.clear()
    found = hf_hub_download(
        NAME,
        "model-00002-of-00003.safetensors",
        endpoint=hub.url,
        cache_dir=home() / "hub",
        revision=folder.name,
    )
    assert Path(found) == folder / "model-00002-of-00003.safetensors"
    assert not hub.requests
    other = home().parent / "other"
    hf_hub_download(NAME, "tokenizer.json", endpoint=hub.url, cache_dir=other)
    hub.requests.clear()
    os.environ["HF_HUB_CACHE"] = str(other)
    try:
        same(fetch(), repo.revisions["main"])
    finally:
        del os.environ["HF_HUB_CACHE"]
    assert not [path for _, path, _ in hub.requests if "tokenizer.json" in path]


def test_the_configuration_alone(hub: Hub, repo: Repo) -> None:
    found = resolve_model(NAME)
    assert (found.kind, found.name, found.config) == ("config", "tiny-moe", json.loads(CONFIG))
    assert [path.name for path in (home() / "hub").rglob("*.json")] == ["config.json"]
    with pytest.raises(InputError, match="'vocab_size' is absent"):
        resolve_model(NAME, weights=True)
    assert not list((home() / "hub").rglob("*.safetensors"))


def test_progress_counts_every_byte_once(hub: Hub, repo: Repo) -> None:
    from contextlib import contextmanager

    seen: list[tuple[int, int]] = []

    @contextmanager
    def bar(title: str) -> Any:
        assert title == f"downloading {NAME}"
        yield lambda done, total: seen.append((done, total))

    hub.cuts = [1024, 2048]
    fetch(bar=bar)
    assert seen[-1] == (15000, 15000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_revisions(hub: Hub, repo: Repo) -> None:
    old = repo.revisions["main"]
    repo.revisions["refs/pr/2"] = new = old | {"config.json": b'{"model_type": "other"}'}
    assert (fetch(revision="refs/pr/2") / "config.json").read_bytes() == new["config.json"]
    hub.requests.clear()
    folder = fetch(revision=commit_of(old))
    # The weights are the same contents, and here already.
    assert not [path for _, path, _ in hub.requests if path.startswith("/blob")]
    same(folder, old)
    hub.requests.clear()
    assert fetch(revision=commit_of(old)) == folder
    assert not hub.requests  # a commit cannot change
    with pytest.raises(InputError, match="has no revision v9"):
        fetch(revision="v9")
    for wrong in ("../x", "a b", "", "/etc"):
        with pytest.raises(InputError, match="--revision"):
            fetch(revision=wrong)
    with pytest.raises(InputError, match="is not of the Hub"):
        resolve_model(str(folder), revision="main")


def test_main_moves_on(hub: Hub, repo: Repo) -> None:
    first = fetch()
    repo.revisions["main"] = repo.revisions["main"] | {"generation_config.json": b'{"b": 2}'}
    second = fetch()
    assert second != first
    assert (second / "generation_config.json").read_bytes() == b'{"b": 2}'


def test_a_lost_connection_goes_on_where_it_was(hub: Hub, repo: Repo) -> None:
    hub.cuts = [1024, 512, 2048, 256]
    same(fetch(), repo.revisions["main"])
    assert not hub.cuts
    resumed = 0
    for name in repo.revisions["main"]:
        begins = [int(asked[len("bytes=") :].partition("-")[0]) for asked in hub.bodies(f"{NAME}/{name}")]
        assert begins == sorted(set(begins))
        resumed += len(begins[1:])
    assert resumed >= 3


def test_a_lost_network_ends_with_what_to_do_and_a_later_run_goes_on(hub: Hub, repo: Repo) -> None:
    one = "model-00001-of-00003.safetensors"
    files = repo.revisions["main"]
    for name in list(files):
        if name.endswith(".safetensors") and name != one:
            del files[name]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": one}}).encode()
    fetch_small = len([1 for name in files if not unwanted(name) and len(files[name]) >= 1000]) - 1
    hub.cuts = [10**9] * fetch_small + [2048] + [0] * 20
    with pytest.raises(MachineError, match=r"lost at 2048 of 5000 bytes .*run again"):
        fetch()
    (part,) = parts(home())
    assert part.read_bytes() == files[one][:2048]
    assert not list((home() / "hub").rglob(one))
    hub.cuts.clear()
    hub.requests.clear()
    same(fetch(), files)
    assert hub.bodies(f"{NAME}/{one}") == ["bytes=2048-4999"]
    assert not parts(home())


def test_a_server_without_ranges(hub: Hub, repo: Repo) -> None:
    hub.ranges = False
    hub.cuts = [1024, 2048]
    same(fetch(), repo.revisions["main"])


def test_a_server_that_falls_silent(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENCE_S", 0.05)
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    hub.delay = 0.3
    with pytest.raises(MachineError, match=r"the connection was lost at 0 of \d+ bytes"):
        fetch()


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "generation_config.json"])
def test_other_contents_are_deleted_and_told(hub: Hub, repo: Repo, name: str) -> None:
    data = bytearray(repo.revisions["main"][name])
    data[-1] ^= 1
    repo.lies[name] = bytes(data)
    with pytest.raises(InputError, match=rf"{name} arrived with other contents .*deleted"):
        fetch()
    contents = {path.read_bytes() for path in (home() / "hub").rglob("*") if path.is_file()}
    assert bytes(data) not in contents
    repo.lies.clear()
    same(fetch(), repo.revisions["main"])


def test_more_than_was_listed(hub: Hub, repo: Repo) -> None:
    hub.ranges = False
    repo.lies["model-00001-of-00003.safetensors"] = random.randbytes(9000)
    with pytest.raises(InputError, match="more than the 5000 bytes"):
        fetch()


def test_a_spoilt_beginning_is_found_out(hub: Hub, repo: Repo) -> None:
    name = "model-00003-of-00003.safetensors"
    key = hashlib.sha256(repo.revisions["main"][name]).hexdigest()
    blobs = home() / "hub" / "models--lab--tiny-moe" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{key}.hetero-part").write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="arrived with other contents"):
        fetch()
    same(fetch(), repo.revisions["main"])
    # Longer than the file can be.
    shutil.rmtree(home())
    blobs.mkdir(parents=True)
    (blobs / f"{key}.hetero-part").write_bytes(b"x" * 6000)
    same(fetch(), repo.revisions["main"])


def test_a_part_that_had_all_but_its_name(hub: Hub, repo: Repo) -> None:
    name = "model-00003-of-00003.safetensors"
    data = repo.revisions["main"][name]
    key = hashlib.sha256(data).hexdigest()
    blobs = home() / "hub" / "models--lab--tiny-moe" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{key}.hetero-part").write_bytes(data)
    same(fetch(), repo.revisions["main"])
    assert not hub.bodies(f"{NAME}/{name}")


def test_a_file_of_the_cache_that_lost_its_end(hub: Hub, repo: Repo) -> None:
    folder = fetch()
    name = "model-00001-of-00003.safetensors"
    blob = (folder / name).resolve()
    blob.write_bytes(blob.read_bytes()[:-7])
    said: list[str] = []
    same(fetch(say=said.append), repo.revisions["main"])
    assert any("4993 bytes, not the 5000" in line for line in said)


def test_gated(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.token, repo.gated = "hf_right", True
    with pytest.raises(InputError, match=rf"gated: accept its terms at {hub.url}/{NAME} .*set HF_TOKEN"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="HF_TOKEN is of an account that has not been let in") as error:
        fetch()
    assert "hf_wrong" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    same(fetch(), repo.revisions["main"])
    keys = [headers.get("authorization") for _, path, headers in hub.requests if path.startswith("/blob")]
    assert keys
    assert set(keys) == {None}  # another host gets no key


def test_private_and_wrong_tokens(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.token, repo.hidden = "hf_right", True
    with pytest.raises(NoSuchRepositoryError, match=r"or it is private \(then set HF_TOKEN\)"):
        fetch()
    repo.hidden = False
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="does not accept HF_TOKEN"):
        fetch()


def test_no_such_repository(hub: Hub, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch()
    (tmp_path / "models" / "my-model-v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed, meant in (
        ("Qwen/Qwen3-30b-a3", "synthetic:qwen3-30b-a3b"),
        ("lab/tiny_moe", NAME),
        ("models/my-model-v1", "models/my-model-v2"),
    ):
        with pytest.raises(InputError, match=f"no such repository.*did you mean .*{meant}"):
            resolve_model(typed)
    with pytest.raises(InputError, match="no name of a repository"):
        resolve_model("a/b--c..d")


def test_offline(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="no complete copy, and HF_HUB_OFFLINE forbids"):
        fetch()
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = fetch()
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch() == folder
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="no complete copy"):
        fetch()
    assert resolve_model(NAME).config == json.loads(CONFIG)
    assert not hub.requests


def test_an_endpoint_without_scheme_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hf-mirror.com")
    with pytest.raises(InputError, match=r"HF_ENDPOINT=hf-mirror.com: must begin with https://"):
        fetch()


def test_without_a_network(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MachineError, match=r"http://127.0.0.1:9 cannot be reached .*HF_ENDPOINT"):
        fetch()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    folder = fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    assert fetch(say=said.append) == folder
    assert "the copy in the cache is used" in said[0]


def test_what_is_gone_from_the_hub_but_not_from_here(hub: Hub, repo: Repo) -> None:
    folder = fetch()
    del hub.repos[NAME]
    said: list[str] = []
    assert fetch(say=said.append) == folder
    assert "no such repository" in said[0]


@pytest.mark.parametrize("address", ["nonsense", "http://[", "http://127.0.0.1:0", "ftp://x", "http://\x00"])
def test_a_wrong_endpoint(hub: Hub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("hetero.hub.endpoint", lambda: address)
    with pytest.raises(MachineError, match="HF_ENDPOINT"):
        fetch()


def test_a_cache_that_is_read_only(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "x")

    for owner, name in ((os, "open"), (Path, "mkdir"), (Path, "write_text"), (Path, "symlink_to")):
        monkeypatch.setattr(owner, name, refuse)
    assert fetch() == folder
    repo.revisions["main"] = repo.revisions["main"] | {"generation_config.json": b'{"c": 3}'}
    with pytest.raises(MachineError, match="cannot be written: Read-only file system"):
        fetch()


def test_a_hub_in_trouble(hub: Hub, repo: Repo) -> None:
    hub.fail = lambda path: 500 if path.startswith("/api") else None
    with pytest.raises(MachineError, match="answers 500"):
        fetch()
    hub.fail = lambda path: 429 if path.startswith("/api") else None
    with pytest.raises(MachineError, match="429, too many requests"):
        fetch()
    hub.fail = lambda path: 200 if path.startswith("/api") else None
    with pytest.raises(MachineError, match="does not answer as the Hub does"):
        fetch()
    hub.fail = lambda path: 403 if "resolve" in path else None
    with pytest.raises(InputError, match="refuses access"):
        fetch()
    count = iter([503, 500, *[None] * 99])
    hub.fail = lambda path: next(count) if path.endswith(".safetensors") else None
    same(fetch(), repo.revisions["main"])


def test_too_little_space_is_told_before(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=(64 << 20) + 14_000))
    with pytest.raises(MachineError, match=r"15\.0 kB are to be fetched, .* has 67\.1 MB free"):
        fetch()
    assert not list((home() / "hub").rglob("*.safetensors"))


def test_a_disk_that_fills_up(hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = os.write, 9000

    def full(descriptor: int, data: Any) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return write(descriptor, data)

    monkeypatch.setattr(transfer.os, "write", full)
    with pytest.raises(MachineError, match=r"disk is full at \d+ of 5000 bytes .*HF_HOME"):
        fetch()
    monkeypatch.setattr(transfer.os, "write", write)
    same(fetch(), repo.revisions["main"])


def test_an_index_that_points_elsewhere(hub: Hub, repo: Repo) -> None:
    repo.revisions["main"]["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "../../../../etc/passwd"}}'
    )
    with pytest.raises(InputError, match="which the repository does not have"):
        fetch()
    repo.revisions["main"]["model.safetensors.index.json"] = b"[]"
    with pytest.raises(InputError, match="no 'weight_map'"):
        fetch()


def test_formats_that_can_hold_code_are_not_fetched(hub: Hub) -> None:
    hub.repos[NAME] = Repo({"main": {"config.json": CONFIG, "pytorch_model.bin": b"x" * 2000}})
    with pytest.raises(InputError, match=r"no safetensors and no GGUF files; \.bin files can hold code"):
        fetch()
    hub.repos[NAME] = Repo({"main": {"README.md": b"x"}})
    with pytest.raises(InputError, match=r"holds no safetensors and no GGUF files$"):
        fetch()


SCRIPT = (
    "import sys\nfrom hetero import hub\nfrom hetero.hub_names import HubName\n"
    f"print(hub.fetch(HubName('{NAME}'), say=lambda text: print(text, file=sys.stderr)))"
)


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_fetch_each_file_once(hub: Hub, repo: Repo) -> None:
    hub.delay = 0.02
    both = [start(), start()]
    out = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], out
    folder = Path(out[0][0].strip())
    assert out[1][0].strip() == str(folder)
    same(folder, repo.revisions["main"])
    large = [path for _, path, _ in hub.requests if path.startswith("/blob")]
    assert len(large) == len(set(large)) == 4


def test_ctrl_c_leaves_nothing_that_is_taken_for_whole(hub: Hub, repo: Repo) -> None:
    hub.delay = 0.05
    process = start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(part.stat().st_size > 600 for part in parts(home())):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert "stopped; what has come is kept, and the same command goes on from there" in error
    assert parts(home())
    for blob in (home() / "hub").rglob("blobs/*"):
        if not blob.name.endswith(".hetero-part"):
            assert blob.read_bytes() in repo.revisions["main"].values()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with pytest.raises(InputError, match="no complete copy"):
            fetch()
    finally:
        del os.environ["HF_HUB_OFFLINE"]
    hub.delay = 0
    same(fetch(), repo.revisions["main"])


GGUF = {
    "config.json": CONFIG,
    "tiny-Q4_K_M.gguf": b"GGUF" + random.randbytes(2000),
    "tiny-Q4_K_S.gguf": b"GGUF" + random.randbytes(1000),
    "tiny-UD-Q4_K_XL.gguf": b"GGUF" + random.randbytes(1500),
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf": b"GGUF" + random.randbytes(3000),
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf": b"GGUF" + random.randbytes(3000),
    "mmproj-F16.gguf": b"GGUF",
    "imatrix.gguf": b"GGUF",
}


def test_one_quantisation_of_gguf(hub: Hub) -> None:
    hub.repos["lab/tiny-GGUF"] = Repo({"main": GGUF})
    with pytest.raises(InputError) as error:
        fetch("lab/tiny-GGUF")
    assert (
        "choose one of Q4_K_S (1.0 kB), UD-Q4_K_XL (1.5 kB), Q4_K_M (2.0 kB), Q8_0 (6.0 kB), as in "
        in str(error.value)
    )
    # A configuration needs no choice.
    assert (fetch("lab/tiny-GGUF", weights=False) / "config.json").read_bytes() == CONFIG
    found = fetch("lab/tiny-GGUF:q4_k_m")
    assert found.name == "tiny-Q4_K_M.gguf"
    assert found.read_bytes() == GGUF[found.name]
    assert fetch("lab/tiny-GGUF:Q4_K_XL").name == "tiny-UD-Q4_K_XL.gguf"
    split = fetch("lab/tiny-GGUF:Q8_0")
    assert split.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert {path.name for path in split.parent.iterdir()} == {
        "tiny-Q8_0-00001-of-00002.gguf",
        "tiny-Q8_0-00002-of-00002.gguf",
    }
    assert fetch("lab/tiny-GGUF/Q8_0/tiny-Q8_0-00002-of-00002.gguf") == split
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        assert fetch("lab/tiny-GGUF:Q8_0") == split
        with pytest.raises(InputError, match="no complete copy"):
            fetch("lab/tiny-GGUF:Q4_K_S")
    finally:
        del os.environ["HF_HUB_OFFLINE"]
    for wrong, words in (
        ("lab/tiny-GGUF:Q2_K", "has no quantisation Q2_K; choose one of"),
        ("lab/tiny-GGUF:Q4_K", "has no quantisation Q4_K;"),
        ("lab/tiny-GGUF/none.gguf", "has no file none.gguf; there are Q8_0/tiny"),
    ):
        with pytest.raises(InputError, match=words):
            fetch(wrong)
    assert not [path for _, path, _ in hub.requests if "mmproj" in path or "imatrix" in path]


def test_gguf_that_lacks_a_part_or_a_configuration(hub: Hub) -> None:
    files = {"a-Q8_0-00001-of-00002.gguf": b"GGUF" * 500}
    hub.repos["lab/part"] = Repo({"main": files}, card={"base_model": ["lab/tiny-moe"]})
    with pytest.raises(InputError, match="is one of 2 parts, and the repository has 1"):
        fetch("lab/part")
    with pytest.raises(InputError, match="is one of 2 parts"):
        fetch("lab/part", weights=False)
    hub.repos["lab/part"].revisions["main"] = {"a.gguf": b"GGUF" * 500}
    with pytest.raises(InputError, match="made from lab/tiny-moe, whose configuration can be read"):
        fetch("lab/part", weights=False)
    assert fetch("lab/part").name == "a.gguf"
    assert fetch("lab/part", weights=False).name == "a.gguf"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", HubName("Qwen/Qwen3-30B-A3B")),
        ("a/b:Q4_K_M", HubName("a/b", quant="Q4_K_M")),
        ("a/b/c/d.gguf", HubName("a/b", file="c/d.gguf")),
        ("a/b.gguf", None),
        ("a/b.json", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("/a/b", None),
        ("a", None),
        ("a/b:", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse_name(text) == name


def test_labels_of_gguf_files() -> None:
    groups = group_gguf(["m-IQ2_XXS.gguf", "m.Q6_K.gguf", "m-bf16.gguf", "BF16-x/m-mxfp4_moe.gguf", "n.gguf"])
    assert set(groups) == {"IQ2_XXS", "Q6_K", "bf16", "mxfp4_moe", "n"}
    # Two models with the same quantisation keep their own names.
    groups = group_gguf(["x-Q4_0.gguf", "y-Q4_0.gguf"])
    assert set(groups) == {"x-Q4_0", "y-Q4_0"}
    assert choose_gguf(list(groups), "Q4_0") is None
    assert choose_gguf(list(groups), "y-q4_0") == "y-Q4_0"
