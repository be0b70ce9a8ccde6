"""The page in a browser: Debian's Chromium, driven by Playwright, against a real server.

Where a test must know what the model says, the browser's request is answered in the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hetero.server.safety import Policy
from tests.server.outside import Server
from tests.server.page_server import NAME, PageServer, page_server, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Route

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
CHAT = "**/v1/chat/completions"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs playwright (pip install playwright)"
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    # Chromium's own sandbox does not start as root, which CI often is.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield running
        running.close()


@pytest.fixture(scope="module")
def served() -> Iterator[PageServer]:
    with page_server() as running:
        yield running


@pytest.fixture(autouse=True)
def no_delay(served: PageServer) -> Iterator[None]:
    yield
    served.delay = 0.0


class Window:
    """A page in a fresh profile, its errors, and the addresses that it asks."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context, self.url = context, url
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(30000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._console)
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        # A refused request is told there by the browser; the page's own words are what counts.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait for an expression to be true. Playwright's own way needs eval, which the page forbids."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(30)

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def done(self) -> None:
        """Wait until no answer is under way."""
        self.page.wait_for_selector("#send:not([hidden])")

    def answer(self) -> str:
        return self.page.inner_text(".assistant:last-child .text")

    def said(self) -> list[str]:
        return self.page.locator(".log article .text").all_inner_texts()

    def sends(self) -> Callable[[str], Any]:
        """The body of the request that a message makes."""

        def body(text: str) -> Any:
            with self.page.expect_request(CHAT) as request:
                self.send(text)
            return json.loads(request.value.post_data or "")

        return body


Open = Callable[..., Window]


@pytest.fixture
def open_page(browser: Browser, served: PageServer) -> Iterator[Open]:
    windows: list[Window] = []

    def make(url: str = served.url, **options: Any) -> Window:
        window = Window(browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options), url)
        windows.append(window)
        return window

    yield make
    for window in windows:
        window.context.close()
        assert window.errors == []


@pytest.fixture
def window(open_page: Open) -> Window:
    opened = open_page()
    opened.wait_for_selector("#link[data-kind=good]")
    return opened


def says(window: Window, *texts: str, reasoning: str = "", finish: str = "stop") -> list[Any]:
    """Answer every request of a chat with ``texts``, a delta each; the bodies that were asked."""
    asked: list[Any] = []
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": reasoning}] if reasoning else []
    deltas += [{"content": text} for text in texts]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    ]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def fulfil(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        route.fulfill(status=200, content_type="text/event-stream", body=lines)

    window.page.route(CHAT, fulfil)
    return asked


def refuses(window: Window, status: int, message: str, **headers: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}})
    window.page.route(
        CHAT,
        lambda route: route.fulfill(
            status=status, content_type="application/json", headers=headers, body=body
        ),
    )


def shown(window: Window, text: str, **more: Any) -> None:
    """Let the model say ``text``."""
    says(window, text, **more)
    window.send("go on")
    window.wait_for_selector(".assistant:last-child .tools")


# Sending, streaming, stopping.


def test_answer_is_streamed_and_ends_with_its_figures(window: Window, served: PageServer) -> None:
    settings = json.dumps({"temperature": 0, "maxTokens": 80})
    window.evaluate("settings => localStorage.setItem('hetero.settings', settings)", settings)
    window.reload()
    served.delay = 0.05
    window.send("Call me")
    window.wait_for_selector("#stop:not([hidden])")
    window.until("document.querySelector('.assistant .text').textContent.length > 20")
    before = window.answer()
    assert window.is_hidden("#send")
    window.until(f"document.querySelector('.assistant .text').textContent.length > {len(before) + 20}")
    served.delay = 0.0
    assert window.answer().startswith(before[:10])
    window.done()
    note = window.inner_text(".assistant .note")
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s", note)
    assert window.input_value("#prompt") == ""
    assert window.inner_text("#said") == "The answer is complete"


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_here_and_in_the_engine(window: Window, served: PageServer, how: str) -> None:
    served.delay = 0.05
    window.send("Call me")
    window.until("document.querySelector('.assistant .text').textContent.length > 5")
    assert served.state.engine.status().running == 1
    if how == "button":
        window.click("#stop")
    else:
        window.keyboard.press("Escape")
    window.done()
    assert window.inner_text(".assistant .note") == "Stopped."
    wait_for(lambda: served.state.engine.status().running == 0)
    kept = window.answer()
    assert len(kept) > 5
    served.delay = 0.0
    window.page.unroute_all()
    says(window, "and so on")
    window.send("again")
    window.done()
    assert window.said() == ["Call me", kept, "again", "and so on"]


