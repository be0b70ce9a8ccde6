"""Conversations with a model of fused layers: what was read and said before is not read again."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.engine.gpu.runner import GpuRunner
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
