"""`halfbyte chat`: through a pipe, and as a person at a terminal sees it: a real process on a pseudo-terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
import threading
import time

import numpy
import pytest

import halfbyte
from halfbyte.cli import main
from halfbyte.commands import chat_input
from halfbyte.commands.chat import Screen
from halfbyte.commands.interrupts import interrupts
from halfbyte.conversation import Conversation

PATIENCE = 90  # seconds for what a machine under load still does
LONG = "Q7" * 600  # about as many tokens as characters


@pytest.fixture()
def piped(monkeypatch, capsys, folder):
    """Status, standard output and standard error of a chat whose messages come through a pipe."""

    def run(text, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status = main(["chat", str(folder), "--device", "cpu", "-m", "5", *options])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture(scope="module")
def loaded(folder):
    return halfbyte.load(folder, device="cpu")


def replies(loaded, *messages, **options):
    conversation = Conversation(*loaded, **{"max_tokens": 5, **options})
    return ["".join(event.text for event in conversation.say(message)) for message in messages]


class Terminal:
    """A person at a terminal: waits for what the screen shows, and types."""

    def __init__(self, *arguments, **environment):
        self.process, self.screen = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, as these tests may be, ignore it
            own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            given = {**own, "TERM": "xterm", **environment}
            os.execve(sys.executable, [sys.executable, *map(str, arguments)], given)
        self.shown, self.seen = "", 0
        self.bytes = b""

    def read(self, seconds):
        if select.select([self.screen], [], [], seconds)[0]:
            try:
                self.bytes += os.read(self.screen, 65536)
            except OSError:  # the process has closed its side
                return False
            self.shown = self.bytes.decode("utf-8", "replace")
        return True

    def wait(self, found, what):
        end = time.monotonic() + PATIENCE
        while not found():
            assert self.read(0.1) or found(), f"ended before {what!r}: {self.shown[-2000:]}"
            assert time.monotonic() < end, f"waited in vain for {what!r}: {self.shown[-2000:]}"

    def expect(self, text):
        """Wait until a text stands behind what was expected before; returns what is shown from there to its end."""
        self.wait(lambda: text in self.shown[self.seen :], text)
        start, self.seen = self.seen, self.shown.index(text, self.seen) + len(text)
        return self.shown[start : self.seen]

    def expect_more(self, count):
        """Wait for so many characters, whatever they are."""
        self.wait(lambda: len(self.shown) >= self.seen + count, f"{count} characters")
        self.seen = len(self.shown)

    def type(self, text):
        os.write(self.screen, text.encode())

    def say(self, text):
        """A line at the prompt; what follows is the answer."""
        self.expect("> ")
        self.type(f"{text}\n")
        self.expect("\x1b[?2004l")  # readline gives the line away

    def status(self):
        while self.read(0.1):
            pass
        _, status = os.waitpid(self.process, 0)
        self.process = None
        return os.waitstatus_to_exitcode(status)

    def close(self):
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.screen)


@pytest.fixture()
def terminal(folder, tmp_path):
    opened = []

    def start(*options, **environment):
        options = (folder, "--device", "cpu", "-t", 1, *options)
        opened.append(
            Terminal("-m", "halfbyte", "chat", *options, XDG_STATE_HOME=str(tmp_path / "state"), **environment)
        )
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_ctrl_c_stops_the_reply_and_nothing_else(terminal, loaded, tmp_path):
    """Row 67: in a prompt, in a reply, at the prompt. What is said afterwards is answered as if nothing had been."""
    replies(loaded, "compiles what kernels are not compiled yet")
    person = terminal("--prefill-step-size", 1)
    first = person.expect("leaves.")
    for said in (f"halfbyte {halfbyte.__version__}", "cpu, ", "1 thread", "qwen3_5_moe", "context of 4096 tokens"):
        assert said in first
    person.say(LONG)
    person.expect("reading the prompt")
    person.type("\x03")
    person.expect("the message is taken back")
    person.say("The quick")
    person.expect_more(60)
    person.type("\x03")
    assert "tok/s" in person.expect(" · stopped")
    person.say("Weather in Oslo?")
    person.expect_more(60)
    person.type("\x03")
    person.expect(" · stopped")
    person.say(f"/save {tmp_path / 'talk'}")
    person.expect("4 messages saved")
    person.expect("> ")
    person.type("\x03")
    person.expect("Ctrl-D or /bye leaves.")
    person.expect("> ")
    person.type("half a message")
    person.expect("half a message")
    person.type("\x03")
    person.expect("> ")
    person.type("\x04")
    assert person.status() == 0 and "Traceback" not in person.shown
    messages = json.loads((tmp_path / "talk").read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    conversation = Conversation(*loaded)
    for question, partial in (messages[:2], messages[2:]):
        whole, shown = "", partial["content"].rstrip("\ufffd")  # half a character at the stop is shown as such
        reply = conversation.say(question["content"])
        while len(whole) < len(shown):
            whole += next(reply).text
        reply.close()
        assert shown and whole.startswith(shown)
        conversation.messages[-1] = partial


def test_several_lines_and_no_colours(terminal, tmp_path):
    person = terminal("-m", 3, NO_COLOR="1")
    person.say('"""one')
    person.expect(". ")
    person.type('  two"""\n')
    person.expect("peak memory")
    person.say("three\\")
    person.expect(". ")
    person.type("four\n")
    person.expect("cut at 3 tokens (-m)")
    person.expect("> ")
    person.type("\x1b[200~pasted\nlines\x1b[201~\n")
    person.expect("peak memory")
    person.say("/stats")
    stats = person.expect("first token")
    assert all(word in stats for word in ("messages     6", "of 4096 tokens", "of them known", "tok/s"))
    person.say(f"/save {tmp_path / 'talk'}")
    person.say("/bye")
    assert person.status() == 0
    messages = json.loads((tmp_path / "talk").read_text(encoding="utf-8"))["messages"]
    assert [message["content"] for message in messages[::2]] == ["one\n  two", "three\nfour", "pasted\nlines"]
    assert not re.search("\x1b\\[\\d*m", person.shown)
    history = tmp_path / "state" / "halfbyte" / "history"
    assert json.loads(history.read_text().splitlines()[0]) == "one\n  two"
    assert history.stat().st_mode & 0o777 == 0o600 and history.parent.stat().st_mode & 0o777 == 0o700


