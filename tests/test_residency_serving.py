"""Experts on disk, as people meet them: replies, numbers, and what clients are told when a shard is spoilt."""

import os

from serving import serving
from streaming import TINY, budget_of, shard

import halfbyte
from halfbyte import fitting
from halfbyte.commands.chat_commands import stats
from halfbyte.conversation import Conversation
from halfbyte.server import service
from halfbyte.server.settings import Settings

QUESTION = "Tell me a story about a fox and a lantern."


def test_a_conversation_is_the_same_and_says_what_was_read():
    found = []
    for cache in (None, budget_of(TINY, 20)):
        model, tokenizer = halfbyte.load("tiny", device="cpu", expert_cache=cache)
        conversation = Conversation(model, tokenizer, max_tokens=12, temperature=0.0)
        found.append("".join(event.text for event in conversation.say(QUESTION)))
        shown = stats("", conversation, "tiny")
        assert ("were in memory (553.0 kB)" in shown and "read at" in shown) == (cache is not None)
    assert found[0] == found[1]


def test_a_server_leaves_room_for_what_steps_compute_with(monkeypatch):
    """All that is free went to texts, and what a step took came on top of a limit."""
    model, tokenizer = halfbyte.load("tiny", device="cpu")
    monkeypatch.setattr(service, "available", lambda device: fitting.STEP + (40 << 20))
    made = service.Service(model, tokenizer, ["tiny"], Settings())
    assert 0 < made.cache.nbytes + made.scheduler.prefixes.budget <= 40 << 20


def test_row_56_a_server_whose_shard_is_cut(resident, copied, tmp_path):
    """The same replies; numbers for Prometheus; then an error for the request that needs what is gone, and no crash."""
    with serving(tmp_path, "--expert-cache", budget_of(TINY, 20), model=copied) as server:
        first = server.chat(QUESTION)
        assert first.status_code == 200 and first.json()["choices"][0]["message"]["content"]
        assert server.metric("expert_cache_bytes") == budget_of(TINY, 20)
        assert server.metric("expert_cache_hits_total") > 0 < server.metric("expert_cache_misses_total")
        assert server.metric("expert_read_bytes_total") > 0 < server.metric("expert_read_seconds_total")
        os.truncate(shard(copied), 5000)
        codes = [server.chat(f"{QUESTION} {i}").status_code for i in range(4)]
        assert set(codes) <= {500, 503}, codes
        assert server.process.poll() is None and "it ends at byte" in server.log
        assert server.http.get("/health").status_code == 503, "nothing that needs the disk will work again"
