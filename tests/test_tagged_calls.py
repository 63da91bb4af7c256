"""Calls in tags, as Qwen3.5 and Qwen3-Coder write them, by a real server process."""

import json

import pytest
from serving import CHAT, events, serving, tool_caller

ASK = [{"role": "user", "content": "Write a story."}]
WRITE = {
    "type": "object",
    "properties": {"path": {"enum": ["a.txt"]}, "text": {"type": "string"}},
    "required": ["path", "text"],
}
TOOL = {"type": "function", "function": {"name": "write", "parameters": WRITE}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tool_caller(tmp_path_factory.mktemp("tags") / "model", "<tool_call><function=f></function></tool_call>")
    with serving(folder.parent, model=folder) as running:
        yield running


def test_a_call_that_is_cut_by_max_tokens_looks_cut(server):
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    choice = server.post(CHAT, body).json()["choices"][0]
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert choice["finish_reason"] == "length" and arguments.startswith('{"path": "a.txt", "text": "')
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(arguments)
    chunks = [one["choices"][0] for one in events(server.post(CHAT, {**body, "stream": True}).text)[:-1]]
    calls = [call["function"] for one in chunks for call in one["delta"].get("tool_calls", [])]
    assert "".join(call["arguments"] for call in calls) == arguments and chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=str)
def test_a_forced_call_wins_over_the_form_of_an_answer(server, choice):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["ok"]}}}
    pick = {"type": "object", "properties": {"c": {"enum": ["x", "y"]}}, "required": ["c"]}
    tool = {"type": "function", "function": {"name": "pick", "parameters": pick}}
    body = {"messages": ASK, "tools": [tool], "max_tokens": 99, "response_format": form, "parallel_tool_calls": False}
    choices = server.post(CHAT, {**body, "tool_choice": choice}).json()["choices"][0]
    assert choices["finish_reason"] == "tool_calls" and not choices["message"]["content"]
    call = choices["message"]["tool_calls"][0]["function"]
    assert call["name"] == "pick" and json.loads(call["arguments"])["c"] in ("x", "y")
    answer = server.post(CHAT, {**body, "tool_choice": "auto"}).json()["choices"][0]["message"]
    assert "tool_calls" not in answer and answer["content"].startswith("{")