def test_conversation_is_sent_as_it_is_shown(window: Window) -> None:
    asked = says(window, "Yes", ", sir.", reasoning="Hm. Let me see.")
    window.send("One?")
    window.done()
    window.send("Two?")
    window.done()
    assert asked[0]["messages"] == [{"role": "user", "content": "One?"}]
    assert asked[1]["messages"] == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes, sir."},
        {"role": "user", "content": "Two?"},
    ]
    assert asked[0]["stream"] is True
    assert asked[0]["stream_options"] == {"include_usage": True}
    assert "max_tokens" not in asked[0]


def test_regenerate_asks_the_same_again(window: Window) -> None:
    asked = says(window, "first")
    window.send("One?")
    window.done()
    window.page.unroute_all()
    asked += says(window, "second")
    window.get_by_role("button", name="Regenerate").click()
    window.until("document.querySelector('.assistant .text').textContent === 'second'")
    assert window.said() == ["One?", "second"]


def test_reasoning_is_folded(window: Window) -> None:
    shown(window, "Forty-two.", reasoning="Six times *seven*.")
    thoughts = window.locator(".thoughts")
    assert thoughts.get_attribute("open") is None
    assert not thoughts.locator(".inner").is_visible()
    window.get_by_text("Reasoning").click()
    assert thoughts.locator(".inner").inner_text() == "Six times seven."
    assert window.answer() == "Forty-two."


def test_limit_of_tokens_is_told(window: Window) -> None:
    shown(window, "and then", finish="length")
    assert "ended at the limit of tokens" in window.inner_text(".assistant .note")


# What is kept.


def test_reload_keeps_the_conversation(window: Window) -> None:
    shown(window, "A **bold** answer", reasoning="hm")
    window.reload()
    assert window.said() == ["go on", "A bold answer"]
    assert window.inner_text(".assistant strong") == "bold"
    assert window.locator(".thoughts").count() == 1
    window.on("dialog", lambda dialog: dialog.accept())
    window.click("#new-chat")
    window.wait_for_selector(".empty")
    window.reload()
    assert window.said() == []


def test_reload_within_an_answer_keeps_what_was_there(window: Window, served: PageServer) -> None:
    served.delay = 0.05
    window.send("Call me")
    window.until("localStorage.getItem('hetero.chat')?.includes('reloaded')")
    window.reload()
    wait_for(lambda: served.state.engine.status().running == 0)
    assert window.said()[0] == "Call me"
    assert len(window.said()[1]) > 3
    assert window.inner_text(".assistant .note") == "The page was reloaded before this answer ended."
    assert window.get_by_role("button", name="Regenerate").is_visible()


def test_settings_are_kept_and_sent(window: Window) -> None:
    says(window, "yes")
    window.click("#open-settings")
    window.get_by_label("Temperature").fill("0.25")
    window.get_by_label("Most tokens of an answer").fill("12")
    window.get_by_label("System message").fill("Be brief.")
    window.get_by_label("Colours").select_option("dark")
    window.get_by_role("button", name="Save").click()
    assert window.evaluate("document.documentElement.dataset.theme") == "dark"
    window.reload()
    body = window.sends()("Hello")
    assert body["temperature"] == 0.25
    assert body["max_tokens"] == 12
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    window.done()
    window.click("#open-settings")
    window.get_by_label("Temperature").fill("9")
    window.get_by_role("button", name="Save").click()
    assert window.locator("#settings").is_visible()
    window.keyboard.press("Escape")
    assert not window.locator("#settings").is_visible()
    assert window.sends()("Hello")["temperature"] == 0.25
    window.done()


