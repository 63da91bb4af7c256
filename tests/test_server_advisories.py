"""One test for each class of advisory that other servers had, named after it. What a model folder can do is tested at
length where folders are read (test_checkpoint.py, test_shards.py, test_template.py); here, what a request can do."""

import ast
import json
import statistics
import time
from pathlib import Path

import checkpoint_files as files
import httpx2
import pytest
from serving import CHAT, COMPLETIONS, ROOT, error, serving

from halfbyte.errors import CheckpointError
from halfbyte.loading import load_model

KEY = "key-of-the-tests"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), "--max-concurrency", "4", key=KEY) as running:
        yield running
        assert running.chat("Hello", 3).status_code == 200 and running.idle()


def sources():
    return sorted((ROOT / "halfbyte").rglob("*.py"))


def test_cve_2026_5843_code_in_a_model_folder_is_refused(tmp_path):
    """mlx-lm's model_file; CVE-2026-22807, vLLM's auto_map."""
    canary = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "model_file": "evil.py"}))
    with pytest.raises(CheckpointError, match="model_file"):
        load_model(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    "claimed",
    [
        {"x": files.entry(0, 1 << 40)}, {"x": files.entry(0, 8, [1 << 62, 8])}, {"x": files.entry(8, 0, [8])},
        {"x": files.entry(0, 8), "y": files.entry(0, 8)}, {"x": files.entry(0, 8, [-8])},
    ],
    ids=["cve_2026_7482_beyond_the_file", "cve_2025_53630_overflow", "reversed", "mlx_3363_overlapping", "negative"],
)  # fmt: skip
def test_cve_2026_7482_a_file_of_weights_cannot_lie_about_its_sizes(tmp_path, claimed):
    """Ollama, llama.cpp and mlx: places and sizes in a header that its file does not have."""
    (tmp_path / "config.json").write_text((ROOT / "halfbyte" / "tiny" / "config.json").read_text())
    files.raw(tmp_path / "model.safetensors", claimed, bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("field", ["chat_template", "template", "jinja"])
def test_cve_2026_5760_no_template_comes_from_a_request(server, field):
    """SGLang; CVE-2024-34359, llama-cpp-python."""
    plain = server.post(CHAT, {**ASK, "temperature": 0}).json()["choices"]
    given = server.post(
        CHAT, {**ASK, "temperature": 0, field: "{{ 7 * 7 }}{{ cycler.__init__.__globals__.os.system('id') }}"}
    )
    assert given.json()["choices"] == plain
    inside = server.post(CHAT, {**ASK, "chat_template_kwargs": {field: "{{ 7 * 7 }}"}})
    assert inside.status_code == 400


@pytest.mark.parametrize(
    "given", [{"tokenize": True}, {"messages": []}, {"enable_thinking": {"a": 1}}, {"enable_thinking": ["x"]},
              {"add_generation_prompt": False}, {"reasoning_effort": "x" * 65}, [], 5], ids=str,
)  # fmt: skip
def test_cve_2025_62426_template_arguments_are_listed_and_plain(server, given):
    response = server.post(CHAT, {**ASK, "chat_template_kwargs": given})
    assert response.status_code == 400 and error(response)["param"].startswith("chat_template_kwargs")


def test_cve_2026_3059_nothing_is_unpickled():
    """SGLang's and vLLM's queues. Kernels are compiled by processes of our own, and what these send is ours."""
    unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "zmq"}
    for path in (path for path in sources() if "kernels" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & unsafe, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path


@pytest.mark.parametrize("field", ["prompt_embeds", "input_embeds"])
def test_cve_2025_62164_embeddings_are_not_taken(server, field):
    response = server.post(COMPLETIONS, {field: "gASVAAAA", "max_tokens": 2})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "given", [{"n_discard": -1}, {"n": 1_000_000}, {"top_logprobs": 1_000_000_000}, {"temperature": -1e308},
              {"stop": ["x"] * 500_000}, {"max_tokens": -1}, {"best_of": 1 << 40}], ids=lambda given: next(iter(given)),
)  # fmt: skip
@pytest.mark.timed
def test_cve_2026_21869_numbers_of_requests_are_bounded(server, given):
    """llama.cpp's n_discard (unknown here, so without effect), SGLang #36856, vLLM #51447."""
    before, start = server.memory(), time.monotonic()
    response = server.post(CHAT, {**ASK, **given})
    assert response.status_code == (200 if {"n_discard", "best_of"} & set(given) else 400)
    assert time.monotonic() - start < 5 and server.memory() - before < 30e6


def test_cve_2026_21869_ids_outside_the_vocabulary(server):
    for ids in ([-1], [1 << 31], [1 << 62], [3072]):
        assert server.post(COMPLETIONS, {"prompt": ids}).status_code == 400
        assert server.post("/detokenize", {"tokens": ids}).status_code == 400


