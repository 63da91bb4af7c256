"""Ids to text as they come: whole characters, stop strings, and in the end exactly what the tokenizer decodes."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import SENTENCES, byte_fallback, byte_level, metaspace

from halfbyte import limits
from halfbyte.text.decoder import ByteFallback, ByteLevel, Decoder, Windowed, detokenizer

KINDS = {
    "byte_level": (byte_level, ByteLevel),
    "byte_fallback": (byte_fallback, ByteFallback),
    "byte_fallback, space stripped": (lambda: byte_fallback(1), ByteFallback),
    "metaspace": (metaspace, Windowed),
}
kinds = pytest.mark.parametrize("make", [make for make, _ in KINDS.values()], ids=KINDS)


def stream(tokenizer, ids, stop=(), **more):
    decoder = Decoder(detokenizer(tokenizer)(), stop, **more)
    return [*map(decoder.push, ids), decoder.finish()], decoder


@pytest.mark.parametrize(("make", "kind"), KINDS.values(), ids=KINDS)
def test_each_tokenizer_gets_its_own(make, kind):
    assert type(detokenizer(make())()) is kind


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", SENTENCES)
def test_the_bytes_of_tokens_are_those_of_their_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    data = b"".join(map(detokenizer(tokenizer)().bytes_of, ids))
    assert data == tokenizer.decode(ids, skip_special_tokens=False).encode()


@kinds
@given(text=st.text(max_size=60) | st.sampled_from(SENTENCES))
def test_streamed_text_is_the_decoded_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)


@kinds
@given(data=st.data())
def test_any_ids_stream_to_what_they_decode_to(make, data):
    """Also halves of characters, bytes that are no UTF-8, control tokens, and ids that no token has."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=30))
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text(alphabet="aé東🙂\u0301", min_size=1, max_size=20))
def test_half_a_character_is_never_given(make, text):
    tokenizer = make()
    deltas, _ = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_token_that_came_before_ends_half_a_character():
    """Its text is known by then, but the half of a character must be given with it."""
    tokenizer = byte_level()
    plain, half = tokenizer.encode("a").ids, tokenizer.encode("🙂").ids[:1]
    ids = plain + half + plain + plain
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "a\ufffdaa"


def test_a_replacement_character_of_the_text_itself_is_given_at_once():
    tokenizer = byte_level()
    ids = tokenizer.encode("\ufffd").ids
    decoder = Decoder(detokenizer(tokenizer)())
    assert "".join(map(decoder.push, ids)) == "\ufffd"


def test_a_truncated_character_comes_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂").ids[:-1]
    deltas, _ = stream(tokenizer, ids)
    assert deltas == [""] * len(ids) + ["\ufffd"]


def test_special_tokens_can_be_hidden():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>").ids
    hidden = [tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")]
    assert "".join(stream(tokenizer, ids, hidden=hidden)[0]) == "a<think>b"
    assert "".join(stream(tokenizer, ids)[0]) == "<|im_start|>a<think>b<|im_end|>"


def cut(text, stops):
    """The meaning: the first place at which a stop string ends; of two that end there the longer."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@kinds
@given(
    text=st.text(alphabet="abc \n", max_size=40),
    stops=st.lists(st.text(alphabet="abc \n", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_end_the_text_wherever_tokens_are_cut(make, text, stops):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    deltas, decoder = stream(tokenizer, ids, stops)
    assert ("".join(deltas), decoder.stopped) == cut(whole, stops)


def test_text_waits_only_while_it_may_become_a_stop_string():
    tokenizer = byte_level()
    decoder = Decoder(detokenizer(tokenizer)(), ["abcd"])
    one = {letter: tokenizer.token_to_id(letter) for letter in "abcdx"}
    assert [decoder.push(one[letter]) for letter in "xabcx"] == ["x", "", "", "", "abcx"]
    assert [decoder.push(one[letter]) for letter in "ababcdx"] == ["", "", "ab", "", "", "", ""]


def test_after_a_stop_string_nothing_comes():
    tokenizer = byte_level()
    deltas, decoder = stream(tokenizer, tokenizer.encode("one STOP two").ids, "STOP")
    assert "".join(deltas) == "one "
    assert decoder.stopped == "STOP"
    assert decoder.push(5) == decoder.finish() == ""


@pytest.mark.parametrize(
    "stops",
    [[""], ["a"] * (limits.STOP_STRINGS + 1), ["a" * (limits.STOP_BYTES + 1)], ["é" * limits.STOP_BYTES], [7]],
    ids=["empty", "many", "long", "long in bytes", "no string"],
)
def test_wrong_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="stop string"):
        stream(byte_level(), [], stops)


@pytest.mark.quiet
@kinds
def test_the_cost_of_an_id_does_not_grow(make):
    """The last tenth of many ids takes no longer than the first, within what a busy machine blurs."""
    tokenizer = make()
    ids = (tokenizer.encode(" ".join(SENTENCES[:2])).ids * 2000)[:20_000]
    decoder = Decoder(detokenizer(tokenizer)(), ["never met"])
    times = []
    for part in range(10):
        start = time.process_time()
        for id in ids[part * 2000 : (part + 1) * 2000]:
            decoder.push(id)
        times.append(time.process_time() - start)
    assert times[-1] < 5 * min(times[:3]) + 0.05
