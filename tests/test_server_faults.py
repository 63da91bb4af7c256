"""Bad input, bad clients and bad luck, against a real server process: the rows of the fault list, by number."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from serving import CHAT, COMPLETIONS, ROOT, Server, error, events, serving

from halfbyte.server.app import OPERATIONS

KEY = "key-of-the-tests"
LONG = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 4000, "stream": True,
        "logit_bias": {"0": -100, "2": -100}}  # fmt: skip
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--header-seconds", "2", "--ping-seconds", "0.2", "--max-concurrency", "8", "--slow-reader-seconds", "1")
    with serving(tmp_path_factory.mktemp("server"), *flags, key=KEY) as running:
        yield running
        assert running.metric("engine_up") == 1


def well(server):
    """It still answers, and nothing is stuck in it."""
    assert server.idle()
    assert server.chat("Hello", 3).json()["usage"]["completion_tokens"] == 3


def refused(server, body, path=CHAT, status=400):
    response = server.post(path, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | body)
    assert response.status_code == status, response.text
    return error(response)


def latency(server, until):
    """The longest that /health took while something else goes on."""
    longest = 0.0
    while not until.is_set():
        start = time.monotonic()
        assert server.http.get("/health").status_code == 200
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.01)
    return longest


@pytest.mark.quiet
def test_row_31_a_million_tokens_are_refused_by_their_bytes(server):
    """And nobody else waits for that: of three tries, the one that other work on the machine disturbed least."""
    text, longest = "word " * 800_000, []
    for _ in range(3):
        ended = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            watched = pool.submit(latency, server, ended)
            said = refused(server, {"messages": [{"role": "user", "content": text}]}, status=413)
            assert said["code"] == "prompt_too_long"
            assert refused(server, {"prompt": text}, COMPLETIONS, 413)["code"] == "prompt_too_long"
            ended.set()
            longest.append(watched.result())
    assert min(longest) < 0.2
    well(server)


WORDS = json.dumps({"a": "word " * 600_000})
CALLED = [{"id": "c1", "function": {"name": "f", "arguments": WORDS}}]
FUNCTIONS = [{"name": f"f{i}", "description": "word " * 10_000} for i in range(64)]  # 50 KB each, as a tool may have
NUMBERED = {"name": "f", "parameters": {"enum": [*range(5000)]}}
ASKED = {"role": "user", "content": "Hi"}
BEYOND = {
    "chat, calls": (CHAT, {"messages": [ASKED, {"role": "assistant", "tool_calls": CALLED}, ASKED]}),
    "chat, calls with objects": (CHAT, {"messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.loads(WORDS)}}]}, ASKED]}),
    "chat, tools": (CHAT, {"tools": [{"type": "function", "function": one} for one in FUNCTIONS]}),
    "chat, tools of numbers": (CHAT, {"tools": [{"type": "function", "function": NUMBERED}] * 10}),
    "completions": (COMPLETIONS, {"prompt": ["Hi", WORDS]}),
    "tokenize": ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": CALLED}, ASKED]}),
    "responses, calls": ("/v1/responses", {"input": [
        ASKED, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": WORDS}]}),
    "responses, tools": ("/v1/responses", {
        "input": "Hi", "tools": [{"type": "function", **one} for one in FUNCTIONS]}),
    **{f"{path}, {name}": (path, body) for path in ("/v1/messages", "/v1/messages/count_tokens") for name, body in {
        "calls": {"messages": [ASKED, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "f", "input": json.loads(WORDS)}]}, ASKED]},
        "tools": {"messages": [ASKED], "tools": [
            {"name": one["name"], "input_schema": {"description": one["description"]}} for one in FUNCTIONS]},
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BEYOND.values(), ids=BEYOND)
def test_a_prompt_beyond_the_context_is_refused_by_its_bytes_wherever_they_stand(server, path, body):
    """In calls and in tools too, which templates write."""
    response = server.post(path, {"messages": [ASKED], "max_tokens": 2} | body)
    assert response.status_code == 413 and "no prompt of this model has" in response.json()["error"]["message"]
    well(server)


EMPTY = [{"type": "text", "text": ""}] * 256
MANY = {
    "calls": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 127}] * 1400,
    "parts": [{"role": "user", "content": EMPTY}] * 1000,
}


@pytest.mark.quiet
@pytest.mark.parametrize("name", MANY)
def test_many_empty_items_are_refused_by_their_number(server, name):
    """At once, and nobody else waits for that: of three tries, the best one."""
    body, took, longest = json.dumps({"messages": MANY[name]}), [], []
    for _ in range(3):
        ended = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            watched = pool.submit(latency, server, ended)
            start = time.monotonic()
            response = server.http.post(CHAT, content=body)
            took.append(time.monotonic() - start)
            ended.set()
            longest.append(watched.result())
        assert response.status_code == 400 and "at most 8192 messages, parts and" in error(response)["message"]
    assert min(took) < 3 and min(longest) < 0.5
    well(server)


def test_row_32_a_prompt_beyond_the_context(server):
    text = "I want a story about foxes and hens. " * 1000
    assert refused(server, {"messages": [{"role": "user", "content": text}]})["code"] == "context_length_exceeded"
    assert refused(server, {"prompt": [5] * 8192}, COMPLETIONS)["code"] == "context_length_exceeded"
    response = server.post(
        COMPLETIONS, {"prompt": [5] * 8190, "max_tokens": 100_000, "logit_bias": {"0": -100, "2": -100}}
    )
    assert response.json()["usage"] == {
        "prompt_tokens": 8190, "completion_tokens": 2, "total_tokens": 8192,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


NESTED = [1]
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "prompt",
    ["", [], [-1], [3072], [1.5], [[]], [[1], "a", [2.5]], NESTED, None, 5, {"a": 1}, [True], [1, "a"]],
    ids=repr,
)
def test_row_33_prompts_that_are_none(server, prompt):
    assert refused(server, {"prompt": prompt}, COMPLETIONS)["param"] == "prompt"


IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", [{}], [{"role": "king"}], [1], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [IMAGE]}],
    ],
    ids=repr,
)  # fmt: skip
def test_row_33_messages_that_are_none(server, messages):
    assert refused(server, {"messages": messages})["param"].startswith("messages")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-1, 1e308, "hot", True, 5.1)],
        *[("top_p", value) for value in (0, 2, -0.1, 5e-324)],
        ("repetition_penalty", 5e-324), ("top_k", 1 << 40), ("min_p", 2), ("n", 0), ("n", 1_000_000),
        *[("top_logprobs", value) for value in (1_000_000_000, -1, 21)], ("seed", 1 << 63), ("seed", 1.5),
        *[("presence_penalty", value) for value in (3, -3)], ("repetition_penalty", 0), ("frequency_penalty", 2.1),
        *[("max_tokens", value) for value in (0, -1, 1 << 40, 1.5, "8")], ("stream", "yes"), ("logit_bias", {"x": 1}),
        ("logit_bias", {"99999": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("stream_options", 5), ("response_format", {"type": "xml"}),
        ("tool_choice", "maybe"), ("reasoning_effort", "enormous"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_row_34_numbers_out_of_range(server, name, value):
    assert refused(server, {name: value})["param"].split(".")[0] == name


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 60])
@pytest.mark.parametrize("name", ["temperature", "frequency_penalty", "seed", "top_p", "max_tokens"])
def test_row_34_numbers_that_are_none(server, name, number):
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{name}": {number}}}'
    response = server.http.post(CHAT, content=body)
    assert response.status_code == 400 and error(response)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_row_34_not_even_where_nobody_reads_them(server, number):
    """An answer may repeat what it was asked, and JSON cannot write these."""
    body = f'{{"input": "Hi", "max_output_tokens": 1, "metadata": {{"a": {number}}}}}'
    response = server.http.post("/v1/responses", content=body)
    assert response.status_code == 400 and error(response)["code"] == "invalid_json"


STOPS = {
    "many": ["a"] * 500_000, "empty": "", "one empty": [""], "long": ["x" * 1025], "very long": "x" * 1_000_000,
    "a number in it": [5], "a number": 7, "17": ["a"] * 17,
}  # fmt: skip


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_row_35_stop_strings(server, stop):
    assert refused(server, {"stop": stop})["param"] == "stop"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"messages": [], "messages": []}', 400),
        (b'{"seed": ' + b"9" * 100_000 + b"}", 400),
        ('{"a": "ü"}'.encode("latin-1"), 400),
        ('{"a": 1}'.encode("utf-16"), 400),
        (b"", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"\x00" * 1000, 400),
        (json.dumps({"a": "x" * 9_000_000}).encode(), 413),
    ],
    ids=["depth", "objects", "twice", "huge integer", "latin-1", "utf-16", "empty", "null", "text", "zeros", "9 MB"],
)
def test_row_36_bodies(server, body, status):
    response = server.http.post(CHAT, content=body)
    assert response.status_code == status and error(response)


@pytest.mark.timed
def test_row_36_a_body_without_end_and_one_that_lies(server):
    before = server.memory()
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    answer = server.raw(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 400)  # 26 MB
    assert answer.startswith(b"HTTP/1.1 413") or answer == b""  # closed while we were still sending
    assert b" 413 " in server.raw(f"{HEAD}Content-Length: 100000000000\r\n\r\n".encode() + b"{", 5)
    start = time.monotonic()
    assert b" 408 " in server.raw(f"{HEAD}Content-Length: 1000\r\n\r\n".encode() + b"{", 8)
    assert time.monotonic() - start < 5
    assert server.memory() - before < 60e6
    well(server)


def nest(depth, inner, wrap):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


BOMBS = {
    "remote ref": {"$ref": "http://127.0.0.1:9/schema.json"},
    "file ref": {"$ref": "file:///etc/passwd"},
    "no such ref": {"$ref": "#/$defs/none"},
    "nested ref loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "bad type": {"type": "strin"},
    "bad pattern": {"type": "string", "pattern": "(((("},
    "too large": {"enum": [f"value number {i}" for i in range(20_000)]},
    "too deep": nest(70, {"type": "string"}, lambda inner: {"type": "array", "items": inner}),
}
HEAVY = {  # these may be followed or refused, as long as it is soon
    "deep": nest(28, {"type": "string"}, lambda inner: {"type": "array", "items": inner}),
    "minItems": {"type": "array", "minItems": 1_000_000_000},
    "enum": {"enum": list(range(9_000))},
    "allOf": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"minimum": j}}} for j in range(5)]} for i in range(8)]},
    "redos": {"type": "string", "pattern": "^(a+)+$|^((a|b)*c){1,50}$"},
    "repeat": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "all at once": {"allOf": [{"type": "string", "pattern": f"^.*{i}.{{1,{i}}}x$"} for i in range(1, 600)]},
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize("name", BOMBS)
def test_row_37_schemas_that_cannot_be_followed(server, name):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMBS[name]}}
    start = time.monotonic()
    assert refused(server, {"response_format": form})
    assert time.monotonic() - start < 4
    well(server)


@pytest.mark.timed
@pytest.mark.parametrize("name", HEAVY)
def test_row_37_schema_bombs_end_soon(server, name):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": HEAVY[name]}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "response_format": form}
    start = time.monotonic()
    response = server.post(CHAT, body)
    assert response.status_code in (200, 400) and time.monotonic() - start < 8
    well(server)


@pytest.mark.parametrize(
    "grammar", ["start: a\na: a a | a", "start: /((((/", "nonsense", 'root ::= "x" root', "x" * 70_000]
)
def test_row_37_grammars(server, grammar):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "grammar": grammar}
    response = server.post(CHAT, body)
    assert response.status_code in (200, 400) and "NoExtension" not in response.text
    assert "a: a" not in grammar or "no reply can follow it" in error(response)["message"]
    well(server)


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(((("}}}},
        {"name": "f", "parameters": {"type": "nonsense"}},
        {"name": "f", "parameters": []},
        {"name": ""},
        {"name": "a b"},
        {"name": "f" * 65},
        {},
        None,
        {"name": "f", "description": "x" * 70_000},
    ],
    ids=range(9),
)
def test_row_38_tools(server, function):
    assert refused(server, {"tools": [{"type": "function", "function": function}]})
    well(server)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}}, {"type": "object", "propertyNames": {"type": "string"}}, {"format": "color"},
        {"type": "array", "uniqueItems": True}, {"if": {"const": 1}, "then": {"const": 1}},
        {"type": "string", "pattern": "^(?!x)[a-z]+$"}, {"type": "object", "unevaluatedProperties": False},
    ],
    ids=lambda schema: next(reversed(schema)),
)  # fmt: skip
def test_row_38_a_tool_may_have_a_schema_that_no_reply_can_be_held_to(server, schema):
    """As long as nobody insists on its call: the model reads it, that is all."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    response = server.post(CHAT, {**body, "tools": [{"type": "function", "function": function}]})
    assert response.status_code == 200, response.text
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert error(server.post(CHAT, {**body, "response_format": form}))["code"] == "invalid_schema"