def test_vllm_51447_a_list_of_prompts_does_not_fan_out(server):
    assert server.post(COMPLETIONS, {"prompt": [[5]] * 9, "max_tokens": 2}).status_code == 400
    assert server.post(COMPLETIONS, {"prompt": [[5]] * 3, "n": 3, "max_tokens": 2}).status_code == 400
    assert len(server.post(COMPLETIONS, {"prompt": [[5]] * 2, "n": 2, "max_tokens": 2}).json()["choices"]) == 4


def test_cve_2025_48944_a_bad_pattern_of_a_tool_kills_nothing(server):
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?P<x>"}}}
    response = server.post(CHAT, {**ASK, "tools": [{"type": "function", "function": {"name": "f", "parameters": bad}}]})
    assert response.status_code == 400 and error(response)["param"] == "tools"
    assert server.http.get("/health").status_code == 200


PATTERNS = {"ghsa_rwxx_slow": "(a{1,1000}){1,1000}", "llama_cpp_22606_deep": "(" * 5000 + "a" + ")" * 5000}


@pytest.mark.timed
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_ghsa_rwxx_a_regex_is_compiled_in_time_or_refused(server, pattern):
    start = time.monotonic()
    response = server.post(CHAT, {**ASK, "response_format": {"type": "regex", "regex": pattern}})
    assert response.status_code in (200, 400) and time.monotonic() - start < 5
    assert server.chat("Hello", 1).status_code == 200


def test_ghsa_mgrm_schemas_leave_nothing_on_disk(server):
    """outlines kept every one in a cache that grew."""

    def written():
        lines = Path(f"/proc/{server.process.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["write_bytes"])

    before = written()
    for number in range(20):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": f"{number}" * 100}}}
        assert server.post(CHAT, {**ASK, "response_format": form}).status_code == 200
    assert written() - before < 1 << 16  # lines of the log


def test_cve_2025_48956_a_giant_header(server):
    answer = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"x" * 1_000_000 + b"\r\n\r\n", 5)
    assert b" 200 " not in answer[:20]


@pytest.mark.quiet
def test_cve_2025_59425_keys_are_compared_in_constant_time(server):
    """A key that is right but for its last character takes as long as one that is wrong from the first."""

    def seconds(key):
        times = []
        for _ in range(60):
            start = time.perf_counter()
            assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    near, far = seconds(KEY[:-1] + "x"), seconds("x" * len(KEY))
    assert abs(near - far) < max(near, far)  # the sure proof is the next line
    assert "hmac.compare_digest(" in (ROOT / "halfbyte" / "server" / "gate.py").read_text()


@pytest.mark.parametrize(
    "path", ["/invocations", "/v1/embeddings", "/docs", "/redoc", "/pause", "/v1/load_lora_adapter"]
)
def test_cve_2025_59425_no_route_is_open_by_accident(server, path):
    for method in ("GET", "POST"):
        assert httpx2.request(method, server.address + path).status_code == 401
        assert server.http.request(method, path).status_code == 404


def test_cve_2026_48710_the_host_header_decides_no_path(server):
    for host in ("localhost/health?x=", "localhost/health#", "127.0.0.1/health/.."):
        answer = server.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), 5)
        assert answer[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x.png", "file:///etc/passwd", "http://a\\@127.0.0.1:9/", "data:image/png;base64,AA"]
)
def test_vllm_57861ae_nothing_is_fetched_for_a_request(server, url):
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    assert server.post(CHAT, {"messages": [{"role": "user", "content": parts}]}).status_code == 400


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc", "mlx-community/Qwen3-0.6B-4bit", "tiny/../tiny", "TINY", ""]
)
def test_mlx_lm_model_the_model_of_a_request_must_be_the_one_that_is_served(server, name):
    response = server.post(CHAT, {**ASK, "model": name})
    assert response.status_code == 404 and error(response)["code"] == "model_not_found"


def test_cve_2025_46570_a_cache_is_its_owners(tmp_path):
    """And llama.cpp #27148, vllm-mlx #385: what was kept is compared id by id."""
    with serving(tmp_path, "--api-key", "other", "--max-concurrency", "2", key=KEY) as server:
        body = {"prompt": [7] * 600, "max_tokens": 3, "temperature": 0}
        mine, again = (server.post(COMPLETIONS, body).json() for _ in range(2))
        theirs = server.post(COMPLETIONS, body, headers={"Authorization": "Bearer other"}).json()
        near = server.post(COMPLETIONS, {**body, "prompt": [7] * 599 + [8]}).json()
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (mine, again, theirs, near)]
        assert cached[0] == cached[2] == 0 < cached[1] <= cached[3] == 599
        assert mine["choices"] == again["choices"] == theirs["choices"]


def test_cve_2026_22778_errors_say_nothing_of_the_inside(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
    form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}
    answers = [
        server.post(CHAT, {**ASK, "tools": [tool]}),
        server.post(CHAT, {**ASK, "response_format": form}),
        server.http.post(CHAT, content=b"\xff\xfe"),
        server.http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 0}'),
        server.http.get("/v1/models/none"),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert not any(word in answer.text for word in ("Traceback", 'File "', "0x", str(ROOT), "site-packages", ".py"))
