"""Every limit of the server is a flag, and does what it says: one server process with small ones."""

import json
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import CHAT, COMPLETIONS, ROOT, error, serving

from halfbyte.cli import parser
from halfbyte.server.settings import Settings

SMALL = {
    "max_body_mb": 0.02, "max_json_depth": 8, "max_header_kb": 4, "max_headers": 20, "max_tokens_default": 3,
    "max_n": 2, "max_tools": 1, "max_schema_kb": 1, "max_messages": 2, "max_parts": 1, "max_items": 4,
    "max_concurrency": 2, "max_context": 400, "max_connections": 6, "prompt_cache_bytes": 0, "max_top_logprobs": 2,
    "max_stop": 2, "max_stop_bytes": 4, "max_logit_bias": 2,
}  # fmt: skip
# Those of time and lines are held in test_server_faults.py and test_server_load.py, or by servers of their own below.
ELSEWHERE = {
    "max_queue", "header_seconds", "schema_seconds", "stream_buffer_kb", "slow_reader_seconds", "ping_seconds",
    "step_seconds", "drain_seconds", "template_seconds", "template_mb", "template_output_mb",
}  # fmt: skip
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": ""}
CALLS = {"role": "assistant", "content": [PART], "tool_calls": [{"function": {"name": "f"}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [PART]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


def test_every_setting_is_a_flag_and_has_a_test():
    assert {name for name, *_ in Settings.flags()} == SMALL.keys() | ELSEWHERE
    args = parser().parse_args(["serve"])
    assert Settings(**{name: getattr(args, name) for name, *_ in Settings.flags()}) == Settings()


@pytest.mark.parametrize("setting", Settings.flags(), ids=lambda setting: setting[0])
def test_no_limit_can_be_nonsense(setting, capsys):
    """It is refused before anything is loaded, in a sentence."""
    name, kind, _, _, _, least = setting
    flag = f"--{name.replace('_', '-')}"
    for value in (least - 1, 10**30, "x", *(() if kind is int else ("nan", "inf", *([0] if least else [])))):
        with pytest.raises(SystemExit) as stopped:
            parser().parse_args(["serve", f"{flag}={value}"])
        assert stopped.value.code == 2 and f"argument {flag}: " in capsys.readouterr().err
    assert getattr(parser().parse_args(["serve", f"{flag}={least}"]), name) == least


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [HI] * 3}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}, "messages[0].content"),
        ({"messages": [CALLS, CALLS]}, "messages"),
        ({"messages": [HI], "tools": [TOOL] * 2}, "tools"),
        ({"messages": [HI], "tools": [{**TOOL, "description": "x" * 1000}]}, "tools[0]"),
        ({"messages": [HI], "grammar": "x" * 1001}, "grammar"),
        ({"messages": [HI], "n": 3}, "n"),
        ({"messages": [{**HI, "content": [[[[[[[1]]]]]]]}]}, None),
        ({"messages": [HI], "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [HI], "stop": ["a", "b", "c"]}, "stop"),
        ({"messages": [HI], "stop": "abcde"}, "stop"),
        ({"messages": [HI], "logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
    ],
    ids=["messages", "parts", "items", "tools", "tool", "grammar", "n", "depth", "logprobs", "stops", "stop", "bias"],
)  # fmt: skip
def test_small_limits_of_requests(server, body, param):
    response = server.post(CHAT, body)
    assert response.status_code == 400 and error(response)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [CALLS, CALLS]}),
        ("/tokenize", {"messages": [CALLS, CALLS]}),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [PART], "content": [PART]}] * 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT]}] * 2}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [RESULT]}] * 2}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_small_limits_of_what_is_in_messages(server, path, body):
    """Each message may have as many, and all together may not."""
    response = server.post(path, {"max_tokens": 1} | body)
    assert response.status_code == 400 and "at most 4 messages, parts and calls" in response.json()["error"]["message"]
    few = {name: items[:1] for name, items in body.items()}
    assert "and calls" not in server.post(path, {"max_tokens": 1} | few).text


def test_small_limits_of_size(server):
    assert server.http.post(CHAT, content=json.dumps({"messages": [HI], "user": "x" * 20_000})).status_code == 413
    text = "word " * 1300  # of bytes: 16 for each token of the context
    assert server.post(COMPLETIONS, {"prompt": text}).status_code == 413
    assert error(server.post(COMPLETIONS, {"prompt": [5] * 400}))["code"] == "context_length_exceeded"
    lines = {f"x-{i}": "1" for i in range(20)}
    assert server.http.get("/health", headers=lines).status_code == 431
    assert b" 431 " in server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000, 5)[:20]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{**HI, "content": "a b " * 300}]}, "messages"),
        (COMPLETIONS, {"prompt": "a b " * 300}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 400}, "prompt"),
        ("/v1/responses", {"input": "a b " * 300}, "input"),
    ],
    ids=["messages", "prompt", "ids", "input"],
)
def test_a_prompt_without_room_is_called_by_its_name(server, path, body, param):
    response = server.post(path, body)
    found = error(response)
    assert (response.status_code, found["code"], found["param"]) == (400, "context_length_exceeded", param)


def test_a_reply_has_its_default_length(server):
    body = {"messages": [HI], "logit_bias": {"0": -100, "2": -100}}
    assert server.post(CHAT, body).json()["usage"]["completion_tokens"] == 3


