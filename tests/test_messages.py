"""Anthropic's messages, by a real server process and by Anthropic's own client."""

import json

import anthropic
import httpx2
import pytest
from serving import CHAT, serving, tool_caller

import halfbyte
from halfbyte.server import messages

KEY = "key-of-the-tests"
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]
HOUR = {"type": "integer", "minimum": 0, "maximum": 23}
TIME = {"type": "object", "properties": {"hour": HOUR}, "required": ["hour"], "additionalProperties": False}
CLOCK = {"name": "clock", "description": "The time.", "input_schema": TIME}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tool_caller(tmp_path_factory.mktemp("messages") / "model")
    with serving(folder.parent, "--served-model-name", "caller", model=folder, key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client):
    def create(**wish):
        more = {"temperature": 0, **wish.pop("extra_body", {})}  # which the client's newest models do not know
        given = {"model": "caller", "max_tokens": 24, "messages": ASK, **wish}
        return client.messages.create(**given, extra_body=more)

    return create


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


def test_a_reply_is_that_of_the_library(ask, loaded):
    model, tokenizer = loaded
    ids = tokenizer.chat_ids([{"role": "system", "content": "Be brief."}, *ASK])
    reply = ask(system="Be brief.")
    assert reply.content[0].text == halfbyte.generate(model, tokenizer, ids, max_tokens=24, temperature=0)
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", "caller", "max_tokens")
    kept = reply.usage.cache_read_input_tokens
    assert reply.usage.input_tokens + kept == len(ids) and reply.usage.output_tokens == 24
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert ask(system=blocks).content[0].text == reply.content[0].text


def test_a_stream_says_the_same(client, ask):
    whole = ask()
    with client.messages.stream(model="caller", max_tokens=24, messages=ASK, extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert last.content[0].text == whole.content[0].text and last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 24
    raw = list(ask(stream=True))
    assert [event.type for event in raw[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in raw[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert {"message_start", "content_block_delta", "message_stop"} <= set(kinds)


def test_a_stop_sequence_is_told(ask):
    whole = ask().content[0].text
    stop = whole.split()[4]
    cut = ask(stop_sequences=[stop, "never said"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "clock"}, {"type": "any", "disable_parallel_tool_use": True}]
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called(client, choice, streamed):
    wish = {"model": "caller", "max_tokens": 200, "messages": ASK, "tools": [CLOCK], "tool_choice": choice}
    if streamed:
        with client.messages.stream(**wish) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**wish)
    assert reply.stop_reason == "tool_use" and [block.type for block in reply.content] == ["tool_use"]
    assert reply.content[0].name == "clock" and 0 <= reply.content[0].input["hour"] < 24


def test_calls_and_their_results_are_taken_back(ask, server):
    """They reach the model as they do over OpenAI's route."""
    used = [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "clock", "input": {"hour": 3}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "late"}]}
    turns = [
        *ASK,
        {"role": "assistant", "content": used},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    said = ask(messages=turns, tools=[CLOCK]).content[0].text
    call = {"id": "t1", "type": "function", "function": {"name": "clock", "arguments": json.dumps({"hour": 3})}}
    function = {"name": "clock", "description": CLOCK["description"], "parameters": CLOCK["input_schema"]}
    body = {
        "messages": [
            *ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "late"}, {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "function": function}], "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    assert server.post(CHAT, body).json()["choices"][0]["message"]["content"] == said


def test_thinking_is_a_block(ask):
    reply = ask(thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in reply.content] == ["thinking"] and reply.content[0].thinking
    stream = ask(thinking={"type": "adaptive"}, stream=True)
    deltas = [event.delta for event in stream if event.type == "content_block_delta"]
    assert "".join(delta.thinking for delta in deltas) == reply.content[0].thinking
    assert ask(thinking={"type": "disabled"}).content[0].type == "text"


def test_a_schema_is_followed(ask):
    form = {"type": "json_schema", "schema": CLOCK["input_schema"]}
    reply = ask(output_config={"format": form}, extra_body={"temperature": 1, "seed": 1}, max_tokens=200)
    assert 0 <= json.loads(reply.content[0].text)["hour"] < 24 and reply.stop_reason == "end_turn"


def test_tokens_are_counted(client, ask):
    wish = {"model": "caller", "messages": ASK, "system": "Be brief.", "tools": [CLOCK]}
    counted = client.messages.count_tokens(**wish).input_tokens
    took = ask(**wish, max_tokens=1).usage
    assert counted == took.input_tokens + took.cache_read_input_tokens
    assert counted > client.messages.count_tokens(model="caller", messages=ASK).input_tokens


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', "[1]", "{", '"a"'])
def test_arguments_that_are_no_object_of_json_are_text(text):
    assert messages._input(text) == {"arguments": text}
    assert messages._input('{"a": 1}') == {"a": 1} and messages._input("") == {}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
        ({"temperature": 9}, "temperature"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_have_anthropics_shape(server, body, names):
    wish = {"model": "caller", "max_tokens": 4, "messages": ASK, **body}
    response = server.post("/v1/messages", {name: value for name, value in wish.items() if value is not None})
    said = response.json()
    assert response.status_code == 400 and said["type"] == "error"
    assert said["error"]["type"] == "invalid_request_error" and said["error"]["message"].startswith(names)


def test_errors_of_the_client(client, server):
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        client.messages.create(model="other", max_tokens=4, messages=ASK)
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="caller", max_tokens=4, messages=ASK)
    assert httpx2.get(f"{server.address}/v1/messages", headers={"x-api-key": KEY}).json()["type"] == "error"


def test_nobody_thinks_unasked(tmp_path):
    """Nor where the model's template thinks unless told not to."""
    folder = tool_caller(tmp_path / "model")
    path = folder / "chat_template.jinja"
    asked, said = "{% if enable_thinking %}", "{% if enable_thinking | default(true) or thinking %}"
    assert asked in path.read_text()
    path.write_text(path.read_text().replace(asked, said))

    def kinds(**wish):
        body = {"model": "caller", "max_tokens": 8, "messages": ASK, **wish}
        return {block["type"] for block in server.post("/v1/messages", body).json()["content"]}

    def length(**wish):
        return server.post("/v1/messages/count_tokens", {"messages": ASK, **wish}).json()["input_tokens"]

    with serving(tmp_path, "--served-model-name", "caller", model=folder) as server:
        assert kinds() == kinds(thinking={"type": "disabled"}) == kinds(output_config={"effort": "high"}) == {"text"}
        assert kinds(thinking={"type": "adaptive"}) == kinds(chat_template_kwargs={"enable_thinking": True})
        assert kinds(chat_template_kwargs={"thinking": True}) == kinds(thinking={"type": "enabled"}) == {"thinking"}
        assert length() == length(thinking={"type": "disabled"}) < length(thinking={"type": "enabled"})
        unasked = server.chat("Hi").json()["choices"][0]["message"]
        assert unasked["reasoning_content"]  # OpenAI's routes leave it to the template
