"""`halfbyte generate`, run as a user runs it: replies, JSON, pipes, refusals."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from halfbyte import progress
from halfbyte.cli import main
from halfbyte.commands import arguments

COMMAND = [sys.executable, "-m", "halfbyte", "generate"]
KEYS = [
    "text", "finish_reason", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "ttft_s",
    "peak_memory", "model", "device",
]  # fmt: skip


@pytest.fixture()
def ask(capsys, folder):
    """Status, standard output and standard error of a run on the tiny model."""

    def run(*options, model=folder):
        status = main(["generate", str(model), "--device", "cpu", *map(str, options)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture()
def answer(ask):
    """The JSON object of a run."""
    return lambda *options: json.loads(ask("--json", *options)[1])


def refused(capsys, *options, model="/nowhere"):
    """What a refusal says; nothing was loaded, as there is no such model."""
    with pytest.raises(SystemExit) as exit:
        main(["generate", str(model), *map(str, options)])
    assert exit.value.code == 2
    return capsys.readouterr().err.splitlines()[0]


def test_a_reply_in_three_ways(ask, folder):
    status, text, said = ask("-p", "The quick", "-m", 6)
    assert status == 0 and text.strip() and all(word in said for word in ("tok/s", "first token", "peak memory"))
    assert ask("-p", "The quick", "-n", 6, "--no-stream")[1] == text
    values = json.loads(ask("-p", "The quick", "--max-tokens", 6, "--json")[1])
    assert list(values) == KEYS
    assert values["text"] == text[:-1] and values["finish_reason"] == "length" and values["generation_tokens"] == 6
    assert values["model"] == str(folder) and values["device"] == "cpu"
    assert min(values[key] for key in ("prompt_tps", "generation_tps", "ttft_s", "peak_memory")) > 0


def test_the_model_may_be_left_out(monkeypatch, folder, capsys):
    monkeypatch.setattr(arguments, "DEFAULT_MODEL", str(folder))
    assert main(["generate", "-p", "Oslo", "-m", "2", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(folder)


def test_the_same_seed_draws_the_same_reply(answer):
    hot = ("-p", "Oslo", "-m", 12, "--temp", 2.0, "--top-k", 200, "--top-p", 0.99, "--min-p", 0.001)
    first = answer(*hot, "--seed", 1)
    assert first["text"] == answer(*hot, "--seed", 1)["text"] != answer(*hot, "--seed", 2)["text"]
    penalties = ("--repetition-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.5)
    assert answer(*hot, "--seed", 1, *penalties)["text"] != first["text"]


def test_what_the_template_is_given(answer):
    given = ("-p", "Oslo", "-m", 3)
    thinking = ("--chat-template-args", '{"enable_thinking": true}')
    ways = [("--ignore-chat-template",), (), thinking, ("--system-prompt", "Be brief.")]
    sizes = [answer(*given, *way)["prompt_tokens"] for way in ways]
    assert sizes == sorted(set(sizes))
    assert answer(*given, "--chat-template-config", thinking[1])["prompt_tokens"] == sizes[2]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_system_prompt_goes_with_a_template(capsys, monkeypatch, folder, tmp_path, command):
    """An empty one is none; nothing is dropped without a word."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, read=lambda: "Hi", readline=lambda: ""))
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("")
    for options, said in (([], "which --ignore-chat-template forgoes"), ([str(model)], f"which {model} lacks")):
        flag = [] if options else ["--ignore-chat-template"]
        with pytest.raises(SystemExit) as exit:
            main([command, *options, *flag, "--device", "cpu", "--system-prompt", "Be brief."])
        assert exit.value.code == 2 and f"--system-prompt: goes with a chat template, {said}" in capsys.readouterr().err
    assert main([command, str(model), "--device", "cpu", "-m", "2"]) == 0