def test_foreign_contents_of_the_storage_do_no_harm(open_page: Open, served: PageServer) -> None:
    window = open_page()
    window.evaluate(
        'localStorage.setItem(\'hetero.chat\', \'[{"role": 7}, null, {"role": "user", "content": "kept"}]\');'
        'localStorage.setItem(\'hetero.settings\', \'{"temperature": "hot", "theme": 3}\')'
    )
    window.reload()
    assert window.said() == ["kept"]
    window.evaluate(
        "localStorage.setItem('hetero.chat', '{{{'); localStorage.setItem('hetero.settings', 'null')"
    )
    window.reload()
    window.wait_for_selector(".empty")
    assert says(window, "yes") == []
    assert window.sends()("x")["temperature"] == 0.7
    window.done()


# Failures, in words.


def test_server_that_has_gone_is_told_and_found_again(open_page: Open) -> None:
    with Server() as server:
        port = server.ready().port
        window = open_page(f"http://127.0.0.1:{port}")
        window.wait_for_selector("#link[data-kind=good]")
        server.signal(signal.SIGKILL)
        server.end()
        window.wait_for_selector("#link[data-kind=gone]")
        window.locator("#live-note").get_by_text("cannot be reached").wait_for()
        window.send("Are you there?")
        window.locator(".log").get_by_role("alert").get_by_text("cannot be reached").wait_for()
        assert window.said()[0] == "Are you there?"
    with Server("--port", str(port)) as again:
        again.ready(port)
        window.wait_for_selector("#link[data-kind=good]", timeout=60000)
        window.get_by_role("button", name="Try again").click()
        window.until("document.querySelector('.assistant .text').textContent.length > 3")
        assert window.locator(".log .alert").count() == 0
        window.click("#stop")


def test_server_killed_within_an_answer(open_page: Open) -> None:
    with Server() as server:
        window = open_page(str(server.ready().client.base_url))
        window.send("Call me")
        window.until("document.querySelector('.assistant .text')?.textContent.length > 5")
        server.signal(signal.SIGKILL)
        window.wait_for_selector(".assistant .alert")
        assert "connection" in window.inner_text(".assistant .alert")
        assert len(window.answer()) > 5


def test_conversation_beyond_the_context_is_told(window: Window) -> None:
    window.send("whale " * 1500)
    window.wait_for_selector(".assistant .alert")
    words = window.inner_text(".assistant .alert")
    assert "longer than the model can hold" in words
    assert "the context of this model holds 1024" in words
    window.locator(".alert").get_by_role("button", name="New chat").click()
    window.wait_for_selector(".empty")


def test_busy_server_says_when_to_try_again(window: Window) -> None:
    refuses(window, 429, "64 requests are waiting, as many as may", **{"retry-after": "1"})
    window.send("Hello")
    window.wait_for_selector(".assistant .alert")
    assert "busy: 64 requests are waiting" in window.inner_text(".assistant .alert")
    again = window.locator(".alert button").first
    assert again.is_disabled()
    assert again.inner_text() == "Try again in 1 s"
    window.page.unroute_all()
    says(window, "now")
    window.get_by_role("button", name="Try again", exact=True).click()
    window.until("document.querySelector('.assistant .text').textContent === 'now'")
    assert window.said() == ["Hello", "now"]


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (400, "temperature: must be from 0 to 2", "refused this (400): temperature: must be from 0 to 2."),
        (413, "the body is larger than 10 bytes", "too large for the server: the body is larger than"),
        (500, "internal error", "refused this (500): internal error."),
        (503, "the server is shutting down", "Not now: the server is shutting down."),
    ],
)
def test_refusals_are_told(window: Window, status: int, message: str, words: str) -> None:
    refuses(window, status, message)
    window.send("Hello")
    window.wait_for_selector(".assistant .alert")
    assert words in window.inner_text(".assistant .alert")
    window.page.unroute_all()
    # The message that failed is asked again with the next one, without the failure.
    asked = says(window, "yes")
    window.send("and now?")
    window.done()
    assert [message["content"] for message in asked[0]["messages"]] == ["Hello", "and now?"]


