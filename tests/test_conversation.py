"""A conversation's state follows its messages: after anything that may happen, a reply is the one of a fresh start."""

import json
from contextlib import closing

import pytest
import torch
from test_models import model_of

import halfbyte
from halfbyte import conversation_file, decoding
from halfbyte.chat import Tokenizer
from halfbyte.conversation import ContextFull, Conversation
from halfbyte.conversation_file import BadConversation
from halfbyte.decoding import Tape
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import NotEnoughMemory, StorageError

QUESTIONS = ["The quick brown fox", "Weather in Oslo?", "naïve café, 東京"]


@pytest.fixture(scope="module")
def loaded(folder):
    return halfbyte.load(folder, device="cpu")


def start(loaded, **options):
    return Conversation(*loaded, **{"max_tokens": 12, **options})


def said(conversation, text):
    return "".join(event.text for event in conversation.say(text))


def from_nothing(conversation, text, loaded, **options):
    """The reply of a conversation that computes all these messages for the first time."""
    fresh = start(loaded, system=conversation.system, **options)
    fresh.messages = list(conversation.messages)
    reply = said(fresh, text)
    assert fresh.stats.reused == 0
    return reply


def test_a_reply_is_that_of_the_template(loaded):
    model, tokenizer = loaded
    conversation = start(loaded)
    ids = tokenizer.chat_ids([{"role": "user", "content": QUESTIONS[0]}])
    expected = list(halfbyte.stream_generate(model, tokenizer, ids, max_tokens=12))
    assert said(conversation, QUESTIONS[0]) == "".join(piece.text for piece in expected)
    assert conversation.messages == [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": "".join(piece.text for piece in expected)},
    ]
    stats = conversation.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finish_reason) == (len(ids), 12, "length")
    assert stats.ttft_s >= stats.prompt_seconds > 0 and stats.generation_tps > 0 and stats.peak_memory > 1e6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.5},
        {"template_args": {"enable_thinking": True}},
        {"raw": True},
        {"prefill_step_size": 3},
    ],
    ids=["greedy", "sampled", "penalised", "thinking", "raw", "small steps"],
)
def test_replies_do_not_depend_on_what_was_held(loaded, options):
    conversation = start(loaded, system="Be brief.", **options)
    for turn, question in enumerate(QUESTIONS):
        expected = from_nothing(conversation, question, loaded, **options)
        assert said(conversation, question) == expected
        assert bool(turn) == bool(conversation.stats.reused)


def test_what_is_held_is_not_computed_again(loaded):
    conversation = start(loaded, max_tokens=1)
    said(conversation, QUESTIONS[0])
    first = conversation.stats.prompt_tokens
    computed = []
    for _ in conversation.say("Q7" * 200, lambda done, total: computed.append((done, total))):
        pass
    stats = conversation.stats
    new = stats.prompt_tokens - first
    assert stats.reused == first and computed[0] == (0, new) and computed[-1] == (new, new)


def test_a_past_that_the_template_changes_costs_only_the_last_reply(loaded):
    """The template trims what was said: the ids of the next prompt part from those held inside the reply."""
    conversation = start(loaded)
    said(conversation, QUESTIONS[0])
    conversation.messages[-1]["content"] += "  "
    before = len(conversation.tokenizer.chat_ids(conversation.messages[:1], add_generation_prompt=False))
    said(conversation, QUESTIONS[1])
    assert before <= conversation.stats.reused < conversation.stats.prompt_tokens


def test_reasoning_is_kept_apart(loaded):
    conversation = start(loaded, template_args={"enable_thinking": True})
    events = list(conversation.say(QUESTIONS[0]))
    assert {event.kind for event in events} == {"reasoning"}
    reply = conversation.messages[-1]
    assert reply["content"] == "" and reply["reasoning_content"] == "".join(event.text for event in events)