def test_a_reply_ends_before_a_stop_string(answer):
    whole = answer("-p", "Oslo", "-m", 20)["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut = answer("-p", "Oslo", "-m", 20, "--stop", stop, "--stop", "never in it")
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize("options", [("-p", "-"), ()], ids=["asked", "piped"])
def test_a_prompt_from_a_pipe(answer, monkeypatch, options):
    """The newline that `echo` adds is not the prompt's."""
    raw = ("-m", 4, "--ignore-chat-template")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The quick\n"))
    assert answer(*raw, *options)["text"] == answer(*raw, "-p", "The quick")["text"]


def test_threads_and_steps_do_not_change_a_reply(answer):
    import torch

    from halfbyte.machine import use_threads

    most = torch.get_num_threads()
    try:
        one = answer("-p", "The quick brown fox", "-m", 6, "-t", 1, "--prefill-step-size", 4)
        assert torch.get_num_threads() == 1
    finally:
        use_threads(most)
    assert one["text"] == answer("-p", "The quick brown fox", "-m", 6)["text"]


def test_it_goes_on_from_a_prompt_cache(answer, capsys, folder, tmp_path):
    state = tmp_path / "state"
    options = ("--ignore-chat-template", "--prompt-cache-file", state)
    first = answer("-p", "The quick", "-m", 9, *options)
    kept = state.read_bytes()
    for text in ("The quick", "The quick brown fox", "The quick red fox"):
        again = answer("-p", text, "-m", 4, *options)
        assert again["prompt_tokens"] <= len(text) - len("The quick") + 1 < first["prompt_tokens"] + len(text)
        assert answer("-p", text, "-m", 4, options[0])["text"] == again["text"]
        assert state.read_bytes() == kept, "what other texts begin with stays"
    said = refused(capsys, "-p", "Another text", *options, "--device", "cpu", model=folder)
    assert "another text" in said and "Name another file" in said


def test_the_same_message_goes_on_from_its_state(capsys, tmp_path):
    """With a template, tokens of its own come behind the message; the reply is no part of what is kept."""

    def answer(file, *more):
        text = ("-p", "Tell me a story about a fox.", "-m", "12", "--temp", "0", "--device", "cpu", "--json", *more)
        assert main(["generate", "tiny", *text, "--prompt-cache-file", str(tmp_path / file)]) == 0
        return json.loads(capsys.readouterr().out)

    for file, more in enumerate([(), ("--repetition-penalty", "4"), ("--prefill-step-size", "10000")]):
        first, again = answer(str(file), *more), answer(str(file), *more)
        assert first["text"] == again["text"] and (first["prompt_tokens"] > 9) and again["prompt_tokens"] == 1


def test_a_reader_that_has_seen_enough(folder):
    """`... | head -1` (row 68): the command ends, quietly."""
    options = ["-p", "The quick", "-m", "2000", "--device", "cpu"]
    with subprocess.Popen([*COMMAND, str(folder), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode in (0, 141) and said == b""


def test_an_interrupt_is_quiet(folder):
    command = [*COMMAND, str(folder), "-p", "The quick", "-m", "2000", "--device", "cpu"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where these tests run in the background
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listens) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and said == b""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.quiet
def test_progress_on_a_terminal_is_taken_away_again(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    progress.passing("")
    quick = progress.bar("loading")
    quick(50, 100)
    quick(100, 100)
    assert screen.getvalue() == ""
    slow = progress.prompt_progress()
    slow(0, 4000)
    assert screen.getvalue().endswith("] reading the prompt   0% of 4000 tokens")
    slow(1000, 4000)
    time.sleep(progress.REDRAW_EVERY)
    slow(3000, 4000)
    assert screen.getvalue().count("\r") == 2 and "[██████████████████······]" in screen.getvalue()
    slow(4000, 4000)
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.quiet
def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.05)
    shown = progress.bar("loading")
    for done in range(0, 1000, 100):
        shown(done * 1000, 1_000_000)
        time.sleep(0.01)
    lines = sys.stderr.getvalue().splitlines()
    assert 1 <= len(lines) <= 3 and all(line.startswith("loading ") and "of 1.0 MB, " in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        ("--temp", "nan"), ("--temp", "-1"), ("--top-p", "0"), ("--top-k", "-5"), ("-m", "0"), ("-m", "many"),
        ("--chat-template-args", "["), ("--chat-template-args", "3"), ("--chat-template-args", "[" * 100_000),
        ("--repetition-penalty", "inf"), ("--seed", str(2**70)), ("--stop", ""), ("--stop", "x" * 2000),
        ("--prefill-step-size", "0"), ("--threads", "0"), ("--threads", "100000"), ("--device", "tpu"),
        ("--ignore-chat-template", "--system-prompt", "Be brief."), ("-p", " \n"),
    ],
    ids=lambda options: " ".join(options)[:40],
)  # fmt: skip
def test_it_refuses_before_it_loads(capsys, options):
    assert "error: " in refused(capsys, "-p", "x", *options)


def test_it_says_where_a_prompt_could_come_from(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "-p TEXT" in refused(capsys) and "halfbyte chat" in refused(capsys)


def test_a_device_that_is_not_there(capsys, folder):
    import torch

    absent = next(name for name in ("mps", "cuda") if not getattr(torch, name).is_available())
    assert "halfbyte doctor" in refused(capsys, "-p", "x", "--device", absent, model=folder)


def test_a_prompt_longer_than_the_context(capsys, folder):
    assert "takes 1 to 4095" in refused(capsys, "-p", "Q7" * 4000, "--device", "cpu", model=folder)


def test_exit_codes_of_the_model_and_the_machine(ask, folder, tmp_path, monkeypatch):
    assert ask("-p", "x", model=tmp_path / "absent")[0] == 3
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "absent" / "state", tmp_path, tmp_path / "pipe", "/dev/zero"):
        status, reply, said = ask("-p", "x", "-m", 1, "--prompt-cache-file", place)
        assert (status, reply) == (5, "") and "no prompt cache can be written there" in said, "before it is computed"
    monkeypatch.setattr("halfbyte.memory.available", lambda device: 1000)
    status, _, said = ask("-p", "x")
    assert status == 4 and "Free as much" in said


PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("given", ["json", "file"])
def test_a_reply_follows_a_schema(answer, tmp_path, given):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(PERSON), encoding="utf-8")
    for seed in range(3):
        reply = answer(
            "-p", "Who?", "-m", 200, "--temp", 1.5, "--seed", seed, "--json-schema",
            path if given == "file" else json.dumps(PERSON),
        )  # fmt: skip
        person = json.loads(reply["text"])
        assert reply["finish_reason"] == "stop" and set(person) == {"name", "age"} and person["age"] in (1, 2, 3)
        assert len(person["name"]) <= 6


def test_a_schema_begins_after_the_reasoning(folder):
    """While the model thinks its words are free; the first token behind the marker is the form's first."""
    from halfbyte.chat import Tokenizer
    from halfbyte.grammar import Follower, Grammars
    from halfbyte.text.reply import THINK

    tokenizer = Tokenizer.open(folder)
    size = tokenizer.vocab_size
    prompt = tokenizer.encode(f"{THINK[0]}\n", special=True)
    follow = Follower(Grammars(tokenizer, size).constraint("json_schema", json.dumps(PERSON)), tokenizer, prompt)
    logits = torch.zeros(1, size)
    assert follow(torch.tensor(prompt), logits).isfinite().all()
    prompt += tokenizer.encode("Hm")
    assert follow(torch.tensor(prompt), logits).isfinite().all()
    prompt += tokenizer.encode(THINK[1], special=True)
    allowed = follow(torch.tensor(prompt), logits)[0].isfinite().nonzero()[:, 0].tolist()
    assert allowed and all(tokenizer.decode([id]).startswith("{") for id in allowed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/nowhere/schema.json", "No such file"),
        ("{", "Expecting property name"),
        ('{"type": "strin"}', "strin"),
        ('{"oneOf": [{"type": "string"}, {"minLength": 1}]}', "Use anyOf."),
        ('{"type": "string", "pattern": "^[^\\\\s\\\\S]$"}', "Regex is empty:  (/^"),
        ('{"$ref": "http://127.0.0.1:9/x.json"}', "http://127.0.0.1:9/x.json"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_loaded(capsys, given, said):
    error = refused(capsys, "-p", "x", "--json-schema", given)
    assert "argument --json-schema: " in error and said in error


def test_the_extra_of_schemas_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install llguidance" in refused(capsys, "-p", "x", "--json-schema", "{}")