@pytest.mark.timed
def test_row_38_tools_whose_schemas_would_compile_for_ever(server):
    """Nobody else waits for them, they leave nothing behind, and they are refused one after another."""
    tool = {"type": "function", "function": {"name": "f", "parameters": HEAVY["all at once"]}}
    before = server.memory()
    with ThreadPoolExecutor(6) as pool:
        hostile = [pool.submit(refused, server, {"tools": [tool]}) for _ in range(6)]
        for _ in range(5):
            start = time.monotonic()
            well(server)
            assert time.monotonic() - start < 2
        said = [one.result() for one in hostile]
    assert {one["param"] for one in said} == {"tools"} and {one["code"] for one in said} == {"invalid_schema"}
    assert server.memory() - before < 50e6


def test_row_38_too_many_tools(server):
    assert refused(server, {"tools": [{"type": "function", "function": {"name": "f"}}] * 129})["param"] == "tools"


ROUTES = [
    *[(one.method, one.path.replace("{name:path}", "tiny")) for one in OPERATIONS if one.path != "/health"],
    ("GET", "/nothing"), ("OPTIONS", CHAT),
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_row_39_every_route_but_health_asks_for_the_key(server, route):
    method, path = route
    for headers in (
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"}, {"x-api-key": KEY + "x"}, {"Authorization": f"Bearer {'x' * 50_000}"},
    ):  # fmt: skip
        response = httpx2.request(method, server.address + path, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    for headers in ({"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        assert httpx2.request(method, server.address + path, headers=headers).status_code != 401


def test_row_39_health_is_open_and_says_little(server):
    assert httpx2.get(f"{server.address}/health").json() == {"status": "ok"}


TARGETS = [
    "//v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models", "/v1/models?/health", "/v1/models#/health",
    "http://localhost/v1/models", "/health%2f..%2fv1%2fmodels", "/./v1/models", "/health;/v1/models",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", ["localhost", "localhost/health?", "127.0.0.1:1/health#"])
def test_row_40_no_way_around_the_key(server, target, host):
    answer = server.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), 5)
    assert (
        answer[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 404", b"HTTP/1.1 400") and b'"data"' not in answer
    )


def test_row_41_other_origins_and_hosts(server):
    evil = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "POST", "GET"):
        response = server.http.request(method, CHAT, headers=evil)
        assert response.status_code == 403 and "access-control-allow-origin" not in response.headers
    rebound = server.http.get("/v1/models", headers={"Host": "rebound.example"})
    assert rebound.status_code == 403 and error(rebound)["code"] == "host_refused"
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "192.168.1.7:8080"):
        assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200
    own = {"Origin": server.address}
    assert server.http.get("/v1/models", headers=own).status_code == 200


def test_row_42_headers(server):
    before = server.memory()
    big = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 8_000_000 + b"\r\n\r\n", 5)
    assert big[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")
    lines = b"".join(b"X-%d: 1\r\n" % i for i in range(1000))
    many = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n", 5)
    assert many[:12] == b"HTTP/1.1 431"
    assert server.memory() - before < 40e6
    well(server)


CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        CHUNKED % CHAT.encode() + b"zz\r\n", CHUNKED % b"/health" + b"zz\r\n",
    ],
    ids=["text", "no host", "tls", "chunks", "chunks that nobody reads"],
)  # fmt: skip
def test_what_is_not_http_is_told_so(server, data):
    before = server.log.count("Traceback")
    head, _, body = server.raw(data, 5).partition(b"\r\n\r\n")
    assert b" 400 " in head[:20] and b'"invalid_http"' in body
    assert server.log.count("Traceback") == before
    well(server)