@pytest.mark.parametrize("way", ["stop", "close"])
def test_a_stopped_reply_stays_as_far_as_it_came(loaded, way):
    conversation = start(loaded, max_tokens=50)
    shown = ""
    with closing(conversation.say(QUESTIONS[0])) as reply:
        for event in reply:
            shown += event.text
            if len(shown) > 5 and not (conversation.stop() if way == "stop" else False):
                break
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    assert conversation.stats.finish_reason == "interrupted" and conversation.stats.generation_tokens < 50
    assert not conversation.stop()
    expected = from_nothing(conversation, QUESTIONS[1], loaded, max_tokens=50)
    assert said(conversation, QUESTIONS[1]) == expected


class Interrupting:
    """A layer's last part that raises KeyboardInterrupt at its nth call, as Ctrl-C does in the middle of a step."""

    def __init__(self, inner, calls):
        self.inner, self.calls = inner, calls

    def __call__(self, x):
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return self.inner(x)


@pytest.mark.parametrize(
    ("turn", "calls", "left"),
    [(0, 1, 0), (0, 2, 0), (0, 4, 2), (0, 12, 2), (1, 1, 2), (1, 2, 2), (1, 4, 4), (1, 12, 4)],
)
def test_an_interrupt_in_the_middle_of_a_step(loaded, monkeypatch, turn, calls, left):
    """Before the first token (two steps) the question is taken back; afterwards question and partial reply stay.

    The fourth step is computed as it is written, the twelfth replayed.
    """
    monkeypatch.setattr(decoding, "OFTEN", 1 if calls == 12 else 4)
    conversation = start(loaded)
    if turn:
        said(conversation, QUESTIONS[0])
    layer = conversation.model.layers[2]
    shown = ""
    run, steps = Tape.run, iter(range(calls))

    def interrupted(tape, model, cache):
        """After machine code has run to its end: nothing comes in between."""
        run(tape, model, cache)
        if next(steps) == calls - 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layer, "mlp", Interrupting(layer.mlp, calls))
        patch.setattr(Tape, "run", interrupted)
        for event in conversation.say(QUESTIONS[turn]):
            shown += event.text
    assert len(conversation.messages) == left
    if calls > 2:
        assert conversation.messages[-1]["content"] == shown
    assert bool(shown) or calls < 12
    expected = from_nothing(conversation, QUESTIONS[2], loaded)
    assert said(conversation, QUESTIONS[2]) == expected


def test_messages_and_system_prompt_may_change(loaded):
    conversation = start(loaded)
    said(conversation, QUESTIONS[0])
    conversation.system = "Be kind."
    assert from_nothing(conversation, QUESTIONS[1], loaded) == said(conversation, QUESTIONS[1])
    conversation.messages = conversation.messages[:2]
    assert from_nothing(conversation, QUESTIONS[2], loaded) == said(conversation, QUESTIONS[2])
    conversation.clear()
    assert conversation.messages == [] and conversation.system == "Be kind."
    first = from_nothing(conversation, QUESTIONS[0], loaded)
    assert first == said(conversation, QUESTIONS[0])
    conversation.clear()
    assert first == said(conversation, QUESTIONS[0])


def test_the_end_of_the_context(loaded, monkeypatch):
    conversation = start(loaded, max_tokens=None)
    room = 40
    monkeypatch.setattr(conversation.model, "context", room)
    said(conversation, "Oslo?")
    stats = conversation.stats
    assert stats.finish_reason == "length" and stats.prompt_tokens + stats.generation_tokens == room
    before = list(conversation.messages)
    with pytest.raises(ContextFull, match="context is 40"):
        said(conversation, QUESTIONS[1])
    assert conversation.messages == before
    conversation.clear()
    assert said(conversation, "Oslo?") == before[-1]["content"]


def test_too_little_memory_is_said_before_anything_is_computed(loaded, monkeypatch):
    conversation = start(loaded)
    with monkeypatch.context() as patch, pytest.raises(NotEnoughMemory, match="conversation"):
        patch.setattr("halfbyte.memory.available", lambda device: 1000)
        said(conversation, QUESTIONS[0])
    assert conversation.messages == [] and conversation.held == 0
    assert said(conversation, QUESTIONS[0])


