"""/v1/completions, /v1/models and the tokenizer's routes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.server.state import Limits
from tests.server.serving import (
    CHAT,
    CONTEXT,
    END,
    TEXT,
    VOCABULARY,
    Served,
    counts,
    near,
    serving,
    tokenizer,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tokenizer()) as running:
        yield running


def texts(body: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["text"] for choice in body["choices"]]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream put together."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            so_far = whole.setdefault(index, {"text": "", "logprobs": {}, "finish_reason": None})
            assert so_far["finish_reason"] is None, "nothing comes after the end of a choice"
            so_far["text"] += choice["text"]
            so_far["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                so_far["logprobs"].setdefault(name, []).extend(values)
    return whole


def test_a_completion_is_what_the_engine_says(served: Served) -> None:
    body = served.post(TEXT, model="tiny", prompt="the sea", max_tokens=24, temperature=0)
    prompt = tuple(served.tokenizer.encode("the sea"))
    want = served.alone.complete(Request(prompt, max_tokens=24))
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (want.text, "length")
    assert counts(body) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "total_tokens": len(prompt) + 24,
    }
    forms: list[Any] = [list(prompt), [list(prompt)], ["the sea"]]
    for form in forms:
        again = served.post(TEXT, prompt=form, max_tokens=24, temperature=0)
        assert texts(again) == [want.text]
    assert served.post(TEXT, prompt="the sea")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("n", [1, 2])
def test_many_prompts_and_choices(served: Served, n: int) -> None:
    prompts: list[Any] = ["the sea", "a whale", "漢"]
    options = {"max_tokens": 20, "temperature": 1.2, "seed": 5}
    alone = [
        text
        for prompt in prompts
        for number in range(n)
        for text in texts(served.post(TEXT, prompt=prompt, **options | {"seed": 5 + number}))
    ]
    body = served.post(TEXT, prompt=prompts, n=n, best_of=n, **options)
    assert texts(body) == alone
    assert len(set(alone)) == 3 * n
    sizes = [len(served.tokenizer.encode(prompt)) for prompt in prompts]
    assert body["usage"]["prompt_tokens"] == sum(sizes)
    assert body["usage"]["completion_tokens"] == 3 * n * 20
    ids = [served.tokenizer.encode(prompt) for prompt in prompts]
    assert texts(served.post(TEXT, prompt=ids, n=n, **options)) == alone

    chunks = served.stream(TEXT, prompt=prompts, n=n, **options, stream_options={"include_usage": True})
    *rest, counted = chunks
    assert counted["choices"] == []
    assert counts(counted) == counts(body)
    whole = joined(rest)
    assert [whole[index]["text"] for index in range(3 * n)] == alone
    assert {choice["finish_reason"] for choice in whole.values()} == {"length"}


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_stream_and_whole_are_equal(served: Served, temperature: float) -> None:
    """A random model writes random bytes: the hardest text there is to cut into valid pieces."""
    options: dict[str, Any] = {"prompt": "漢字 🙂", "max_tokens": 60, "temperature": temperature, "seed": 7}
    options["logprobs"] = 2
    whole = served.post(TEXT, **options)
    chunks = served.stream(TEXT, **options)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert len(chunks) > 10
    got = joined(chunks)[0]
    assert got["text"] == texts(whole)[0]
    assert got["logprobs"] == near(whole["choices"][0]["logprobs"])
    assert len(got["logprobs"]["tokens"]) == 60


def test_every_limit_ends_in_valid_text(served: Served) -> None:
    """Where the limit cuts a character, the text is the longer one's beginning, without half of it."""
    options: dict[str, Any] = {"prompt": "漢字 🙂", "temperature": 1.3, "seed": 7}
    full = served.post(TEXT, **options, max_tokens=12)["choices"][0]["text"]
    for limit in range(1, 12):
        text = served.post(TEXT, **options, max_tokens=limit)["choices"][0]["text"]
        assert full.startswith(text) or text.endswith("\ufffd")
        assert joined(served.stream(TEXT, **options, max_tokens=limit))[0]["text"] == text