def test_nonsense_behind_an_answer_closes_the_connection(server):
    before = server.log.count("Traceback")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(CHUNKED % b"/nothing")
        answer = sock.recv(4096)
        while not answer.endswith(b"}}"):  # headers and body may come apart
            answer += sock.recv(4096)
        assert b" 401 " in answer[:20]
        sock.sendall(b"zz\r\n")
        assert sock.recv(4096) == b""
    assert server.log.count("Traceback") == before
    well(server)


@pytest.mark.timed
def test_row_43_a_body_in_drops_is_not_waited_for(server):
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode())
        sock.settimeout(0.2)
        while time.monotonic() - start < 8:
            sock.sendall(b" ")
            try:
                assert b" 408 " in sock.recv(4096)[:20]
                break
            except TimeoutError:
                continue
    assert time.monotonic() - start < 6
    well(server)


@pytest.mark.timed
def test_row_43_slow_clients_are_closed(server):
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    start = time.monotonic()
    for sock in socks:
        sock.sendall(b"GET /health HTT")
    assert server.http.get("/health").status_code == 200 and time.monotonic() - start < 3
    left, deadline = set(socks), start + 8
    while left and time.monotonic() < deadline:
        for sock in list(left):
            try:
                sock.send(b"x")
                sock.setblocking(False)
                if sock.recv(10) == b"":
                    left.discard(sock)
            except BlockingIOError:
                sock.setblocking(True)
            except OSError:
                left.discard(sock)
        time.sleep(0.2)
    assert not left
    for sock in socks:
        sock.close()