def test_a_reply_that_was_left_for_another_cannot_go_on(loaded):
    conversation = start(loaded)
    left = conversation.say(QUESTIONS[0])
    next(left)
    expected = from_nothing(conversation, QUESTIONS[1], loaded)
    assert said(conversation, QUESTIONS[1]) == expected
    with pytest.raises(RuntimeError, match="left for another"):
        list(left)


def test_a_model_without_a_chat_template_goes_on_with_the_text(loaded):
    model, tokenizer = loaded
    bare = Tokenizer(tokenizer.tokens, tokenizer.named, {}, tokenizer.eos_ids, {}, tokenizer.vocab_size)
    conversation = Conversation(model, bare, max_tokens=5)
    assert conversation.raw
    expected = halfbyte.generate(model, bare, QUESTIONS[0], max_tokens=5)
    assert said(conversation, QUESTIONS[0]) == expected


@pytest.mark.parametrize("name", ["qwen3_5_moe-4bit", "gemma4_moe-4bit", "deepseek_v3-4bit"])
def test_a_mark_goes_back(name):
    """Recurrent states, rings that turned over, and plain rows, which a mark does not hold."""
    model = model_of(name)
    kept = model.new_cache(1, 64, 8)
    logits(model, range(20), kept)
    mark = kept.mark(0)
    full = kept.snapshot(0)
    assert sum(t.numel() for layer in mark.layers for t in layer.values()) < sum(
        t.numel() for layer in full.layers for t in layer.values()
    )
    logits(model, range(100, 130), kept)
    kept.restore(0, mark)
    again, _ = logits(model, range(50, 60), kept)
    expected, _ = logits(model, [*range(20), *range(50, 60)])
    assert torch.equal(again, expected[20:])


def test_a_step_ends_where_the_caller_wants_to_mark():
    model = model_of("qwen3_moe-4bit")
    engine, request = Engine(model, model.new_cache(1, 40, 8)), Request(list(range(30)), 1, pause=13)
    engine.submit(request)
    ends = []
    while engine.busy:
        engine.step()
        ends.append(request.computed)
    assert ends == [8, 13, 21, 29, 30]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve\n東京"}]


def test_a_conversation_file_holds_the_messages(tmp_path):
    path = tmp_path / "a talk.json"
    conversation_file.save(path, MESSAGES, "tiny")
    assert conversation_file.load(path) == MESSAGES and path.stat().st_mode & 0o777 == 0o600
    conversation_file.save(path, MESSAGES[:1], "tiny")
    assert conversation_file.load(path) == MESSAGES[:1] and list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps(MESSAGES), encoding="utf-8")
    assert conversation_file.load(path) == MESSAGES


def test_a_conversation_does_not_overwrite_anything_else(tmp_path):
    other = tmp_path / "letter"
    other.write_text("Dear all")
    with pytest.raises(BadConversation, match="no saved conversation"):
        conversation_file.save(other, MESSAGES, "tiny")
    assert other.read_text() == "Dear all"
    with pytest.raises(BadConversation, match="no saved conversation"):
        conversation_file.save(tmp_path, MESSAGES, "tiny")
    with pytest.raises(StorageError, match="could not be written"):
        conversation_file.save(tmp_path / "absent" / "talk", MESSAGES, "tiny")
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "3", "{}", "[" * 100_000, "\xff", '{"messages": 3}', '[{"role": "user"}]', '[{"content": "x"}]',
        '[{"role": "tool", "content": "x"}]', '[{"role": "user", "content": 3}]',
        '[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]',
        '[{"role": "user", "content": "x", "reasoning_content": {}}]', json.dumps([{}] * 5000),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_file_that_is_no_conversation_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadConversation, match="not a conversation: "):
        conversation_file.load(tmp_path / "file")


def test_files_that_are_absent_or_endless_are_refused(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        conversation_file.load(tmp_path / "absent")
    with pytest.raises(BadConversation, match="it is no file"):
        conversation_file.load("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(9_000_000)
    with pytest.raises(BadConversation, match=r"more than 8\.0 MB"):
        conversation_file.load(tmp_path / "large")