def test_logprobs_are_the_models(served: Served) -> None:
    prompt = served.tokenizer.encode("the sea")
    options: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "logprobs": 3}
    # Neither a temperature nor a bias changes what the model itself thinks.
    body = served.post(TEXT, **options, temperature=0.5, seed=1, logit_bias={"70": 3})
    request = Request(
        tuple(prompt), SamplingParams(temperature=0.5, seed=1, logit_bias=((70, 3.0),)), max_tokens=6
    )
    made = served.alone.complete(request).token_ids
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *made]])
        want = torch.log_softmax(served.runnable.model(input_ids=ids).logits[0].double(), dim=-1)
    got = body["choices"][0]["logprobs"]
    assert set(got) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    for place, token in enumerate(made):
        row = want[len(prompt) - 1 + place]
        assert got["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3).values.tolist()
        top = sorted(got["top_logprobs"][place].values(), reverse=True)
        assert top[:3] == pytest.approx(best, abs=1e-4)
        assert got["tokens"][place] in got["top_logprobs"][place]
    assert got["text_offset"][0] == 0
    assert served.post(TEXT, prompt=prompt, max_tokens=2)["choices"][0]["logprobs"] is None
    bare = served.post(TEXT, prompt=prompt, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [len(top) for top in bare["top_logprobs"]] == [1, 1]


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("ids", [False, True])
def test_echo_scores_the_prompt(served: Served, limit: int, ids: bool) -> None:
    """As evaluation harnesses ask: the prompt's own log-probabilities, with the arg max of every place."""
    text = "the whale and 漢 sea " * 4
    tokens = served.tokenizer.encode(text)
    prompt: Any = tokens if ids else text
    body = served.post(TEXT, prompt=prompt, max_tokens=limit, echo=True, logprobs=1, temperature=0)
    choice = body["choices"][0]
    got = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == limit
    assert {len(values) for values in got.values()} == {len(tokens) + limit}
    assert got["token_logprobs"][0] is None
    assert got["top_logprobs"][0] is None
    with torch.inference_mode():
        logits = served.runnable.model(input_ids=torch.tensor([tokens])).logits[0]
    want = torch.log_softmax(logits.double(), dim=-1)
    for place in range(1, len(tokens)):
        row = want[place - 1]
        assert got["token_logprobs"][place] == pytest.approx(float(row[tokens[place]]), abs=1e-4)
        greedy = tokens[place] == int(row.argmax())
        top = got["top_logprobs"][place]
        assert (max(top, key=lambda name: top[name]) == got["tokens"][place]) == greedy
    plain = "".join(token for token in got["tokens"] if not token.startswith("bytes:"))
    assert plain.startswith("the whale")
    assert got["text_offset"][:3] == [0, len(got["tokens"][0]), len(got["tokens"][0] + got["tokens"][1])]


def test_echo_without_logprobs(served: Served) -> None:
    plain = texts(served.post(TEXT, prompt=["the", "sea"], n=2, max_tokens=6, temperature=0))
    want = [echo + text for echo, text in zip(("the", "the", "sea", "sea"), plain, strict=True)]
    options: dict[str, Any] = {"prompt": ["the", "sea"], "n": 2, "echo": True, "temperature": 0}
    assert texts(served.post(TEXT, **options, max_tokens=6)) == want
    assert [
        c["text"] for _, c in sorted(joined(served.stream(TEXT, **options, max_tokens=6)).items())
    ] == want
    body = served.post(TEXT, **options, max_tokens=0)
    assert texts(body) == ["the", "the", "sea", "sea"]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0
    both = served.post(TEXT, **options, max_tokens=0, logprobs=0)["choices"]
    assert both[0]["logprobs"] == both[1]["logprobs"]
    assert both[1]["logprobs"] != both[2]["logprobs"]


def test_the_end_of_text_is_scored_too() -> None:
    """A harness drops the last entry as the one token made, also when that is the end."""
    with serving(tokenizer(), frozenset({END})) as running:
        options: dict[str, Any] = {"prompt": "the", "max_tokens": 9, "logit_bias": {str(END): 100}}
        body = running.post(TEXT, **options, logprobs=1)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["logprobs"]["tokens"] == ["<|end|>"]
        got = joined(running.stream(TEXT, **options, logprobs=1))[0]
        assert got["logprobs"] == near(choice["logprobs"])
        assert running.post(TEXT, **options, ignore_eos=True)["usage"]["completion_tokens"] == 9


def test_sampling_fields_reach_the_sampler(served: Served) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.4,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.2,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "seed": 3,
    }
    body = served.post(TEXT, prompt=[5, 6, 7], max_tokens=40, logit_bias={"9": 4.0}, **fields)
    params = SamplingParams(**fields, logit_bias=((9, 4.0),))
    want = served.alone.complete(Request((5, 6, 7), params, max_tokens=40)).text
    assert texts(body) == [want]
    for name in fields.keys() - {"seed"}:
        neutral = {k: v for k, v in fields.items() if k != name}
        other = served.post(TEXT, prompt=[5, 6, 7], max_tokens=40, logit_bias={"9": 4.0}, **neutral)
        assert texts(other) != [want], f"{name} has no effect"


def test_seeds(served: Served) -> None:
    def text(**more: Any) -> list[str]:
        return texts(served.post(TEXT, prompt="the", max_tokens=30, temperature=1.5, **more))

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(seed=-5) == text(seed=-5)
    assert text() != text()
    both = text(seed=1, n=2)
    assert both == text(seed=1) + text(seed=2)


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings(served: Served, as_list: bool) -> None:
    free = texts(served.post(TEXT, prompt="the", max_tokens=60, temperature=0))[0]
    stop = free[8:11]
    cut = free[: free.index(stop)]
    options: dict[str, Any] = {"prompt": "the", "max_tokens": 60, "temperature": 0}
    options["stop"] = [stop, "never there"] if as_list else stop
    body = served.post(TEXT, **options)
    assert texts(body) == [cut]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < 60
    got = joined(served.stream(TEXT, **options))[0]
    assert (got["text"], got["finish_reason"]) == (cut, "stop")


def test_beyond_the_context(served: Served) -> None:
    body = served.post(TEXT, prompt=[5] * 400, max_tokens=4096, temperature=0)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT
    for stream in (False, True):
        error = served.refused(TEXT, prompt=[5] * 600, max_tokens=4096, stream=stream)
        assert "600" in error["message"]
        assert "512" in error["message"]


def test_a_text_that_is_too_long_is_refused_unread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the text was read")

    most = max(len(served.tokenizer.token_bytes(token)) for token in range(VOCABULARY))
    text = "the whale " * 200_000
    monkeypatch.setattr(type(served.tokenizer), "_encode", read)
    for path, body in (
        (TEXT, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
    ):
        told = served.refused(path, **body)["message"]
        least = int(re.findall(r"at least (\d+) tokens", told)[0])
        assert len(text) // 2 // most < least < len(text)
        assert f"holds {CONTEXT}" in told
    monkeypatch.setattr(served.state, "limits", Limits(prompt_tokens=20))
    assert "takes at most 20" in served.refused(TEXT, prompt=text)["message"]


def test_without_a_tokenizer() -> None:
    with serving(None) as running:
        assert "token ids" in running.refused(TEXT, prompt="the")["message"]
        assert "tokenizer" in running.refused(TEXT, prompt=[5, 6], stop="x")["message"]
        assert "tokenizer" in running.refused(TEXT, prompt=[5, 6], echo=True)["message"]
        assert "tokenizer" in running.refused("/tokenize", prompt="the")["message"]
        body = running.post(TEXT, prompt=[5, 6], max_tokens=3, temperature=0, logprobs=1)
        assert body["usage"]["completion_tokens"] == 3
        assert all(math.isfinite(value) for value in body["choices"][0]["logprobs"]["token_logprobs"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 65}, "n"),
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "z"}, "suffix"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty"),
    ({"prompt": "a", "presence_penalty": -2.5}, "presence_penalty"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": 3}, "stop"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"surprise": 1}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(served: Served, body: dict[str, Any], field: str) -> None:
    error = served.refused(TEXT, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_models(served: Served) -> None:
    models = served.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == CONTEXT
    assert served.client.get("/v1/models/tiny").json() == models["data"][0]
    missing = served.client.get("/v1/models/gpt")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert served.refused(TEXT, 404, model="gpt-9", prompt="a")["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/no/such/path", 404, "GET /no/such/path: no such path; there are /detokenize, "),
        ("POST", "/chat/completions", 404, "no such path; did you mean /v1/chat/completions? there are "),
        ("POST", "/v1/v1/messages", 404, "did you mean /v1/messages?"),
        ("POST", "/v1/completion", 404, "did you mean /v1/completions?"),
        ("GET", "/v1/completions", 405, "GET /v1/completions: the path takes POST"),
    ],
)
def test_paths_that_there_are_not(served: Served, method: str, path: str, status: int, words: str) -> None:
    answer = served.client.request(method, path)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_tokenize_and_back(served: Served) -> None:
    text = "the 漢 whale 🙂"
    body = served.post("/tokenize", prompt=text, return_token_strs=True)
    assert body["tokens"] == served.tokenizer.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert served.post("/detokenize", tokens=body["tokens"])["prompt"] == text
    chat = served.post("/tokenize", messages=[{"role": "user", "content": text}])
    assert chat["tokens"] == served.tokenizer.chat([{"role": "user", "content": text}])
    assert "token_strs" not in chat
    written = served.post("/detokenize", tokens=chat["tokens"])["prompt"]
    assert written == f"<|start|>user\n{text}<|end|><|start|>assistant\n"
    assert "prompt" in served.refused("/tokenize")["message"]
    assert served.refused("/detokenize", tokens=[300])["param"] == "tokens"
