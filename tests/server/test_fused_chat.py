"""Conversations with a model of fused layers: what was read and said before is not read again."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.engine.gpu.runner import GpuRunner
from hetero.kv.prefix import common
from hetero.server.chat_protocol import Message
from hetero.server.openings import REMEMBERED, Openings
from tests.engine.paged import PagedDecoder
from tests.server.serving import CHAT, CONTEXT, END, VOCABULARY, Script, serving, tokenizer


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_second_turn_reads_only_what_is_new(recurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = PagedDecoder(2, CONTEXT, recurrent=recurrent, vocabulary=VOCABULARY)
    runner = GpuRunner(decoder, [], handoff=None, slots=2, context=CONTEXT)
    with serving(tokenizer(), frozenset({END}), runner=runner, slots=2) as served:
        answers = "It is large.", "Ask the other one.", "No."
        Script(served, monkeypatch, *answers)
        messages = [{"role": "system", "content": "You know all there is to know of the sea. " * 3}]
        lengths, cached, reads = [], [], []
        for question in ("How large is the sea?", "And who lives there?", "Is that so?"):
            messages.append({"role": "user", "content": question})
            decoder.reads.clear()
            made: Any = served.post(CHAT, messages=messages)
            text = made["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
            lengths.append(made["usage"]["prompt_tokens"])
            cached.append(made["usage"]["prompt_tokens_details"]["cached_tokens"])
            reads.append(sum(decoder.reads))
        assert [message["content"] for message in messages[2::2]] == list(answers)
        assert cached[0] == 0
        for turn in (1, 2):
            said = len(served.tokenizer.encode_rendered(answers[turn - 1]))
            assert cached[turn] == lengths[turn - 1] + said
            assert reads[turn] == lengths[turn] - cached[turn]
        told = served.client.get("/metrics").text
        assert f"hetero:prefix_cache_hits_total {float(sum(cached))}" in told
        assert f"hetero:prefix_cache_queries_total {float(sum(lengths))}" in told
    assert runner.pages.free == runner.pages.total


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_second_conversation_knows_the_instructions(recurrent: bool) -> None:
    """Before anybody has seen where conversations part."""
    decoder = PagedDecoder(2, CONTEXT, recurrent=recurrent, vocabulary=VOCABULARY)
    runner = GpuRunner(decoder, [], handoff=None, slots=2, context=CONTEXT)
    system = {"role": "system", "content": "You know all there is to know of the sea. " * 5}
    with serving(tokenizer(), runner=runner, slots=2) as served:
        known = served.tokenizer.encode_rendered(served.tokenizer.render([system]).rpartition("<|start|>")[0])
        assert len(known) > 64
        for number, question in enumerate(("How large is the sea?", "And who lives there?", "Where?")):
            told = served.post(CHAT, messages=[system, {"role": "user", "content": question}], max_tokens=4)
            cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0 if number == 0 else cached >= len(known)
        # Without instructions, and with a template that fails without more than them, all is as ever.
        served.post(CHAT, messages=[{"role": "user", "content": "Why?"}], max_tokens=2)


def test_openings() -> None:
    words, openings = tokenizer(), Openings()
    system = Message(role="system", content="Be brief.")
    first = openings.of(words, [system, Message(role="user", content="Why?")], [], {})
    assert openings.of(words, [system, Message(role="user", content="How?")], [], {}) is first
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    prompt = tuple(words.chat(said))
    parted = words.decode(prompt[: common(prompt, first)])
    assert parted.endswith("user\n")
    assert "brief" in parted
    assert openings.of(words, [Message(role="user", content="Why?")], [], {}) == ()
    assert openings.of(words, [system], [], {"chat_template": "x"}) == ()  # is refused
    for number in range(REMEMBERED):
        openings.of(words, [Message(role="system", content=str(number))], [], {})
    assert openings.of(words, [system], [], {}) is not first