def test_error_within_a_stream_keeps_what_came(window: Window) -> None:
    lines = (
        'data: {"choices": [{"index": 0, "delta": {"content": "So far"}}]}\n\n'
        'data: {"error": {"message": "the logits are not finite", "type": "server_error"}}\n\n'
    )
    window.page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=lines))
    window.send("Hello")
    window.wait_for_selector(".assistant .alert")
    assert window.answer() == "So far"
    assert "the logits are not finite" in window.inner_text(".assistant .alert")
    window.page.unroute_all()
    window.page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=lines[:70]))
    window.get_by_role("button", name="Try again").click()
    window.get_by_text("ended before the answer did").wait_for()


def test_key_is_asked_for_and_used(open_page: Open) -> None:
    with page_server(Policy(keys=("a-secret-key",))) as locked:
        window = open_page(locked.url)
        window.wait_for_selector("#link[data-kind=key]")
        window.send("Hello")
        window.get_by_text("This server asks for an API key").first.wait_for()
        window.get_by_label("API key").fill("wrong-wrong")
        window.get_by_role("button", name="Save").click()
        window.get_by_role("button", name="Try again").click()
        window.get_by_text("does not accept this API key").first.wait_for()
        window.get_by_label("API key").fill("a-secret-key")
        window.get_by_role("button", name="Save").click()
        window.wait_for_selector("#link[data-kind=good]")
        window.get_by_role("button", name="Try again").click()
        window.until("document.querySelector('.assistant .text').textContent.length > 3")
        window.click("#stop")
        window.reload()
        window.wait_for_selector("#link[data-kind=good]")
        assert "a-secret-key" not in json.dumps(window.evaluate("({...localStorage})"))


# Text of the model.

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'><a href='javascript:window.hit=1'>x</a></svg>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1) [click]( JaVaScRiPt:window.hit=1 )",
    "[click](data:text/html,<script>opener.hit=1</script>) [x](vbscript:x) [y](//evil.example/x)",
    "[a](java&#115;cript:window.hit=1) <javascript:window.hit=1>",
    "![tracker](https://evil.example/pixel.png)",
    "```<img src=x onerror=window.hit=1>\n<script>window.hit=1</script>\n```",
    "`<script>window.hit=1</script>` **<b onclick=window.hit=1>x</b>**",
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>hit=1</script> | [x](javascript:1) |",
    "> - <details open ontoggle='window.hit = 1'>x</details>",
    '[x](https://a.example/"onmouseover="window.hit=1)',
    "<style>* { display: none }</style><base href='https://evil.example/'>",
]


def test_text_never_becomes_code(window: Window) -> None:
    text = "\n\n".join(ATTACKS)
    shown(window, text, reasoning=text)
    window.get_by_text("Reasoning").click()
    window.send(text)
    window.until("document.querySelectorAll('.assistant .tools').length === 2")
    assert window.evaluate("window.hit") is None
    inside = (
        "script, style, img, iframe, svg, base, object, embed, form, input, [style], [srcdoc], details [open]"
    )
    assert window.locator(f".log :is({inside})").count() == 0
    names = window.evaluate(
        "[...new Set([...document.querySelectorAll('.log *')].flatMap(e => e.getAttributeNames()))]"
    )
    assert not [name for name in names if name.startswith("on")]
    links = window.evaluate("[...document.querySelectorAll('.log a')].map(a => [a.href, a.rel, a.target])")
    assert links
    for href, rel, target in links:
        assert re.match(r"(https?|mailto):", href), href
        assert "noopener" in rel
        assert target == "_blank"
    assert [url for url in window.asked if not url.startswith(window.url)] == []
    # What was written is there to be read.
    assert "<script>window.hit = 1</script>" in window.answer()
    assert "tracker" in window.answer()


