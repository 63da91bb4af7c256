"""Schemas that take long to try, against a real server process: who waits for them, how many may, what they leave.

And what is remembered of schemas."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from serving import CHAT, COMPLETIONS, Server, serving

from halfbyte import grammar
from halfbyte.grammar import GrammarError, Verdicts

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
numbers = count()


def endless():
    """A schema that would compile for ever, unlike every one before."""
    number = next(numbers)
    every = [{"type": "string", "pattern": f"^.*{i}.{{1,{i}}}x{number}$"} for i in range(1, 600)]
    return {"type": "object", "properties": {"a": {"allOf": every}}}


def fresh():
    """One that is soon found fine, unlike every one before."""
    return {"type": "object", "properties": {f"p{next(numbers)}": {"type": "boolean"}}, "additionalProperties": False}


def offering(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"messages": HI, "max_tokens": 1, "tools": [tool]}


def held(schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": HI, "max_tokens": 1, "response_format": form}


BODIES = {  # by route, with a schema in each
    CHAT: offering,
    COMPLETIONS: lambda schema: {"prompt": "Hi", "max_tokens": 1, "response_format": held(schema)["response_format"]},
    RESPONSES: lambda schema: {"input": "Hi", "max_output_tokens": 1,
                               "tools": [{"type": "function", "name": "f", "parameters": schema}]},
    MESSAGES: lambda schema: {"messages": HI, "max_tokens": 1, "tools": [{"name": "f", "input_schema": schema}]},
}  # fmt: skip


def sent(server, body, path=CHAT):
    """A connection on which nothing has come back yet."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    time.sleep(0.03)
    return sock


def seconds(server, body, path=CHAT, status=200):
    start = time.monotonic()
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    return time.monotonic() - start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), "--schema-seconds", "1") as running:
        yield running


@pytest.mark.timed
def test_forms_that_are_known_to_be_fine_wait_for_nobody(server):
    tools, form = offering(fresh()), held(fresh())
    for body in (tools, form):
        seconds(server, body)
    waiting = [sent(server, offering(endless())) for _ in range(8)]
    assert seconds(server, tools) < 1 and seconds(server, form) < 1
    for sock in waiting:
        sock.close()


@pytest.mark.timed
def test_a_client_that_has_gone_leaves_the_check_under_way_and_no_more(server):
    for _ in range(3):
        for path, body in BODIES.items():
            sent(server, body(endless()), path).close()
    assert seconds(server, offering(fresh())) < 5
    assert server.idle()


@pytest.mark.timed
def test_what_was_refused_is_refused_at_once_the_next_time(server):
    schema = endless()
    took = [seconds(server, body(schema), status=400) for body in (offering, offering, held, held)]
    assert took[1] < 0.5 and took[3] < 0.5
    with ThreadPoolExecutor(6) as pool:  # also by those who were in line meanwhile
        body = offering(endless())
        assert max(pool.map(lambda _: seconds(server, body, status=400), range(6))) < 4


@pytest.mark.timed
def test_no_more_than_may_wait_for_a_slot_wait_for_a_check(tmp_path):
    with serving(tmp_path, "--max-queue", "1", "--schema-seconds", "3") as server:
        known = fresh()
        seconds(server, offering(known))
        waiting = [sent(server, offering(endless())) for _ in range(2)]
        for path, body in BODIES.items():
            answer = server.post(path, body(fresh()))
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert "Too many requests are waiting" in answer.json()["error"]["message"]
        seconds(server, offering(known))
        for sock in waiting:
            sock.close()


@pytest.mark.timed
def test_an_end_does_not_wait_for_checks_of_clients_that_have_gone(tmp_path):
    server = Server(tmp_path, "--schema-seconds", "1")
    for _ in range(12):
        sent(server, offering(endless())).close()
    start = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - start < 6
    assert "Traceback" not in server.log


class Trials:
    """In place of the process: it says what it is told to, and counts."""

    def __init__(self, **answer):
        self.answer, self.asked = answer, []

    def ask(self, forms):
        self.asked.append(forms)
        return self.answer


@pytest.fixture
def trials(monkeypatch):
    def trials(**answer):
        monkeypatch.setattr(grammar, "worker", made := Trials(**answer))
        return made

    monkeypatch.setattr(grammar, "_fine", Verdicts(3))
    monkeypatch.setattr(grammar, "_refused", Verdicts(3))
    return trials


def refuse(*forms):
    with pytest.raises(GrammarError, match="wrong"):
        grammar.check(*forms)


A, B, C, D = [("tool", f"schema {name}") for name in "abcd"]


def test_what_is_known_is_not_tried(trials):
    tried = trials(text="").asked
    grammar.check(A, B, A)
    grammar.check(B, C)
    grammar.check(A, B, C)
    assert tried == [[A, B], [C]]
    assert grammar.untried(D, A) == [D]


def test_a_refusal_is_of_what_was_tried_together(trials):
    tried = trials(error="wrong").asked
    refuse(A, B)
    refuse(A, B)
    refuse(A)
    refuse(B)
    assert tried == [[A, B], [A], [B]]
    tried = trials(text="").asked
    refuse(A)
    grammar.check(C)
    refuse(C, B)
    assert tried == [[C]]


def test_what_took_too_long_is_tried_again_after_a_while(trials, monkeypatch):
    tried, clock = trials(error="wrong", spent="yes").asked, [0.0]
    monkeypatch.setattr(grammar.time, "monotonic", lambda: clock[0])
    for seconds in (0, 59, 2, 59, 2):
        clock[0] += seconds
        refuse(A)
    assert len(tried) == 3


def test_what_is_remembered_is_bounded(trials):
    tried = trials(error="wrong").asked
    for form in (A, B, C, A, D, A, B):  # B was not asked for longest when D came
        refuse(form)
    assert tried == [[A], [B], [C], [D], [B]] and len(grammar._refused.found) == 3