def test_a_pipe_gets_replies_and_nothing_else(piped, loaded):
    status, text, said = piped('The quick\n\n"""Weather\nin Oslo?"""\n')
    assert (status, said) == (0, "")
    assert text == "".join(f"{reply}\n" for reply in replies(loaded, "The quick", "Weather\nin Oslo?"))
    assert piped("The quick\\\nbrown fox")[1] == f"{replies(loaded, 'The quick' + chr(10) + 'brown fox')[0]}\n"
    assert piped('"""an end\nthat is missing')[1] == f"{replies(loaded, 'an end' + chr(10) + 'that is missing')[0]}\n"


def test_thoughts_are_no_part_of_the_answer(piped):
    assert piped("The quick\n", "--chat-template-args", '{"enable_thinking": true}')[1] == "\n"


def test_commands(piped, loaded, tmp_path):
    path = tmp_path / "a talk"
    script = (
        f'/system Be brief.\n/system\nOslo\n/save "{path}"\n/clear\n/load {path}\nThe quick\n/system ""\n/EXIT\nnever\n'
    )
    status, text, said = piped(script)
    first, second = replies(loaded, "Oslo", "The quick", system="Be brief.")
    assert (status, said) == (0, "")
    assert text.splitlines() == [
        "The system prompt is set.", "The system prompt is: Be brief.", *first.splitlines(),
        f"2 messages saved in {path}.", "The conversation is forgotten. The system prompt stays.",
        f"2 messages loaded from {path}.", *second.splitlines(), "The system prompt is removed.",
    ]  # fmt: skip
    text = piped("/help\n/stats\n/bye\n")[1]
    assert all(name in text for name in ("/help", "/system", "/clear", "/save", "/load", "/stats", "/exit", "Ctrl-C"))
    assert "messages" in text and "0 of 4096 tokens" in text


FAULTS = [
    ("/sve x", "Did you mean /save?"), ("/usr/bin is what?", "A message may begin with a space."),
    ("/save", "/save FILE"), ("/load ", "/load FILE"), ("/load a\0b", "/load FILE"), ("/load absent", "No such file"),
    ("/load ~nobody-of-this-name/x", "No such file"), ("/load .", "it is no file"), ("/load letter", "not JSON"),
    ("/save letter", "no saved conversation"), ("/save absent/x", "could not be written"),
    ("/save " + "x" * 5000, "could not be written"), (LONG * 8, "context is 4096"),
]  # fmt: skip