def test_messages_of_failures_are_text(window: Window) -> None:
    refuses(window, 400, ATTACKS[1])
    window.send("Hello")
    window.wait_for_selector(".assistant .alert")
    assert ATTACKS[1] in window.inner_text(".assistant .alert")
    assert window.locator(".log img").count() == 0
    assert window.evaluate("window.hit") is None


def test_markdown_is_shown(window: Window) -> None:
    shown(
        window,
        "# Title\n\nSome *em*, **strong**, ***both***, ~~gone~~, `a*b`, snake_case_name and 2 * 3 * 4.\n"
        "New line\n\n- one\n- two\n  - inner\n  - more\n- three\n\n3. three\n4. four\n\n> quoted\n\n---\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 \\| 3 |\n\n[site](https://a.example/x_(y)) <https://b.example> https://c.example/d.\n\n"
        '```python\ndef f():\n    return "<b>"\n```\n\n~~~\nno language\n~~~\n',
    )
    html = window.inner_html(".assistant .text")
    assert "<h3>Title</h3>" in html
    assert "<em>em</em>" in html
    assert "<strong>strong</strong>" in html
    assert "<s>gone</s>" in html
    assert "<code>a*b</code>" in html
    assert "snake_case_name and 2 * 3 * 4.<br>New line" in html
    assert re.search(r"<(em|strong)><(em|strong)>both</", html)
    assert "<li>two<ul><li>inner</li><li>more</li></ul></li><li>three</li></ul>" in html
    assert '<ol start="3"><li>three</li><li>four</li></ol>' in html
    assert "<blockquote><p>quoted</p></blockquote>" in html
    assert "<hr>" in html
    assert '<td>1</td><td class="to-right">2 | 3</td>' in html
    assert 'href="https://a.example/x_(y)"' in html
    assert ">https://b.example</a>" in html
    assert ">https://c.example/d</a>." in html
    assert window.locator(".code .bar span").all_inner_texts() == ["python", "text"]
    assert window.locator(".code pre").first.inner_text() == 'def f():\n    return "<b>"'


def test_code_is_copied(open_page: Open) -> None:
    window = open_page(permissions=["clipboard-read", "clipboard-write"])
    shown(window, "Look:\n```js\nlet a = 1;\nlet b;\n```")
    button = window.locator(".code").get_by_role("button", name="Copy")
    button.click()
    window.locator(".code").get_by_role("button", name="Copied").wait_for()
    assert window.evaluate("navigator.clipboard.readText()") == "let a = 1;\nlet b;"


def test_growing_text_keeps_the_blocks_that_do_not_change(window: Window) -> None:
    kept = window.evaluate(
        """async () => {
            const { show } = await import("/page/markdown.js");
            const box = document.createElement("div");
            show(box, "# a\\n\\nfirst\\n\\n- x");
            const nodes = [...box.children];
            show(box, "# a\\n\\nfirst\\n\\n- x\\n- y\\n\\nlast");
            return nodes.map((node) => node.isConnected || node.parentNode === box);
        }"""
    )
    assert kept == [True, True, False]