def test_no_cache_keeps_nothing(server):
    body = {"prompt": [7] * 300, "max_tokens": 1}
    cached = [
        server.post(COMPLETIONS, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)
    ]
    assert cached == [0, 0] and server.metric("prefix_cache_bytes") == 0


def test_limits_may_be_larger_than_by_default(tmp_path):
    """What is within a limit is taken, however far that is raised."""
    more = {"max_top_logprobs": 30, "max_stop": 40, "max_stop_bytes": 3000, "max_logit_bias": 2000}
    wish = {
        "logprobs": True, "top_logprobs": 30, "stop": [f"{i} {'x' * 2000}" for i in range(40)],
        "logit_bias": {str(i): 0.5 for i in range(2000)}, "messages": [HI], "max_tokens": 2,
    }  # fmt: skip
    with serving(tmp_path, *(f"--{name.replace('_', '-')}={value}" for name, value in more.items())) as server:
        response = server.post(CHAT, wish)
        assert response.status_code == 200
        assert len(response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 30


GREEDY = {
    "template_seconds": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        0.3,
        "0.3 s",
    ),
    "template_mb": ("{{ ('a' * 40000000) | length }}", 8, "memory"),
    "template_output_mb": ("{{ 'a' * 2000000 }}", 1, "more than 1 MB"),
}


@pytest.mark.quiet
@pytest.mark.parametrize("name", GREEDY)
def test_limits_of_templates(tmp_path, name):
    """A template that takes more than it may is stopped; with the limit as it is by default, this one is not slow."""
    template, most, said = GREEDY[name]
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "halfbyte" / "tiny", folder)
    (folder / "chat_template.jinja").write_text(template)
    with serving(tmp_path, f"--{name.replace('_', '-')}={most}", model=folder) as server:
        start = time.monotonic()
        response = server.post(CHAT, {"messages": [HI], "max_tokens": 1})
        assert response.status_code == 400 and error(response)["code"] == "template_failed"
        assert re.search(said, error(response)["message"]) and time.monotonic() - start < 2


def test_a_schema_has_its_time(tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(range(9000))}}}
    with serving(tmp_path, "--schema-seconds", "0.00001") as server:
        response = server.post(CHAT, {"messages": [HI], "response_format": form})
        assert response.status_code == 400 and "it takes longer than 1e-05 s" in error(response)["message"]
        assert server.post(CHAT, {"messages": [HI], "max_tokens": 1}).status_code == 200


SLOW = """
import time, llguidance
def late(seconds, call):
    return lambda *args, **more: (time.sleep(seconds), call(*args, **more))[1]
llguidance.LLTokenizer = late(1, llguidance.LLTokenizer)
llguidance.LLMatcher.grammar_from_json_schema = late(0.2, llguidance.LLMatcher.grammar_from_json_schema)
"""


def test_a_schema_has_its_time_for_itself(tmp_path):
    """That in which others' schemas are compiled is not counted, nor what the first one has to wait for."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    with serving(tmp_path, "--schema-seconds", "0.8", faults=SLOW) as server, ThreadPoolExecutor(60) as pool:
        wishes = [{"response_format": form} if number % 2 else {"tools": [tool]} for number in range(60)]
        asked = [pool.submit(server.post, CHAT, {"messages": [HI], "max_tokens": 1, **wish}) for wish in wishes]
        assert [one.result().status_code for one in asked] == [200] * 60


def test_a_reply_that_nobody_reads_has_its_buffer(tmp_path):
    """Long before the reader's time is over."""
    go_on = {"max_tokens": 5000, "stream": True, "logprobs": 20, "logit_bias": {"0": -100, "2": -100}}
    body = json.dumps({"prompt": [5, 6], "n": 8, **go_on}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    flags = ("--stream-buffer-kb", "2", "--slow-reader-seconds", "1000")
    with serving(tmp_path, *flags) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head.encode() + body)
        deadline = time.monotonic() + 60
        while not server.metric('aborts_total{reason="slow_reader"}') and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.metric('aborts_total{reason="slow_reader"}') and server.idle(5)


def test_too_many_connections(server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
    answer = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 5)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 503 " in head[:20] and b"retry-after: " in head.lower() and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    for sock in idle:
        sock.close()


def test_a_server_without_a_queue(tmp_path):
    """It is ready while a slot is free; what asks for more than can ever be free is refused for good."""
    endless = {"messages": [HI], "n": 2, "max_tokens": 2000, "stream": True, "logit_bias": {"0": -100, "2": -100}}
    with serving(tmp_path, "--max-queue", "0", "--max-concurrency", "2") as server:
        assert server.http.get("/ready").status_code == 200
        assert len(server.post(CHAT, {"messages": [HI], "n": 2, "max_tokens": 2}).json()["choices"]) == 2
        for path, body, param in [
            (CHAT, {"messages": [HI], "n": 4}, "n"), (COMPLETIONS, {"prompt": "a", "n": 3}, "n"),
            (COMPLETIONS, {"prompt": ["a", "b", "c"]}, "prompt"),
        ]:  # fmt: skip
            response = server.post(path, {**body, "max_tokens": 2})
            assert response.status_code == 400 and "retry-after" not in response.headers
            assert error(response)["param"] == param and "2 replies" in error(response)["message"]
        with server.http.stream("POST", CHAT, json=endless) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"index":1' in line)  # both replies have begun
            assert server.http.get("/ready").json() == {"status": "the queue is full"}
            assert server.chat("Hi").status_code == 429
        assert server.idle() and server.http.get("/ready").status_code == 200