def abandon(server, body, after):
    """Send a request and go, before anything comes back or after so many bytes."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = 0
        while received < after:
            received += len(sock.recv(4096))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


SLOW_TEMPLATE = """
import time
from halfbyte.text import template
def late(*given, render=template.render):
    time.sleep(0.5)
    return render(*given)
template.render = late
"""


def asked(server, path):
    """A connection on which nothing has come back yet."""
    data = json.dumps({"messages": [ASKED], "max_tokens": 1}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.quiet
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/messages/count_tokens"])
def test_prompts_wait_in_a_line_of_their_own_which_clients_leave(tmp_path, path):
    """What needs a thread for something else has one, and prompts of clients that have gone are not made."""
    with serving(tmp_path, faults=SLOW_TEMPLATE) as server:
        server.chat("Hi", 1)
        waiting = [asked(server, path) for _ in range(100)]
        time.sleep(0.3)
        start = time.monotonic()
        assert server.metric("engine_up") == 1 and time.monotonic() - start < 0.4
        for sock in waiting:
            sock.close()
        assert server.chat("Hi", 1).status_code == 200 and time.monotonic() - start < 5


def test_no_more_prompts_wait_than_may(tmp_path):
    with serving(tmp_path, "--max-queue", "1", "--max-concurrency", "2", faults=SLOW_TEMPLATE) as server:
        waiting = [asked(server, "/tokenize") for _ in range(40)]
        heads = [sock.recv(4096) for sock in waiting]
        full = [head for head in heads if b" 429 " in head[:20]]
        assert len(full) >= 25 and all(b"retry-after: 1" in head.lower() for head in full)
        assert sum(b" 200 " in head[:20] for head in heads) == 40 - len(full) >= 3
        assert server.chat("Hi", 1).status_code == 200


def test_row_44_clients_that_go(server):
    """In the middle of a stream, while the prompt is read, while they wait in line."""
    prompt = [{"role": "user", "content": "A long story about the fox. " * 400}]
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(abandon, server, LONG, 600) for _ in range(12)]
        jobs += [pool.submit(abandon, server, {**LONG, "messages": prompt}, 0) for _ in range(4)]
        jobs += [pool.submit(abandon, server, LONG, 0) for _ in range(30)]
        for job in jobs:
            job.result()
    assert server.idle(2)
    assert server.http.get("/metrics").text.count('aborts_total{reason="disconnect"}') == 1
    well(server)


@pytest.mark.timed
def test_row_45_clients_that_go_without_a_stream(server):
    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(abandon, server, {**LONG, "stream": False}, 0) for _ in range(16)]:
            job.result()
    assert server.idle(2)
    well(server)


@pytest.mark.timed
def test_row_46_a_slow_reader_is_dropped(server):
    data = json.dumps({**LONG, "logprobs": True, "top_logprobs": 20, "n": 8}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    sock.recv(1)
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline and server.metric("requests_running"):
        assert server.http.get("/health").status_code == 200
        time.sleep(0.2)
    assert server.metric("requests_running") == 0 and time.monotonic() < deadline
    sock.close()
    well(server)


def test_row_49_another_key_shares_no_cache(tmp_path):
    with serving(tmp_path, "--api-key", "second", key=KEY) as server:
        text = "Tell me more about the fox and the hen. " * 30
        mine, theirs, again = (
            server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0},
                        headers={"Authorization": f"Bearer {key}"}).json()
            for key in (KEY, "second", KEY)
        )  # fmt: skip
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (mine, theirs, again)]
        assert cached[0] == cached[1] == 0 < cached[2]
        assert len({one["choices"][0]["message"]["content"] for one in (mine, theirs, again)}) == 1


FAILING = """
from halfbyte.engine import Engine
real = Engine._computed
def broken(self):
    if any(77 in one.prompt for one in self.running):
        raise RuntimeError("secret at 0xdeadbeef in /secret/path")
    return real(self)