def test_long_text_is_shown_in_time(window: Window) -> None:
    """Inputs on which a careless parser takes quadratic time or worse."""
    took = window.evaluate(
        """async () => {
            const { show } = await import("/page/markdown.js");
            const inputs = ["*a ".repeat(20000), "[".repeat(20000), "`".repeat(20001) + "x",
                "> ".repeat(5000),
                "#".repeat(6) + " ".repeat(50000) + "x", "- ".repeat(20000), "|".repeat(20000) + "\\n|-|",
                "_a_".repeat(10000), "1. x\\n".repeat(5000), "![](".repeat(8000), "**a".repeat(10000)];
            return inputs.map((text) => {
                const began = performance.now();
                show(document.createElement("div"), text);
                return performance.now() - began;
            });
        }"""
    )
    assert max(took) < 4000, took


# The window and the keyboard.


def test_dark_and_light_follow_the_system(open_page: Open) -> None:
    def ground(window: Window) -> list[int]:
        return [
            int(part)
            for part in re.findall(r"\d+", window.evaluate("getComputedStyle(document.body).backgroundColor"))
        ]

    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert min(ground(light)[:3]) > 200
    assert max(ground(dark)[:3]) < 60
    for window in (light, dark):
        ink = window.evaluate("getComputedStyle(document.body).color")
        assert contrast(ink, window.evaluate("getComputedStyle(document.body).backgroundColor")) > 7
        soft = window.evaluate("getComputedStyle(document.querySelector('.hint')).color")
        assert contrast(soft, window.evaluate("getComputedStyle(document.body).backgroundColor")) > 4.5


