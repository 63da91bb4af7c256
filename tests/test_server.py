"""OpenAI's API, by a real server process with the embedded model, and by OpenAI's own client."""

import json
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serving import CHAT, COMPLETIONS, ROOT, error, events, serving, tool_caller

import halfbyte
from halfbyte.cli import main
from halfbyte.commands.serve import PACKAGES, greeting
from halfbyte.server import tools
from halfbyte.text.reply import Reply, syntax

KEY = "key-of-the-tests"
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A server of a model that calls tools and thinks."""
    folder = tool_caller(tmp_path_factory.mktemp("caller") / "model")
    with serving(folder.parent, "--alias", "caller", "--alias", "other", model=folder) as running:
        yield running


def alone(loaded, messages, max_tokens, **wish):
    model, tokenizer = loaded
    return halfbyte.generate(model, tokenizer, tokenizer.chat_ids(messages), max_tokens=max_tokens, **wish)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "halfbyte"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("other")


def test_a_reply_is_that_of_the_library(client, loaded):
    reply = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=40, temperature=0)
    assert reply.choices[0].message.content == alone(loaded, ASK, 40, temperature=0)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 40)
    assert reply.usage.prompt_tokens == len(loaded[1].chat_ids(ASK)) and reply.object == "chat.completion"


def test_a_stream_says_the_same(client, loaded):
    """Row 77: stream or not, the tokens are the same."""
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone(loaded, ASK, 40, temperature=0)
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 40


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_has_the_headers_of_its_own_request_alone(server, stream):
    answers = [server.chat("Hello", 2, stream=stream).headers for _ in range(3)]
    ids = [headers.get_list("x-request-id") for headers in answers]
    assert [len(one) for one in ids] == [1, 1, 1] and len({one[0] for one in ids}) == 3


def test_a_stream_ends_with_done_and_has_usage_only_where_asked(server):
    body = {"messages": ASK, "max_tokens": 3, "stream": True}
    response = server.post(CHAT, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[-1] == "[DONE]" and all("usage" not in chunk for chunk in found[:-1])
    with_usage = events(server.post(CHAT, {**body, "stream_options": {"include_usage": True}}).text)
    assert [chunk["usage"] is None for chunk in with_usage[:-1]] == [True] * (len(with_usage) - 2) + [False]


def test_completions_of_text_and_of_token_ids(client, loaded):
    model, tokenizer = loaded
    ids = tokenizer.prompt_ids("Once upon")
    wanted = halfbyte.generate(model, tokenizer, ids, max_tokens=12, temperature=0)
    for prompt in ("Once upon", ids, ["Once upon", "Once upon"], [ids, ids]):
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert {choice.text for choice in reply.choices} == {wanted}
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    stream = client.completions.create(model="tiny", prompt=ids, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_a_seed_repeats_a_reply_in_any_company(server):
    wish = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
    first = server.chat("Tell me a story.", **wish).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(8) as pool:
        others = list(pool.map(lambda n: server.chat("Tell me a story.", **{**wish, "seed": n}).json(), range(8)))
    texts = [other["choices"][0]["message"]["content"] for other in others]
    assert texts[5] == first and len(set(texts)) > 4


def test_several_replies(client):
    reply = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, n=3, seed=1, temperature=1)
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) == 3 and reply.usage.completion_tokens == 36
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=12, n=3, seed=1, temperature=1, stream=True
    )
    said = ["", "", ""]
    for chunk in stream:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == texts


def test_stop_bias_and_penalties(client, loaded):
    whole = alone(loaded, ASK, 40, temperature=0)
    stop = whole.split()[5]
    ask = {"model": "tiny", "messages": ASK, "max_tokens": 40, "temperature": 0}
    cut = client.chat.completions.create(**ask, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    first = loaded[1].encode(whole)[0]
    biased = client.chat.completions.create(**ask, logit_bias={str(first): -100})
    assert not biased.choices[0].message.content.startswith(loaded[1].decode([first]))
    wishes = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    wanted = alone(loaded, ASK, 40, temperature=0, **wishes)
    assert client.chat.completions.create(**ask, **wishes).choices[0].message.content == wanted != whole
    more = {"min_p": 0.2, "top_k": 5, "repetition_penalty": 1.3}
    drawn = client.chat.completions.create(**{**ask, "temperature": 1}, seed=3, extra_body=more).choices[0].message
    assert drawn.content == alone(loaded, ASK, 40, temperature=1, seed=3, **more)


def test_logprobs(client, loaded):
    reply = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    told = reply.choices[0].logprobs.content
    assert "".join(one.token for one in told) == reply.choices[0].message.content
    answers = list(halfbyte.stream_generate(*loaded, loaded[1].chat_ids(ASK), max_tokens=5, temperature=0))
    for one, answer in zip(told, answers, strict=True):
        best = answer.logprobs.topk(3)
        assert one.logprob == pytest.approx(float(answer.logprobs[answer.token]))
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(best.values.tolist())
        assert bytes(one.bytes).decode() == one.token == one.top_logprobs[0].token
    legacy = client.completions.create(model="tiny", prompt="Once", max_tokens=3, temperature=0, logprobs=2)
    assert "".join(legacy.choices[0].logprobs.tokens) == legacy.choices[0].text
    assert [len(top) for top in legacy.choices[0].logprobs.top_logprobs] == [2, 2, 2]
    assert legacy.choices[0].logprobs.text_offset[0] == 0


def test_likely_tokens_are_not_told_where_log_probabilities_are_refused(server):
    response = server.post(CHAT, {"messages": ASK, "logprobs": False, "top_logprobs": 2, "max_tokens": 1})
    assert response.status_code == 400 and error(response)["param"] == "top_logprobs"
    for wish in ({"logprobs": False, "top_logprobs": 0}, {"logprobs": False}, {"top_logprobs": 0}):
        reply = server.post(CHAT, {"messages": ASK, **wish, "max_tokens": 1})
        assert reply.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_character_of_several_tokens_is_put_together_from_their_bytes(client, loaded, stream):
    wish = {"model": "tiny", "max_tokens": 20, "extra_body": {"grammar": 'start: "東 é"'}}
    reply = client.chat.completions.create(**wish, messages=ASK, logprobs=True, top_logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    told = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert b"".join(bytes(one.bytes) for one in told) == "東 é".encode() and len(told) == 6
    legacy = client.completions.create(**wish, prompt="Once", logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in legacy] if stream else [legacy.choices[0]]
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == [0, 0, 0, 1, 2, 2]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_json_schema_is_followed(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        reply = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=200, temperature=1.5, seed=seed, response_format=form, stream=stream
        )
        if stream:
            chunks = list(reply)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        person = json.loads(text)
        assert reason == "stop" and set(person) == {"name", "age"}
        assert len(person["name"]) <= 8 and 0 <= person["age"] <= 99


def test_json_objects_grammars_and_regexes_are_followed(server):
    def said(**more):
        return server.chat("Hello", 200, **{"temperature": 1, **more}).json()["choices"][0]["message"]["content"]

    assert isinstance(json.loads(said(response_format={"type": "json_object"}, seed=1)), dict)
    narrow = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(said(response_format={"type": "json_object", "schema": narrow})) == {"n": 7}
    assert said(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert said(response_format={"type": "grammar", "grammar": 'start: "left" | "right"'}) in ("left", "right")
    assert said(response_format={"type": "regex", "regex": "[ab]{3}"}).strip("ab") == ""


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' \
        '\n<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'  # fmt: skip


HOUR = {"type": "integer", "minimum": 0, "maximum": 23}
STRICT_PARAMETERS = {
    "type": "object",
    "properties": {"hour": HOUR},
    "required": ["hour"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "time", "parameters": STRICT_PARAMETERS}}
ONLY_ROME = {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
ROME = {"type": "function", "function": {"name": "time", "parameters": ONLY_ROME}}


def saying(text):
    return {"response_format": {"type": "grammar", "grammar": f"start: {json.dumps(text)}"}}


def test_tools_are_called_in_parallel(caller):
    with openai.OpenAI(base_url=f"{caller.address}/v1", api_key="none", max_retries=0) as client:
        ask = {"model": "caller", "messages": ASK, "tools": TOOLS, "max_tokens": 200, "extra_body": saying(CALLS)}
        reply = client.chat.completions.create(**ask)
        calls = reply.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"city": "Oslo"}), ("time", {"city": "Rome"}),
        ]  # fmt: skip
        assert reply.choices[0].finish_reason == "tool_calls" and reply.choices[0].message.content is None
        assert len({call.id for call in calls}) == 2
        names, arguments = {}, {0: "", 1: ""}
        for chunk in client.chat.completions.create(**ask, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.function.name:
                    names[call.index] = (call.function.name, call.id, call.type)
                arguments[call.index] += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason
        assert [name for name, id, kind in names.values() if id and kind == "function"] == ["weather", "time"]
        assert [json.loads(text) for text in arguments.values()] == [{"city": "Oslo"}, {"city": "Rome"}]
        assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_call_is_the_last_where_calls_may_not_be_parallel(caller, stream):
    with openai.OpenAI(base_url=f"{caller.address}/v1", api_key="none", max_retries=0) as client:
        ask = {"model": "caller", "messages": ASK, "tools": TOOLS, "max_tokens": 200, "extra_body": saying(CALLS)}
        reply = client.chat.completions.create(**ask, parallel_tool_calls=False, stream=stream)
        if stream:
            deltas = [chunk.choices[0] for chunk in reply]
            names = [call.function.name for one in deltas for call in one.delta.tool_calls or []]
            assert [name for name in names if name] == ["weather"] and deltas[-1].finish_reason == "tool_calls"
        else:
            calls = [call.function for call in reply.choices[0].message.tool_calls]
            assert [(one.name, json.loads(one.arguments)) for one in calls] == [("weather", {"city": "Oslo"})]
            assert reply.choices[0].finish_reason == "tool_calls"


def test_a_call_of_half_a_character_is_told(caller):
    call = '<tool_call>\n{"name": "a\\ud800", "arguments": {}}\n</tool_call>'
    response = caller.post(CHAT, {"messages": ASK, "tools": TOOLS, "max_tokens": 200, **saying(call)})
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "a?"


def test_results_of_tools_are_taken_back(caller):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*ASK, called, {"role": "tool", "tool_call_id": "call_1", "content": "snow"}]
    response = caller.post(CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 4})
    assert response.status_code == 200


def test_tool_choice(caller):
    named = {"type": "function", "function": {"name": "time"}}
    body = {"messages": ASK, "max_tokens": 100, **saying("no call")}  # whose form is that of an answer in text
    for choice, offered in [(named, [*TOOLS[:1], ROME]), ("required", [ROME])]:
        wish = {**body, "tools": offered, "tool_choice": choice, "parallel_tool_calls": False}
        [called] = caller.post(CHAT, wish).json()["choices"][0]["message"]["tool_calls"]
        assert called["function"]["name"] == "time" and json.loads(called["function"]["arguments"]) == {"city": "Rome"}
    any_words = {"messages": ASK, "tools": TOOLS, "tool_choice": named, "max_tokens": 200, "temperature": 2, "top_p": 1}
    for seed in range(3):  # the model knows nothing of calls, and yet it makes one
        reply = caller.post(CHAT, {**any_words, "seed": seed, "tools": [STRICT]}).json()["choices"][0]
        assert reply["finish_reason"] == "tool_calls" and not reply["message"]["content"]
        called = [one["function"] for one in reply["message"]["tool_calls"]]
        assert [one["name"] for one in called] == ["time"] and 0 <= json.loads(called[0]["arguments"])["hour"] < 24
    told = {"messages": ASK, "tools": TOOLS, "tool_choice": "none", "max_tokens": 100, **saying(CALLS)}
    none = caller.post(CHAT, told).json()["choices"][0]
    assert none["message"]["content"] == CALLS and "tool_calls" not in none["message"]
    refused = caller.post(
        CHAT, {"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}
    )
    assert refused.status_code == 400 and error(refused)["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("template", "rest"),
    [
        ("<tool_call>", '{"city": "Oslo"}}</tool_call>'),
        ("<tool_call><function=", "<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"),
        ("<｜tool▁call▁begin｜>", '{"city": "Oslo"}<｜tool▁call▁end｜>'),  # noqa: RUF001 (DeepSeek's)
        ("<|tool_call>", 'city:<|"|>Oslo<|"|>}<tool_call|>'),
    ],
    ids=["qwen3", "qwen3.5", "deepseek", "gemma4"],
)
def test_a_call_is_begun_in_every_familys_words(template, rest):
    reply = Reply(syntax(template), TOOLS)
    found = [*reply.push(tools.opening(syntax(template), "weather")), *reply.push(rest), *reply.finish()]
    assert [event.text for event in found if event.kind == "call"] == ["weather"]
    assert json.loads("".join(event.text for event in found if event.kind == "arguments")) == {"city": "Oslo"}
    assert not [event for event in found if event.kind == "text"]


def test_reasoning_has_both_names(caller):
    body = {"messages": ASK, "max_tokens": 8, "chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
    message = caller.post(CHAT, body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != "" and message["content"] == ""
    chunks = events(caller.post(CHAT, {**body, "stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)


def test_tokenize_and_detokenize(server, loaded):
    tokenizer = loaded[1]
    text = "The fox, the café and 東京."
    ids = server.post("/tokenize", {"prompt": text}).json()
    assert ids == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)), "max_model_len": 8192}
    assert server.post("/tokenize", {"content": text}).json() == ids
    assert server.post("/tokenize", {"messages": ASK}).json()["tokens"] == tokenizer.chat_ids(ASK)
    for opens in (True, False):
        said = server.post("/tokenize", {"messages": ASK, "add_generation_prompt": opens}).json()["tokens"]
        assert said == tokenizer.chat_ids(ASK, add_generation_prompt=opens)
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json()["content"] == text
    assert server.post("/detokenize", {"tokens": []}).json()["prompt"] == ""


def test_health_ready_and_metrics(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    before = server.metric("generation_tokens_total")
    server.chat("Hello", 5)
    assert server.metric("generation_tokens_total") == before + 5 and server.metric("engine_up") == 1
    names = {
        line.split("{")[0].split(" ")[0] for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"
    }
    for name in (
        "requests_total", "requests_running", "requests_waiting", "prompt_tokens_total", "generation_tokens_total",
        "time_to_first_token_seconds_bucket", "inter_token_seconds_count", "kv_bytes", "prefix_cache_hit_tokens_total",
        "engine_up",
    ):  # fmt: skip
        assert f"halfbyte_{name}" in names


def test_a_known_beginning_is_told(server):
    story = "Tell me more about the fox and the hen. " * 40
    first, second = (server.chat(story + question, 8).json() for question in ("Who won?", "Who lost?"))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert server.metric("prefix_cache_hit_tokens_total") >= 128


def test_the_greeting_can_be_copied(server):
    assert f"curl {server.address}{CHAT} -H 'Authorization: Bearer KEY'" in server.log
    assert KEY not in server.log and f'base_url="{server.address}/v1"' in server.log
    assert greeting("http://127.0.0.1:8080", "tiny", guarded=False) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("hidden", [PACKAGES, PACKAGES[-1:]], ids=", ".join)
def test_a_missing_extra_is_said(hidden, capsys, monkeypatch):
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)  # Python then finds no such package
    with pytest.raises(SystemExit) as stopped:
        main(["serve"])
    assert stopped.value.code == 2
    assert f"{', '.join(hidden)} must be installed to serve: pip install {' '.join(hidden)}" in capsys.readouterr().err


def test_the_command_asks_for_what_the_extra_has():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    assert [line.split(">")[0] for line in extra] == [*PACKAGES]


def test_the_command_is_light():
    """`--help` of all commands is instant: the server's packages load when it runs."""
    heavy = {"starlette", "uvicorn", "llguidance", "torch"}
    code = f"import sys, halfbyte.cli; halfbyte.cli.parser(); print([*{heavy} & sys.modules.keys()])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_unknown_fields_are_left_alone(server):
    body = {"messages": ASK, "max_tokens": 2, "user": "u", "metadata": {}, "store": False, "new_field": [1]}
    assert server.post(CHAT, body).status_code == 200
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "echo": False, "best_of": 1}).status_code == 200


def test_parts_of_text_are_joined(server, loaded):
    parts = [{"type": "text", "text": "Tell me a story "}, {"type": "text", "text": "about a fox."}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 10, "temperature": 0}
    assert server.post(CHAT, body).json()["choices"][0]["message"]["content"] == alone(loaded, ASK, 10, temperature=0)


def test_an_answer_has_the_name_that_was_asked_for(caller):
    bodies = {
        CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": ASK, "max_tokens": 2},
    }  # fmt: skip
    for path, body in bodies.items():
        for said, name in (({}, "caller"), ({"model": "caller"}, "caller"), ({"model": "other"}, "other")):
            assert caller.post(path, {**body, **said}).json()["model"] == name
            streamed = caller.post(path, {**body, **said, "stream": True}).text
            assert set(re.findall(r'"model":"(.*?)"', streamed)) == {name}
