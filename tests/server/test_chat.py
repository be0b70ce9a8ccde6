"""/v1/chat/completions from outside: messages, choices, log-probabilities, thinking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero.engine.request import Request
from tests.server.serving import (
    CHAT,
    CONTEXT,
    END,
    TEXT,
    THINK_TEMPLATE,
    Script,
    Served,
    ask,
    counts,
    near,
    serving,
    tokenizer,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tokenizer()) as running:
        yield running


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    with serving(tokenizer(THINK_TEMPLATE), frozenset({END})) as running:
        yield running


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream put together; each begins by saying who speaks."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            index, delta = choice["index"], dict(choice["delta"])
            if index not in whole:
                assert delta.pop("role") == "assistant"
                whole[index] = {"content": "", "reasoning": "", "logprobs": [], "finish_reason": None}
            so_far = whole[index]
            assert so_far["finish_reason"] is None, "nothing comes after the end of a choice"
            so_far["content"] += delta.pop("content", "")
            so_far["reasoning"] += delta.pop("reasoning_content", "")
            so_far["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            so_far["finish_reason"] = choice["finish_reason"]
            assert not delta
    return whole


def test_the_template_is_applied(served: Served) -> None:
    body = served.post(CHAT, messages=ask(), max_tokens=12, temperature=0)
    want = served.alone.complete(Request(tuple(served.tokenizer.chat(ask())), max_tokens=12))
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "whale"}]}
    ]
    assert served.post(CHAT, messages=parts, max_tokens=12, temperature=0)["choices"] == body["choices"]


def test_every_role_reaches_the_template(served: Served) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "me"},
        # An earlier answer comes back as it was given.
        {"role": "assistant", "content": "cd", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": "ef"},
    ]
    body = served.post("/tokenize", messages=messages)
    assert served.post("/detokenize", tokens=body["tokens"])["prompt"] == (
        "<|start|>system\nbe brief<|end|><|start|>user\nab<|end|><|start|>assistant\ncd<|end|>"
        "<|start|>user\nef<|end|><|start|>assistant\n"
    )
    assert served.post(CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == body["count"]


@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("n", [1, 2])
def test_stream_and_whole_are_equal(served: Served, temperature: float, n: int) -> None:
    options: dict[str, Any] = {"messages": ask("漢字 🙂"), "max_tokens": 40, "temperature": temperature}
    options |= {"seed": 7, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = served.post(CHAT, **options)
    chunks = served.stream(CHAT, **options, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    *rest, counted = chunks
    assert counted["choices"] == []
    assert counts(counted) == counts(whole)
    assert counted["usage"]["completion_tokens"] == 40 * n
    assert counted["usage"]["prompt_tokens"] == len(served.tokenizer.chat(ask("漢字 🙂")))
    assert all(chunk["usage"] is None for chunk in rest)
    got = joined(rest)
    assert len(got) == n
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index
        assert got[index]["content"] == choice["message"]["content"]
        assert got[index]["logprobs"] == near(choice["logprobs"]["content"])
        assert got[index]["finish_reason"] == choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["content"]) == 40
    assert all("usage" not in chunk for chunk in served.stream(CHAT, messages=ask(), max_tokens=2))


def test_choices_differ_by_their_seed(served: Served) -> None:
    options: dict[str, Any] = {"messages": ask(), "max_tokens": 20, "temperature": 1.4}
    many = [c["message"]["content"] for c in served.post(CHAT, **options, n=3, seed=4)["choices"]]
    alone = [
        served.post(CHAT, **options, seed=seed)["choices"][0]["message"]["content"] for seed in (4, 5, 6)
    ]
    assert many == alone
    assert len(set(many)) == 3


def test_logprobs_have_the_shape_of_the_api(served: Served) -> None:
    prompt = served.tokenizer.chat(ask())
    options: dict[str, Any] = {"messages": ask(), "max_tokens": 8, "temperature": 0}
    body = served.post(CHAT, **options, logprobs=True, top_logprobs=3)
    content = body["choices"][0]["logprobs"]["content"]
    assert body["choices"][0]["logprobs"]["refusal"] is None
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    # Bytes of a character that the limit cuts are no content.
    assert raw.decode(errors="replace").startswith(body["choices"][0]["message"]["content"])
    made = served.alone.complete(Request(tuple(prompt), max_tokens=8)).token_ids
    with torch.inference_mode():
        logits = served.runnable.model(input_ids=torch.tensor([[*prompt, *made]])).logits[0]
    want = torch.log_softmax(logits.double(), dim=-1)
    for place, entry in enumerate(content):
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        row = want[len(prompt) - 1 + place]
        assert entry["logprob"] == pytest.approx(float(row.max()), abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )
        assert entry["top_logprobs"][0] == {k: v for k, v in entry.items() if k != "top_logprobs"}
    bare = served.post(CHAT, **options, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 8


def test_thinking_is_told_apart(thinking: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the sea </ thi\n</think>\n\nthe whale"
    want = {"role": "assistant", "content": "the whale", "refusal": None}
    Script(thinking, monkeypatch, *[text] * 3, "no end", "the</think>")
    body = thinking.post(CHAT, messages=ask())
    message = dict(body["choices"][0]["message"])
    assert message.pop("reasoning_content").strip() == "the sea </ thi"
    assert message == want
    assert body["choices"][0]["finish_reason"] == "stop"
    least, most = (
        len(thinking.tokenizer.encode_rendered(text[: text.index(end)])) for end in ("\n", "\n\nthe")
    )
    assert least <= body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= most
    *chunks, counted = thinking.stream(CHAT, messages=ask(), stream_options={"include_usage": True})
    assert counted["usage"]["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
    got = joined(chunks)[0]
    assert (got["reasoning"].strip(), got["content"]) == ("the sea </ thi", "the whale")
    # The end of the text is no token of the content.
    scored = thinking.post(CHAT, messages=ask(), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in scored).decode() == text
    unfinished = thinking.post(CHAT, messages=ask())["choices"][0]["message"]
    assert (unfinished["content"], unfinished["reasoning_content"]) == ("", "no end")
    empty = thinking.post(CHAT, messages=ask())["choices"][0]["message"]
    assert (empty["content"], empty["reasoning_content"]) == ("", "the")


def test_the_template_reads_more_than_messages() -> None:
    template = (
        "{{ reasoning_effort | default('') }}{{ mood | default('') }}{% for m in messages %}{{ m.content }}"
        "{% endfor %}"
    )
    with serving(tokenizer(template)) as running:

        def size(**more: Any) -> int:
            return running.post(CHAT, messages=ask(), max_tokens=1, **more)["usage"]["prompt_tokens"]

        assert size(reasoning_effort="low") == size() + len(running.tokenizer.encode("low"))
        assert size(chat_template_kwargs={"mood": "xyz"}) == size() + 3
        error = running.refused(CHAT, messages=ask(), chat_template_kwargs={"chat_template": "x"})
        assert "chat_template_kwargs" in error["message"]


def test_beyond_the_context(served: Served) -> None:
    body = served.post(CHAT, messages=ask(), max_completion_tokens=4096, temperature=0)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT
    without = served.post(CHAT, messages=ask(), temperature=0)
    assert without["usage"]["total_tokens"] == CONTEXT
    error = served.refused(CHAT, messages=ask("x" * 600))
    assert str(len(served.tokenizer.chat(ask("x" * 600)))) in error["message"]
    assert "512" in error["message"]


def test_without_template_or_tokenizer() -> None:
    with serving(tokenizer(None)) as running:
        error = running.refused(CHAT, messages=ask())
        assert "chat template" in error["message"]
        assert TEXT in error["message"]
        running.post(TEXT, prompt="the", max_tokens=3)
    with serving(None) as running:
        assert "tokenizer" in running.refused(CHAT, messages=ask())["message"]


def test_values_that_ask_for_nothing_pass(served: Served) -> None:
    plain = served.post(CHAT, messages=ask(), max_tokens=5, temperature=0)
    idle: dict[str, Any] = {
        "n": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": None,
        "logprobs": False,
        "top_logprobs": 0,
        "tools": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "service_tier": "auto",
        "store": False,
        "metadata": {},
        "reasoning_effort": "medium",
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "mine",
        "stop": None,
        "stream": False,
    }
    body = served.post(CHAT, messages=ask(), max_completion_tokens=5, temperature=0, **idle)
    assert body["choices"] == plain["choices"]


def image(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages"),
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]}, "messages"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "messages",
    ),
    ({"messages": image("image_url")}, "messages"),
    ({"messages": image("input_audio")}, "messages"),
    ({"messages": image("file")}, "messages"),
    ({"messages": ask(), "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": ask(), "max_tokens": 0}, "max_tokens"),
    ({"messages": ask(), "top_logprobs": 2}, "top_logprobs"),
    ({"messages": ask(), "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": ask(), "logprobs": 2}, "logprobs"),
    ({"messages": ask(), "functions": [{"name": "f"}]}, "functions"),
    ({"messages": ask(), "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": ask(), "audio": {"voice": "x"}}, "audio"),
    ({"messages": ask(), "prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"messages": ask(), "store": True}, "store"),
    ({"messages": ask(), "web_search_options": {}}, "web_search_options"),
    ({"messages": ask(), "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": ask(), "best_of": 1}, "best_of"),
    ({"messages": ask(), "echo": True}, "echo"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(served: Served, body: dict[str, Any], field: str) -> None:
    error = served.refused(CHAT, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_a_part_that_is_no_text_is_named(served: Served) -> None:
    for kind in ("image_url", "input_audio", "file"):
        error = served.refused(CHAT, messages=image(kind))
        assert kind in error["message"]
        assert "only text" in error["message"]
        assert error["message"].startswith("messages.0")


def test_other_mistakes(served: Served) -> None:
    for content in (b"{", b"", b"[1]", b'"text"', b'{"prompt": "a", "temperature": NaN}'):
        answer = served.client.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (content, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = served.client.post(TEXT, content=b'{"prompt": "a"}', headers=form)
    assert answer.status_code == 400
    assert "content-type: application/json" in answer.json()["error"]["message"]
    assert served.client.get(TEXT).status_code == 405
    for body in (r'{"prompt": "\ud800"}', r'{"messages": [{"role": "user", "content": "a\udfff"}]}'):
        path = TEXT if "prompt" in body else CHAT
        answer = served.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert "Unicode" in answer.json()["error"]["message"]
    assert served.refused(TEXT, prompt="a", top_k=-(10**400))["param"] == "top_k"
    served.post(TEXT, prompt="a", max_tokens=1, top_k=10**400)


def test_the_cache_is_told(served: Served) -> None:
    messages = ask("a beginning that two requests have in common")
    size = len(served.tokenizer.chat(messages))
    served.post(CHAT, messages=messages, max_tokens=1)
    usage = served.post(CHAT, messages=messages, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == size
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < size
