"""Lines that break between words: what a screen shows of a text that comes in pieces, and a chat on a real terminal."""

import io
import random
import sys
import termios
from pathlib import Path

import pytest
from test_chat_command import Terminal

import halfbyte
from halfbyte.commands.wrapping import Wrapping, Writer, width
from halfbyte.conversation import Conversation

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from screen import Screen

STORY = "Once there was a fox who lived by the sea. She had two friends, Mia and Tom, and a very small boat."


def sent(pieces, columns):
    wrapping = Wrapping(lambda: columns)
    return "".join(map(wrapping.take, pieces))


def shown(pieces, columns, rows=60):
    screen = Screen(columns, rows)
    screen.feed(sent(pieces, columns).replace("\n", "\r\n"))
    return screen.text().split("\n")


def filled(text, columns):
    """The lines of a text of single blanks, each as full as whole words make it."""
    lines = []
    for paragraph in text.split("\n"):
        lines.append("")
        for word in paragraph.split(" "):
            if lines[-1] and len(f"{lines[-1]} {word}") > columns - 1:
                lines.append("")
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def cut(text, chance):
    """The text in pieces of 1 to 7 characters."""
    pieces = []
    while text:
        count = chance.randint(1, 7)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


@pytest.mark.parametrize("columns", [8, 9, 13, 20, 21, 22, 40, 79, 200])
def test_no_word_crosses_the_edge_however_the_text_comes(columns):
    chance = random.Random(columns)
    text = f"{STORY}\n\n{STORY}\nEnd."
    expected = filled(text, columns)
    assert shown([text], columns) == shown(text, columns) == expected
    for _ in range(20):
        assert shown(cut(text, chance), columns) == expected


def test_nothing_is_held_back():
    wrapping = Wrapping(lambda: 12)
    assert [wrapping.take(piece) for piece in ("a", " bo", "at", " o", "n the", " sea", "shore")] == [
        "a", " bo", "at", " o", "n \nthe", " sea", "\x1b[3D\x1b[K\nseashore",
    ]  # fmt: skip


def test_a_text_that_fits_is_sent_as_it_is():
    for text in ("", "short", "  - a list\n  - of two\n", "a\tb\n", STORY):
        assert sent(text, 200) == text


def test_what_is_longer_than_a_line_gets_its_own_and_is_broken_by_the_terminal():
    address = "https://example.org/" + "x" * 30
    assert shown(cut(f"See {address} or ask Tom.", random.Random(1)), 20) == [
        "See", address[:20], address[20:40], f"{address[40:]} or ask", "Tom.",
    ]  # fmt: skip
    assert shown(f"    {address}\n", 20)[0] == f"    {address[:16]}"  # no line of blanks before it


def test_blanks_at_the_edge_leave_no_empty_lines():
    for count in range(1, 5):
        text = f"{'x' * 9}{' ' * count}\nnext{' ' * 9}{' ' * count}word"
        assert shown(text, 10) == ["x" * 9, "next", "word"]
    assert shown("x" * 10 + "\nnext", 10) == ["x" * 10, "next"]
    assert shown("one\ttwo\tthree", 12) == ["one     two", "three"]


def test_code_is_left_alone():
    line = "for number in range(10): print(number)"
    text = f"This is how it is done:\n```python\n{line}\n```\nand that was all of it"
    assert shown(cut(text, random.Random(2)), 16) == [
        "This is how it", "is done:", "```python", line[:16], line[16:32], line[32:], "```",
        "and that was", "all of it",
    ]  # fmt: skip


def test_wide_characters_take_two_columns_and_need_no_blanks():
    assert width("東京") == 4 and width("e\u0301") == 1 and width("✓é") == 2
    assert sent(["東京は日", "本の首都"], 10) == "東京は日\n本の首都"
    assert sent("I live in 東京 now", 14) == "I live in 東\n京 now"
    assert sent("abc 東京def", 10) == "abc 東京d\x1b[1D\x1b[K\ndef"
    assert sent(["it is cafe", "\u0301 time"], 11) == "it is cafe\u0301\ntime"


def test_the_window_may_change():
    columns = 20
    wrapping = Wrapping(lambda: columns)
    assert wrapping.take("one two three four") == "one two three four"
    columns = 12
    assert wrapping.take("\none two three") == "\none two \nthree"


def test_elsewhere_text_stays_as_it_is(monkeypatch):
    class Teletype(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "10")
    text, found = f"{STORY}\x1b[2J", {}
    for terminal, stream in (("xterm", io.StringIO()), ("xterm", Teletype()), ("dumb", Teletype())):
        monkeypatch.setenv("TERM", terminal)
        Writer(stream).write(text)
        found[terminal, stream.isatty()] = stream.getvalue()
    assert found["xterm", False] == text
    assert found["dumb", True] == f"{STORY}␛[2J"
    assert found["xterm", True].startswith("Once \nthere was\na fox who\n")


def test_a_chat_at_a_narrow_window(tmp_path):
    chat = ("-m", "halfbyte", "chat", "tiny", "--device", "cpu", "--temp", "0", "-m", "80")
    person = Terminal(*chat, XDG_STATE_HOME=str(tmp_path))
    try:
        termios.tcsetwinsize(person.screen, (40, 30))
        person.say("Tell me a story.")
        answer = person.expect("tok/s")
        person.say("/bye")
        assert person.status() == 0
    finally:
        person.close()
    screen = Screen(30, 40)
    screen.feed(answer)
    said = screen.text().split("\n")[:-1]  # without how fast it was
    conversation = Conversation(*halfbyte.load("tiny", device="cpu"), max_tokens=80, temperature=0)
    story = "".join(event.text for event in conversation.say("Tell me a story."))
    assert len(said) > 3
    assert [line for line in said if line] == [line for line in filled(story, 30) if line]
