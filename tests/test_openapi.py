"""The description of the server: all routes are in it, and what it says of a field is what happens to it."""

import json
import re
import subprocess
import sys

import pytest
from serving import CHAT, COMPLETIONS, serving

from halfbyte.server.app import OPERATIONS

KEY = "key-of-the-tests"
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 1}, COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1}, "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI}, "/tokenize": {"prompt": "Hi"}, "/detokenize": {"tokens": [5]},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), "--max-tokens-default", 4, key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def described(server):
    return server.http.get("/openapi.json").json()


def test_every_route_is_described(described):
    assert described["openapi"].startswith("3.1") and set(BODIES) == {one.path for one in OPERATIONS if one.body}
    for one in OPERATIONS:
        said = described["paths"][one.path.replace(":path}", "}")][one.method.lower()]
        assert said["summary"] and "200" in said["responses"] and ("requestBody" in said) == (one.method == "POST")
        assert ("security" in said) == (one.path != "/health")


def beyond(schema):
    """Values that a schema of a plain field does not allow, one beyond each of its bounds."""
    for one in schema.get("anyOf", [schema]):
        if "maximum" in one:
            yield from (one["maximum"] + 1, one["minimum"] - 1, "1", True)
        elif one.get("type") == "boolean":
            yield from ("true", 1)
        elif one.get("type") == "array" and not {"string"} & {kind.get("type") for kind in schema.get("anyOf", [])}:
            yield from ("text", {}, [None] * (min(one["maxItems"], 5000) + 1))
        elif one.get("type") == "object":
            yield from ([], 5)


@pytest.mark.parametrize("path", BODIES)
def test_what_the_description_does_not_allow_is_refused(server, described, path):
    """Both come from one table: a bound that is described and not checked, or the other way round, fails here."""
    assert server.post(path, BODIES[path]).status_code == 200
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    tried = 0
    for name, field in schema["properties"].items():
        for value in beyond(field) if len(field.get("anyOf", [])) <= 2 else ():
            response = server.post(path, {**BODIES[path], name: value})
            said = response.json()["error"]["message"]
            assert response.status_code == 400 and re.split(r"[:.\[ ]", said)[0] == name, (name, value, said)
            tried += 1
    assert tried >= (1 if path == "/detokenize" else 10)
    for name in schema.get("required", []):
        assert server.post(path, {key: BODIES[path][key] for key in BODIES[path] if key != name}).status_code == 400


def test_the_bounds_of_the_description_are_taken(server, described):
    """The ends of every range of numbers: a table may not promise more than sampling takes."""
    fields = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    for name, field in fields.items():
        number = field.get("anyOf", [field])[0]
        if "maximum" in number and name not in ("n", "max_tokens", "max_completion_tokens"):
            for value in (number["minimum"], number["maximum"]):
                response = server.post(CHAT, {**BODIES[CHAT], name: value})
                assert response.status_code == 200, (name, value, response.text)


def test_schemathesis_finds_no_server_error(server, tmp_path):
    """All routes, with what the description allows and what it does not. Refusals are fine, failures are not."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json", "--header",
        f"Authorization: Bearer {KEY}", "--checks", "not_a_server_error", "--phases", "fuzzing", "--max-examples", "12",
        "--seed", "1", "--workers", "2", "--request-timeout", "20", "--mode", "all",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    asked = set(re.findall(r'requests_total\{route="([^"]+)"', server.http.get("/metrics").text))
    assert {one.path for one in OPERATIONS if one.body} <= asked and server.idle(5) and "failed" not in server.log
    assert json.loads(server.http.get("/health").text) == {"status": "ok"}
