"""The page's files and what feeds them, over a real socket without a browser."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hetero.core import HeteroError
from hetero.engine.request import Piece, Request
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import dense_bytes
from hetero.server import figures, live
from hetero.server.metrics import Metrics
from hetero.server.safety import Policy
from hetero.trace import recorder
from tests.server.page_server import NAME, PageServer, page_server, runnable, wait_for

PAGE = files("hetero.server").joinpath("page")
Event = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def served() -> Iterator[PageServer]:
    with page_server() as running:
        yield running


def listen(
    served: PageServer, enough: Callable[[list[Event]], bool], seconds: float = 15.0, **headers: str
) -> list[Event]:
    """Events of /live until there are enough of them; all of them where the server ends it before."""
    seen: list[Event] = []
    end = time.monotonic() + seconds
    with served.client.stream("GET", "/live", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                seen.append((kind, json.loads(line.removeprefix("data: "))))
            if enough(seen):
                break
            assert time.monotonic() < end, [name for name, _ in seen]
    return seen


def of_kind(seen: list[Event], kind: str) -> list[dict[str, Any]]:
    return [body for name, body in seen if name == kind]


class Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.within = tag

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        if self.within in ("script", "style"):
            self.inline += data.strip()


def test_page_is_served_with_headers_that_bound_it(served: PageServer) -> None:
    answer = served.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_files_have_types_and_tags(served: PageServer) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    names = [entry.name for entry in PAGE.iterdir()]
    assert {Path(name).suffix for name in names} == set(kinds)
    for name in names:
        answer = served.client.get(f"/page/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(kinds[Path(name).suffix])
        assert answer.content == PAGE.joinpath(name).read_bytes()
        assert "content-security-policy" in answer.headers
        again = served.client.get(f"/page/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert served.client.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/../app.py", "/page/..%2fapp.py", "/page/"])
def test_nothing_but_the_files_is_served(served: PageServer, path: str) -> None:
    answer = served.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "create_app" not in answer.text


def test_page_has_no_inline_code_and_asks_nobody_else() -> None:
    markup = Markup()
    markup.feed(PAGE.joinpath("index.html").read_text())
    assert markup.inline == ""
    for tag, attributes in markup.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "/").startswith(("/", "#")), (tag, attributes)
    ids = [attributes["id"] for _, attributes in markup.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in markup.found:
        for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
            if name in attributes:
                assert attributes[name] in ids, (tag, name)


def test_scripts_never_parse_text_as_markup() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b"
        r"|new Function|setAttribute\(\s*[\"'](on|src|href|style)|\.srcdoc"
    )
    for entry in PAGE.iterdir():
        if entry.name.endswith(".js"):
            code = re.sub(r"^\s*//.*$", "", entry.read_text(), flags=re.MULTILINE)
            assert not forbidden.search(code), entry.name


def test_listener_is_told_everything_at_once_and_recorded_for_only_while_it_listens(
    served: PageServer,
) -> None:
    assert not recorder.active
    during: list[bool] = []

    def enough(seen: list[Event]) -> bool:
        during.append(recorder.active)
        return {"fixed", "now", "heat"} <= {name for name, _ in seen}

    seen = listen(served, enough)
    assert during[-1]
    (fixed,) = of_kind(seen, "fixed")
    assert fixed["model"] == NAME
    assert fixed["lanes"] == ["gpu", "pcie", "cpu"]
    assert fixed["gpu"] is False
    now = of_kind(seen, "now")[0]
    assert now["phase"] == "ready"
    assert now["hit_rate"] is None
    assert now["bytes_s"]["gpu"] is None
    assert now["bytes_s"]["pcie"] is None
    (ram,) = now["memory"]
    assert ram["parts"]["experts"] == sum(op.backend.nbytes for op in experts())
    assert ram["parts"]["dense weights"] >= dense_bytes(runnable().model)["cpu"]
    wait_for(lambda: not recorder.active)


def experts() -> list[CpuExpertsOp]:
    return [module for module in runnable().model.modules() if isinstance(module, CpuExpertsOp)]


def test_figures_follow_the_work(served: PageServer) -> None:
    before = {op.layer: sum(op.use.snapshot().counts) for op in experts()}
    worker = threading.Thread(target=served.complete, args=(60,))

    def enough(seen: list[Event]) -> bool:
        if seen and not worker.ident:
            worker.start()
        speeds = [body["tokens_s"] for body in of_kind(seen, "now")]
        # Until the window has passed over the answer.
        return any(speeds) and speeds[-1] == 0.0

    served.delay = 0.01
    try:
        seen = listen(served, enough, seconds=30)
    finally:
        served.delay = 0.0
        worker.join()
    busy = [body for body in of_kind(seen, "now") if body["tokens_s"] > 0]
    assert max(body["running"] for body in of_kind(seen, "now")) == 1
    assert all(body["ttft_s"] > 0.01 for body in busy)
    # A step reads the dense weights and, in each layer, at least one expert and at most all.
    dense = dense_bytes(runnable().model)["cpu"]
    packed = sum(op.backend.nbytes for op in experts())
    peak = max(busy, key=lambda body: body["tokens_s"])
    assert dense < peak["bytes_s"]["ram"] / peak["tokens_s"] < 1.5 * (dense + packed)
    assert peak["shares"]["experts"] + peak["shares"]["dense"] == pytest.approx(1.0)
    shown = of_kind(seen, "steps")
    assert shown
    for body in shown:
        for step in body["steps"]:
            lanes = {lane for lane, *_ in step["spans"]}
            assert lanes == {2}
            assert {layer for _, kind, layer, *_ in step["spans"] if kind == 0} == {
                op.layer for op in experts()
            }
            for _, _, _, start, length in step["spans"]:
                assert 0 <= start <= start + length <= step["us"] + 1
    rows = of_kind(seen, "heat")[-1]["rows"]
    for row in rows:
        op = next(op for op in experts() if op.layer == row["layer"])
        assert row["total"] - before[op.layer] > 0
        assert sum(row["use"]) == pytest.approx(1000 * len(row["use"]), abs=len(row["use"]))
    tokenizer = served.state.tokenizer
    assert tokenizer is not None
    # The last token is drawn and never read; each one that is read goes to three experts.
    read = len(tokenizer.encode("Call me")) + 60 - 1
    assert rows[0]["total"] - before[rows[0]["layer"]] == 3 * read


def test_figures_come_a_few_times_a_second(served: PageServer) -> None:
    began = time.monotonic()
    seen = listen(served, lambda seen: len(of_kind(seen, "now")) >= 5)
    took = time.monotonic() - began
    assert len(of_kind(seen, "now")) == 5
    assert took > 4 * live.TICK_S * 0.9


def test_use_of_experts_is_not_repeated_while_it_stays_the_same(served: PageServer) -> None:
    seen = listen(served, lambda seen: len(of_kind(seen, "now")) >= 8)
    assert len(of_kind(seen, "heat")) == 1
    assert len(of_kind(seen, "steps")) <= 1


def test_listeners_share_one_source_and_are_bounded(
    served: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_LISTENERS", 2)
    made: list[int] = []
    real = figures.Figures.now

    def counted(self: figures.Figures) -> dict[str, Any]:
        made.append(1)
        return real(self)

    monkeypatch.setattr(figures.Figures, "now", counted)
    with served.client.stream("GET", "/live") as first, served.client.stream("GET", "/live") as second:
        a, b = first.iter_lines(), second.iter_lines()
        assert next(a) == next(b) == "event: fixed"
        refused = served.client.get("/live")
        assert refused.status_code == 503
        assert "close one" in refused.json()["error"]["message"]
        time.sleep(3 * live.TICK_S)
        assert len(made) <= 6
    wait_for(lambda: not recorder.active)
    listen(served, bool)


def test_live_needs_the_key_and_the_page_does_not() -> None:
    with page_server(Policy(keys=("a-secret-key",))) as served:
        assert served.client.get("/").status_code == 200
        assert served.client.get("/page/main.js").status_code == 200
        assert served.client.get("/live").status_code == 401
        assert listen(served, bool, authorization="Bearer a-secret-key")


def test_loading_and_draining_are_told_and_end_the_stream() -> None:
    with page_server(ready=False) as served:
        seen = listen(served, lambda seen: len(seen) >= 2)
        assert [body["phase"] for body in of_kind(seen, "now")] == ["loading", "loading"]
        assert served.client.get("/").status_code == 200
    with page_server() as served:

        def stop(seen: list[Event]) -> bool:
            served.state.draining = bool(seen)
            return False

        seen = listen(served, stop)
        assert seen[-1] == ("now", {"phase": "draining"})


def test_mean_of_first_tokens_is_the_metric_s() -> None:
    metrics = Metrics()
    assert figures.first_tokens(metrics) == (0.0, 0.0)
    for _ in range(2):
        see = metrics.request(Request((1,)))
        see(Piece(1, ""))
        see(HeteroError("over"))
    seconds, count = figures.first_tokens(metrics)
    assert count == 2
    assert 0 < seconds < 1


def test_counters_of_the_kernel_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tx\nVmRSS:\t  12 kB\n")
    (folder / "io").write_text("rchar: 9\nread_bytes: 4096\n")
    assert figures.resident_bytes(tmp_path) == 12 * 1024
    assert figures.disk_read(tmp_path) == 4096
    assert figures.disk_read(tmp_path / "none") == 0