def contrast(one: str, other: str) -> float:
    """Of two colours as the browser writes them, by WCAG's definition."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [320, 390, 700])
def test_narrow_windows_show_one_side_and_never_scroll_sideways(open_page: Open, width: int) -> None:
    window = open_page(viewport={"width": width, "height": 700})
    shown(
        window,
        "word" * 60 + "\n\n```\n" + "x" * 300 + "\n```\n\n| a | b |\n|--|--|\n| " + "y" * 200 + " | z |",
    )
    assert window.is_visible("#prompt")
    assert not window.is_visible("#machine")
    flat = (
        "document.scrollingElement.scrollWidth <= innerWidth"
        " && document.querySelector('.log').scrollWidth <= innerWidth"
    )
    assert window.evaluate(flat)
    for button in ("#send", "#open-settings", "#new-chat"):
        box = window.locator(button).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    window.click("#show-machine")
    window.wait_for_selector("#machine >> text=The last steps")
    assert not window.is_visible("#prompt")
    assert window.evaluate(flat)
    assert window.get_attribute("#show-machine", "aria-pressed") == "true"
    window.until("document.getElementById('queue').textContent === '0 of 8'")
    window.click("#show-chat")
    assert window.is_visible("#prompt")
    window.click("#open-settings")
    assert window.locator("#settings").bounding_box()["width"] <= width


def test_keyboard_alone_is_enough(window: Window) -> None:
    says(window, "```\ncode\n```")
    assert window.evaluate("document.activeElement.id") == "prompt"
    window.keyboard.type("two")
    window.keyboard.press("Shift+Enter")
    window.keyboard.type("lines")
    assert window.input_value("#prompt") == "two\nlines"
    window.keyboard.press("Enter")
    window.done()
    assert window.said()[0] == "two\nlines"
    window.evaluate("document.activeElement.blur(); window.focus()")
    reached = []
    for _ in range(14):
        window.keyboard.press("Tab")
        reached.append(
            window.evaluate(
                """() => {
                    const at = document.activeElement;
                    const style = getComputedStyle(at);
                    const name = at === document.body ? "BODY" : at.id || at.textContent.trim();
                    return [name, style.outlineStyle, parseFloat(style.outlineWidth)];
                }"""
            )
        )
    names = [name for name, _, _ in reached]
    for wanted in (
        "new-chat",
        "toggle-machine",
        "open-settings",
        "log",
        "Copy",
        "Regenerate",
        "prompt",
        "send",
        "heat",
    ):
        assert wanted in names, names
    unseen = [name for name, style, width in reached if name != "BODY" and (style == "none" or width < 2)]
    assert unseen == []
    window.focus("#open-settings")
    window.keyboard.press("Enter")
    assert window.locator("#settings").is_visible()
    window.keyboard.press("Escape")
    assert window.evaluate("document.activeElement.id") == "open-settings"


def test_everything_has_a_name(window: Window) -> None:
    shown(window, "a\n\n```\nb\n```", reasoning="c")
    nameless = window.evaluate(
        """() => [...document.querySelectorAll(
                "button, input, textarea, select, a, canvas, aside, section, [role]")]
            .filter((each) => !each.textContent.trim() && !each.getAttribute("aria-label")
                && !each.getAttribute("aria-labelledby") && !(each.labels && each.labels.length))
            .map((each) => each.outerHTML)
            .filter((text) => !text.includes('id="said"') && !text.includes('id="key-note"'))"""
    )
    assert nameless == []
    assert window.locator("main, aside, header, nav").count() == 4
    assert window.get_by_role("log", name="Conversation").count() == 1
    assert window.get_by_role("textbox", name="Message", exact=True).count() == 1


# The machine.


def test_live_figures_are_shown(window: Window, served: PageServer) -> None:
    assert window.inner_text("#model") == NAME
    assert window.title() == f"{NAME} – hetero"
    assert window.inner_text("#hit-note") == "no GPU cache"
    assert window.locator("#bytes tr").all_inner_texts()[0].split("\t")[-1] == "no GPU"
    served.delay = 0.02
    window.send("Call me")
    window.until("parseFloat(document.getElementById('tokens-s').textContent) > 1")
    window.until("document.getElementById('queue').textContent === '1 of 8'")
    assert window.inner_text("#link-text") == "working"
    shares = r"[\d.]+ ms a step · CPU experts \d+% · dense \d+%"
    wait = time.monotonic() + 10
    while not re.fullmatch(shares, window.inner_text("#shares")):
        assert time.monotonic() < wait, window.inner_text("#shares")
        window.wait_for_timeout(50)
    assert re.search(r"RAM\s+[\d.]+ [kMG]B/s", window.inner_text("#bytes"))
    assert re.search(r"experts [\d.]+ MB · dense weights [\d.]+ MB", window.inner_text("#memory"))
    for canvas in ("lanes", "heat", "spark"):
        colours = window.evaluate(
            """(id) => {
                const canvas = document.getElementById(id);
                const { width, height } = canvas;
                const pixels = new Uint32Array(
                    canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
                return new Set(pixels.filter((pixel) => pixel >>> 24 > 200)).size;
            }""",
            canvas,
        )
        assert colours >= (1 if canvas == "spark" else 3), canvas
    window.click("#stop")
    served.delay = 0.0


def test_heat_map_tells_a_cell(window: Window, served: PageServer) -> None:
    served.complete(8)
    window.until("document.getElementById('heat').clientHeight > 30")
    window.focus("#heat")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
        window.keyboard.press(key)
    words = re.compile(r"Layer (\d+), expert (\d+): chosen (\d+) times, [\d.]+ of an even share")
    found = words.fullmatch(window.inner_text("#heat-cell"))
    assert found is not None
    assert found.groups()[:2] == ("1", "1")
    box = window.locator("#heat").bounding_box()
    window.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    found = words.fullmatch(window.inner_text("#heat-cell"))
    assert found is not None
    assert found.groups()[:2] == ("3", "11")


def test_hidden_machine_costs_nothing(window: Window) -> None:
    from hetero.trace import recorder

    assert recorder.active
    window.click("#toggle-machine")
    assert not window.is_visible("#machine")
    wait_for(lambda: not recorder.active)
    assert window.inner_text("#model") == NAME
    window.reload()
    window.wait_for_selector("#link[data-kind=good]")
    assert not window.is_visible("#machine")
    assert not recorder.active
    window.click("#toggle-machine")
    window.until("document.getElementById('queue').textContent === '0 of 8'")
    assert recorder.active