def test_what_goes_wrong_is_said_and_the_chat_goes_on(piped, loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter").write_text("Dear all")
    status, text, errors = piped("\n".join(["The quick", *(line for line, _ in FAULTS), "Weather in Oslo?", ""]))
    assert status == 2 and len(errors.splitlines()) == len(FAULTS)
    for (_, said), error in zip(FAULTS, errors.splitlines(), strict=True):
        assert said in error
    assert text == "".join(f"{reply}\n" for reply in replies(loaded, "The quick", "Weather in Oslo?"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("letter", "Dear all")]


def test_a_message_may_begin_with_a_space(piped, loaded):
    assert piped(" /usr/bin\n")[1] == f"{replies(loaded, ' /usr/bin')[0]}\n"


def test_a_model_without_a_chat_template(piped, loaded):
    model, tokenizer = loaded
    expected = halfbyte.generate(model, tokenizer, "The quick", max_tokens=5)
    assert piped("The quick\n", "--ignore-chat-template") == (0, f"{expected}\n", "")
    status, _, errors = piped("/system Be brief.\n", "--ignore-chat-template")
    assert status == 1 and "/system: goes with a chat template" in errors


def test_what_the_screen_says(loaded, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def shown(text, **options):
        screen = Screen(Conversation(*loaded, **options), "tiny")
        screen.open("cpu, AVX2, 4 threads")
        screen.take(text)
        return capsys.readouterr().out

    monkeypatch.setattr(loaded[0], "context", 60)
    full = shown("Oslo?")
    assert full.startswith(
        f"halfbyte {halfbyte.__version__} · cpu, AVX2, 4 threads\ntiny (a toy that checks your install)"
    )
    assert "context of 60 tokens" in full and full.endswith(" · the context is full: /clear begins anew\n\n")
    assert "\nThinking: " in shown("Oslo?", max_tokens=9, template_args={"enable_thinking": True})
    assert "No chat template: the model goes on with your text." in shown("Oslo?", max_tokens=1, raw=True)
    whole = replies(loaded, "Oslo?", max_tokens=9)[0]
    assert shown("Oslo?", stop=whole[4:6]).splitlines()[-2].endswith("B")  # nothing to say about its end


def test_a_model_s_text_does_not_steer_the_terminal():
    from halfbyte.commands.terminal import printable

    class Screen(io.StringIO):
        def isatty(self):
            return True

    text = "a\x1b]0;title\x07\r\n\tb\x7f\x9b2J東京"
    assert printable(text, io.StringIO()) == text
    assert printable(text, Screen()) == "a␛]0;title␇␍\n\tb␡\ufffd2J東京"


@pytest.fixture()
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_between_two_keys_is_not_slept_through(tmp_path):
    """Once in some hundred times Ctrl-C came while readline showed a key, and it then waited for the next one.

    `interrupt_main` makes that moment: Python knows of the signal, and nothing wakes what waits.
    """
    program = """
import _thread, threading
from halfbyte.commands.chat_input import Input
from halfbyte.commands.interrupts import interrupts
with interrupts():
    threading.Timer(0.3, _thread.interrupt_main).start()
    try:
        Input(interactive=True).message()
    except KeyboardInterrupt:
        print("noticed")
"""
    person = Terminal("-c", program, XDG_STATE_HOME=str(tmp_path))
    try:
        person.expect("noticed")
        assert person.status() == 0
    finally:
        person.close()


def test_an_interrupt_that_is_ignored_stays_so(interruptible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts():
        os.kill(os.getpid(), signal.SIGINT)


def test_commands_also_run_in_threads(capsys):
    """Which get no signals."""
    found = []
    thread = threading.Thread(target=lambda: found.append(main(["ops"])))
    thread.start()
    thread.join()
    assert found == [0] and "rms_norm" in capsys.readouterr().out


def test_an_interrupt_waits_for_the_compiler(interruptible):
    """One in the middle of Numba would leave the kernel unusable, and the next call would fail."""
    import numba

    @numba.njit(parallel=True)
    def kernel(x):
        total = 0.0
        for i in numba.prange(x.size):
            total += x[i] ** 1.5
        return total

    x = numpy.ones(10)
    thread = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    with interrupts(), pytest.raises(KeyboardInterrupt):
        thread.start()
        kernel(x)
        time.sleep(PATIENCE)
    assert len(kernel.signatures) == 1 and kernel(x) == 10 and sys.gettrace() is None


def test_a_history_is_bounded_and_never_in_the_way(tmp_path, monkeypatch):
    import readline

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(chat_input, "REMEMBERED", 3)
    readline.clear_history()
    history = chat_input.History(readline)
    for number in range(7):
        history.add(f"message {number}\nof two lines")
    readline.clear_history()
    chat_input.History(readline)
    kept = [readline.get_history_item(place + 1) for place in range(readline.get_current_history_length())]
    assert kept == [f"message {number}\nof two lines" for number in (4, 5, 6)]
    assert len(history.path.read_text().splitlines()) == 3
    history.path.write_bytes(b"\xff not JSON")
    chat_input.History(readline)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    chat_input.History(readline).add("lost")
    readline.clear_history()
