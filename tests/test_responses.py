"""OpenAI's responses, by a real server process and by OpenAI's own client."""

import json

import openai
import pytest
from serving import CHAT, error, events, serving, tool_caller

import halfbyte

TEXT = "Tell me a story about a fox."
HOUR = {"type": "integer", "minimum": 0, "maximum": 23}
PARAMETERS = {"type": "object", "properties": {"hour": HOUR}, "required": ["hour"], "additionalProperties": False}
CLOCK = {"type": "function", "name": "clock", "parameters": PARAMETERS, "strict": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tool_caller(tmp_path_factory.mktemp("responses") / "model")
    with serving(folder.parent, "--served-model-name", "caller", model=folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client):
    def create(**wish):
        given = {"model": "caller", "input": TEXT, "max_output_tokens": 24, "temperature": 0}
        return client.responses.create(**{**given, **wish})

    return create


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


def test_a_reply_is_that_of_the_library(ask, loaded):
    model, tokenizer = loaded
    ids = tokenizer.chat_ids([{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}])
    reply = ask(instructions="Be brief.")
    assert reply.output_text == halfbyte.generate(model, tokenizer, ids, max_tokens=24, temperature=0)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(ids), 24)
    assert (reply.object, reply.instructions, reply.store) == ("response", "Be brief.", False)
    parts = [{"type": "input_text", "text": "Tell me a story "}, {"type": "input_text", "text": "about a fox."}]
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert ask(input=items).output_text == reply.output_text


def test_a_stream_says_the_same(client, ask):
    whole = ask()
    events = list(ask(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == events[-1].response.output_text == events[-4].text
    with client.responses.stream(model="caller", input=TEXT, max_output_tokens=24, temperature=0) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == said


@pytest.mark.parametrize("choice", [{"type": "function", "name": "clock"}, "required"], ids=["named", "required"])
def test_a_tool_is_called(ask, choice):
    wish = {"tools": [CLOCK], "tool_choice": choice, "max_output_tokens": 200, "parallel_tool_calls": False}
    reply = ask(**wish)
    call = reply.output[0]
    assert reply.status == "completed" and [item.type for item in reply.output] == ["function_call"]
    assert call.name == "clock" and call.call_id and 0 <= json.loads(call.arguments)["hour"] < 24
    events = list(ask(**wish, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments == call.arguments and events[-1].type == "response.completed"


def test_calls_and_their_results_are_taken_back(ask, server):
    """They reach the model as they do over the older route."""
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"hour": 3}'}
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "late"}
    said = ask(input=[{"role": "user", "content": TEXT}, spoken, call, result], tools=[CLOCK]).output_text
    called = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"hour": 3}'}}
    messages = [
        {"role": "user", "content": TEXT}, {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "late"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}]
    body = {"messages": messages, "tools": tools, "max_tokens": 24, "temperature": 0}
    assert server.post(CHAT, body).json()["choices"][0]["message"]["content"] == said


def test_reasoning_is_an_item(ask):
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    reply = ask(**thinking)
    assert [item.type for item in reply.output] == ["reasoning"] and reply.output_text == ""
    assert (
        reply.usage.output_tokens_details.reasoning_tokens == 24
        and ask().usage.output_tokens_details.reasoning_tokens == 0
    )
    events = list(ask(**thinking, stream=True))
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert said == reply.output[0].content[0].text != ""
    again = ask(input=[{"role": "user", "content": TEXT}, *[item.to_dict() for item in reply.output]])
    assert again.status == "incomplete"


def test_a_schema_is_followed(ask):
    form = {"type": "json_schema", "name": "hour", "schema": PARAMETERS, "strict": True}
    reply = ask(text={"format": form}, temperature=1, max_output_tokens=200, extra_body={"seed": 1})
    assert 0 <= json.loads(reply.output_text)["hour"] < 24 and reply.status == "completed"


def test_what_the_clients_types_need_is_there(ask):
    reply = ask()
    assert reply.usage.input_tokens_details.cache_write_tokens == 0
    assert reply.text.to_dict() == {"format": {"type": "text"}}
    assert ask(text={"verbosity": "low"}).text.to_dict() == {"format": {"type": "text"}, "verbosity": "low"}


@pytest.mark.parametrize("stream", ["false", "true"])
def test_half_a_character_is_repeated_as_a_whole_one(server, stream):
    half = '"half \\ud800"'
    body = f'{{"input": {half}, "instructions": {half}, "metadata": {{{half}: "x"}}, "max_output_tokens": 1'
    response = server.http.post("/v1/responses", content=f'{body}, "stream": {stream}}}')
    said = events(response.text)[0]["response"] if stream == "true" else response.json()
    assert response.status_code == 200 and (said["instructions"], said["metadata"]) == ("half ?", {"half ?": "x"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "chatty"}}, "text.verbosity"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_kept_or_known_is_refused(server, body, param):
    response = server.post("/v1/responses", {"input": TEXT, "max_output_tokens": 2, **body})
    assert response.status_code == 400 and error(response)["param"] == param
