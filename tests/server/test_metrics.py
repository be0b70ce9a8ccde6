"""What the counters of a server count."""

from __future__ import annotations

import re

from hetero.server.metrics import Metrics
from hetero.store.policy import CacheStats
from hetero.store.rows import RowReads
from tests.server.serving import TEXT, serving, tokenizer


def test_prompt_tokens_that_were_known_count_as_looked_up() -> None:
    with serving(tokenizer()) as running:
        prompt = "the whale and the sea " * 4
        size = running.post(TEXT, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"]
        known = running.post(TEXT, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
        text = running.client.get("/metrics").text
    told = {name: float(value) for name, value in re.findall(r"^hetero:(\w+) (\S+)$", text, re.M)}
    assert known["cached_tokens"] == size - 1
    assert told["prompt_tokens_total"] == told["prefix_cache_queries_total"] == 2 * size
    assert told["prefix_cache_hits_total"] == size - 1


def test_the_disk_tier_tells_hits_misses_and_waiting() -> None:
    metrics = Metrics()
    metrics.cached(lambda: (7, 3, 0.5))
    text = metrics.text().decode()
    for line in (
        "hetero:expert_cache_hits_total 7.0",
        "hetero:expert_cache_misses_total 3.0",
        "hetero:expert_disk_wait_seconds_total 0.5",
    ):
        assert line in text.splitlines()


def test_tables_on_disk_tell_hits_misses_bytes_and_waiting() -> None:
    metrics = Metrics()
    metrics.gathered(lambda: RowReads(CacheStats(hits=7, misses=3), nbytes=960, seconds=0.5))
    text = metrics.text().decode()
    for line in (
        "hetero:table_cache_hits_total 7.0",
        "hetero:table_cache_misses_total 3.0",
        "hetero:table_read_bytes_total 960.0",
        "hetero:table_disk_wait_seconds_total 0.5",
    ):
        assert line in text.splitlines()