Engine._computed = broken
"""
HANGING = """
import time
from halfbyte.engine import Engine
real = Engine.step
def hung(self):
    if any(77 in one.prompt for one in [*self.waiting, *self.running]):
        time.sleep(1000)
    return real(self)
Engine.step = hung
"""
DYING = """
from halfbyte.scheduler import Scheduler
real = Scheduler._admit
def dying(self):
    if any(77 in one.prompt for one in self.waiting):
        raise SystemError("secret")
    real(self)
Scheduler._admit = dying
"""


def test_row_50_a_failing_step(tmp_path):
    with serving(tmp_path, faults=FAILING) as server:
        failed = server.post(COMPLETIONS, {"prompt": [77, 5], "max_tokens": 4})
        assert failed.status_code == 503 and error(failed)["code"] == "engine_failed"
        assert not re.search("secret|0x", failed.text)  # row 74
        well(server)
        with server.http.stream("POST", COMPLETIONS, json={"prompt": [77], "max_tokens": 4, "stream": True}) as stream:
            assert stream.status_code == 503


def test_row_50_a_stream_that_fails_in_the_middle_says_so(tmp_path):
    late = FAILING.replace("77 in one.prompt", "len(one.made) == 8")
    with serving(tmp_path, faults=late) as server:
        response = server.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 50, "stream": True, "temperature": 0,
                                             "logit_bias": {"0": -100, "2": -100}})  # fmt: skip
        found = events(response.text)
        assert found[-1] == "[DONE]" and found[-2]["error"]["code"] == "engine_failed" and len(found) > 4
        assert server.chat("Hello", 1).status_code == 200


@pytest.mark.timed
@pytest.mark.parametrize("fault", [HANGING, DYING], ids=["hangs", "dies"])
def test_row_51_the_engine_is_lost(tmp_path, fault):
    with serving(tmp_path, "--step-seconds", "1", "--max-concurrency", "2", faults=fault) as server:
        with ThreadPoolExecutor(3) as pool:
            prompts = ([77], [5], [6])
            start = time.monotonic()
            asked = [pool.submit(server.post, COMPLETIONS, {"prompt": one, "max_tokens": 900, "stream": one == [6],
                     "logit_bias": {"0": -100, "2": -100}}) for one in prompts]  # fmt: skip
            answers = [one.result() for one in asked]
        assert time.monotonic() - start < 10
        assert answers[0].status_code == 503 and "secret" not in answers[0].text
        for answer in answers[1:]:
            assert answer.status_code == 503 or "engine_failed" in answer.text or answer.json()["usage"]
        health = httpx2.get(f"{server.address}/health")
        assert health.status_code == 503 and server.http.get("/ready").status_code == 503
        assert server.metric("engine_up") == 0 and server.chat("Hello").status_code == 503
        assert server.process.poll() is None
        server.kill()


def test_row_51_it_exits_when_asked_to(tmp_path):
    server = Server(tmp_path, "--exit-on-fatal", "--drain-seconds", "1", faults=DYING)
    assert server.post(COMPLETIONS, {"prompt": [77], "max_tokens": 4}).status_code == 503
    assert server.process.wait(10) == 1


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-concurrency", 10**6), ("--max-concurrency", 10**12), ("--prompt-cache-bytes", 10**12)]
)
def test_row_53_a_cache_that_does_not_fit_is_refused_at_the_start(flag, value):
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte", "serve", "--device", "cpu", "--port", "0", flag, str(value)],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and flag in done.stderr


def test_row_53_a_context_of_ones_own(tmp_path):
    with serving(tmp_path, "--max-context", "300", "--max-concurrency", "2") as server:
        assert error(server.post(COMPLETIONS, {"prompt": [5] * 300}))["code"] == "context_length_exceeded"
        reply = server.post(COMPLETIONS, {"prompt": [5] * 290, "max_tokens": 100, "logit_bias": {"0": -100, "2": -100}})
        assert (
            reply.json()["usage"]["completion_tokens"] == 10 and reply.json()["choices"][0]["finish_reason"] == "length"
        )


def streaming(server, body, into):
    with server.http.stream("POST", CHAT, json=body) as response:
        into.append(response.status_code)
        for line in response.iter_lines():
            into.append(line)


@pytest.mark.quiet
def test_row_65_sigterm_lets_replies_end(tmp_path):
    server, said = Server(tmp_path), []
    short = {**LONG, "max_tokens": 60}
    thread = threading.Thread(target=streaming, args=(server, short, said))
    thread.start()
    while len(said) < 5:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    assert server.process.wait(30) == 0
    thread.join()
    assert "data: [DONE]" in said and any('"length"' in line for line in said if isinstance(line, str))
    assert "Traceback" not in server.log


@pytest.mark.timed
def test_row_65_what_does_not_end_in_time_is_told(tmp_path):
    server, said = Server(tmp_path, "--drain-seconds", "0.5"), []
    thread = threading.Thread(target=streaming, args=(server, LONG, said))
    thread.start()
    while len(said) < 5:
        time.sleep(0.01)
    start = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - start < 10
    thread.join()
    assert "shutting down" in "".join(map(str, said)) and "data: [DONE]" in said


@pytest.mark.parametrize("signals", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGHUP",)], ids="-".join)
def test_row_66_at_once(tmp_path, signals):
    server, said = Server(tmp_path), []
    thread = threading.Thread(target=streaming_until_closed, args=(server, said))
    thread.start()
    while len(said) < 5:
        time.sleep(0.01)
    for name in signals:
        server.process.send_signal(getattr(signal, name))
        time.sleep(0.3)
    assert server.process.wait(15) == 0
    thread.join()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))
    assert "Traceback" not in server.log


def streaming_until_closed(server, into):
    try:
        streaming(server, LONG, into)
    except httpx2.HTTPError:
        into.append("closed")


@pytest.mark.parametrize(
    "flags", [["--port", "99999"], ["--host", "no.such.host.invalid"], ["--host", "203.0.113.1"]], ids=str
)
def test_row_69_places_that_cannot_be_listened_on(flags):
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte", "serve", *flags], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot listen" in done.stderr


def test_row_69_a_port_in_use(server):
    command = [sys.executable, "-m", "halfbyte", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "in use" in done.stderr


def test_row_74_errors_have_neither_paths_nor_prompts(server):
    """An answer to one tells nothing of another, of the machine, or of what was sent."""
    server.chat("my secret is swordfish", 3)
    bad = [
        ({"temperature": "swordfish"}, 400), ({"model": "swordfish"}, 404), ({"stop": [["swordfish"]]}, 400),
        ({"messages": [{"role": "swordfish", "content": "Hi"}]}, 400), ({"tools": ["swordfish"]}, 400),
    ]  # fmt: skip
    for body, status in bad:
        said = json.dumps(refused(server, body, status=status))
        assert not re.search(r"swordfish|0x|Traceback|\.py|" + re.escape(str(ROOT)), said)


def test_row_75_logs_have_neither_prompts_nor_keys(server):
    server.chat("my secret is swordfish", 3)
    server.post(CHAT, {"messages": [{"role": "user", "content": "swordfish"}], "temperature": "swordfish"})
    httpx2.get(f"{server.address}/v1/models", headers={"Authorization": "Bearer swordfish"})
    assert "swordfish" not in server.log and KEY not in server.log
    assert re.search(rf"{CHAT} 200 \d", server.log)  # they do have something


def test_keep_alive_comments_while_a_prompt_is_read(server):
    body = {"prompt": [77, *[5] * 7999], "max_tokens": 1, "stream": True}  # no other test has computed its beginning
    with server.http.stream("POST", COMPLETIONS, json=body) as response:
        found = events(response)
    pings = [one for one in found if isinstance(one, str) and one.startswith(": keep-alive")]
    assert pings and all(re.fullmatch(r": keep-alive \d+/8000", one) for one in pings) and found[-1] == "[DONE]"


def test_an_unknown_model_route_or_method(server):
    assert refused(server, {"model": "../../etc/passwd"}, status=404)["code"] == "model_not_found"
    assert error(server.http.get("/v1/nothing")) and server.http.get("/v1/nothing").status_code == 404
    assert error(server.http.get(CHAT)) and server.http.get(CHAT).status_code == 405
    assert server.http.get(CHAT).headers["allow"] == "POST"


def test_listed_origins_may_call(tmp_path):
    with serving(tmp_path, "--cors-origins", "https://page.example", "--allowed-hosts", "My.host", key=KEY) as server:
        asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        own = "authorization,content-type,x-stainless-os,anthropic-version"  # as the clients' JavaScript sends them
        allowed = httpx2.options(server.address + CHAT, headers={**asks, "Access-Control-Request-Headers": own})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-headers"] == own
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        evil = httpx2.options(server.address + CHAT, headers={**asks, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
        assert server.http.get("/v1/models", headers={"Host": "my.host"}).status_code == 200


def test_row_76_a_mix_with_disconnects(server):
    """Twenty seconds of the soak: nothing stuck, and memory does not grow. Longer: benchmarks/serve.py."""
    rng = random.Random(7)

    def one(number):
        body = {**LONG, "max_tokens": rng.randint(1, 12), "seed": number}
        if rng.random() < 0.2:
            abandon(server, {**LONG, "max_tokens": 500}, rng.choice([0, 400]))
        else:
            assert server.post(CHAT, {**body, "stream": rng.random() < 0.5}).status_code == 200

    sizes = []
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(40)))
        assert server.idle(2)
        sizes.append(server.memory())
    assert sizes[2] - sizes[1] < 20e6
