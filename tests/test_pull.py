"""Models from the hub: the real client against a hub on this machine that cuts, lies and changes its mind."""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from local_hub import COMMIT, TOKEN, Cut, LocalHub, Serve, Status, digest

import halfbyte
from halfbyte import download, hub, hub_cache, progress
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, StorageError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ELSEWHERE = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_HUB_OFFLINE")


def noise(count, seed):
    return random.Random(seed).randbytes(count)


FILES = {
    "config.json": b'{"model_type": "qwen3_moe"}',
    "tokenizer.json": noise(70_000, 1),
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}).encode(),
    FIRST: noise(400_000, 2),
    SECOND: noise(300_000, 3),
}
UNWANTED = {
    "modeling_custom.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x02", "consolidated.safetensors": b"twice",
    "onnx/model.safetensors": b"elsewhere", ".gitattributes": b"",
}  # fmt: skip


def point_at(address, monkeypatch):
    """As HF_ENDPOINT, which is read once, when the client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def server(monkeypatch, tmp_path):
    made = LocalHub(FILES | UNWANTED)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(download, "PAUSE", 0.001)
    monkeypatch.setattr(hub, "PAUSES", (0.001, 0.001))
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    close_session()
    yield made
    close_session()
    made.stop()


def pull(*options):
    return main(["pull", "owner/model", *options])


def folder():
    return Path(constants.HF_HUB_CACHE) / "models--owner--model" / "snapshots" / COMMIT


def assert_right(files=FILES):
    assert {path.name: path.read_bytes() for path in folder().iterdir()} == files
    assert not list(folder().parents[1].glob("blobs/*.incomplete"))


def begun_at(ranges):
    return [0 if one is None else int(one[6:-1]) for one in ranges]


def test_a_model_comes_whole_and_nothing_else_does(server, capsys):
    assert pull("--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert_right()
    assert Path(said["folder"]) == folder() and said["fetched_bytes"] == sum(map(len, FILES.values()))
    assert {name for name, _, _ in server.asked} == {"", *FILES}
    assert all(headers.get("Accept-Encoding") == "identity" for name, _, headers in server.asked if name)


def test_what_is_here_is_checked_and_not_fetched_again(server, capsys):
    pull()
    server.asked.clear()
    capsys.readouterr()
    assert pull("--json") == 0
    assert json.loads(capsys.readouterr().out)["fetched"] == []
    assert {name for name, _, _ in server.asked} == {""}


def test_row_63_ten_cuts_wrong_bytes_and_a_new_version(server, capsys):
    """Each file goes on where it was cut; the one with wrong bytes of the right size is fetched again, alone."""
    cuts = 10
    server.faults[FIRST] = [Cut(30_000)] * cuts
    server.faults[SECOND] = [Serve(noise(300_000, 9))]
    server.faults["tokenizer.json"] = [Serve(noise(70_000, 8), after=40_000)]
    assert pull() == 0
    assert_right()
    assert begun_at(server.ranges(FIRST)) == [30_000 * i for i in range(cuts + 1)]
    assert begun_at(server.ranges(SECOND)) == [0, 0]
    assert begun_at(server.ranges("tokenizer.json")) == [0, 40_000]  # the answer to the second was the whole file
    said = capsys.readouterr().err
    assert f"{SECOND}: its checksum is wrong; it is fetched again" in said
    assert said.count("checksum") == 1, "the file whose version changed was begun anew, not joined"


def test_a_download_goes_on_in_the_next_process(server, tmp_path):
    """Ctrl-C in the middle; the same command again."""
    server.faults[FIRST] = [Cut(100_000)] + [Status(503)] * 100
    environment = {
        **{name: value for name, value in os.environ.items() if name.upper() not in ELSEWHERE},
        "HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": constants.HF_HUB_CACHE,
    }  # fmt: skip
    command = [sys.executable, "-m", "halfbyte", "pull", "owner/model"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while len(server.ranges(FIRST)) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert not folder().exists(), "a snapshot appears whole"
    server.faults.clear()
    server.asked.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "100.0 kB are here already" in done.stderr
    assert begun_at(server.ranges(FIRST)) == [100_000]
    assert_right()


def test_only_a_damaged_file_is_fetched_again(server, capsys):
    pull()
    blob = (folder() / SECOND).resolve()
    blob.write_bytes(noise(300_000, 7))
    server.asked.clear()
    assert pull() == 0
    assert {name for name, _, _ in server.asked} == {"", SECOND}
    assert_right()
    assert "damaged" in capsys.readouterr().err


def test_force_fetches_everything(server):
    pull()
    server.asked.clear()
    assert pull("--force") == 0
    assert {name for name, _, _ in server.asked} == {"", *FILES}
    assert_right()


def test_a_new_commit_keeps_what_did_not_change(server):
    pull()
    server.commit, server.files = "f" * 40, {**FILES, "config.json": b'{"model_type": "qwen3"}'}
    server.asked.clear()
    assert pull() == 0
    assert {name for name, _, _ in server.asked} == {"", "config.json"}
    assert (folder() / "config.json").read_bytes() == FILES["config.json"]
    assert hub.locate("owner/model").name == "f" * 40
    assert hub.locate("owner/model", revision=COMMIT) == folder()


def test_a_folder_has_no_revisions(tmp_path, caplog):
    for name in (tmp_path, "tiny"):
        assert hub.locate(name).is_dir() and not caplog.records
        assert hub.locate(name, revision="v9") == hub.locate(name)
        assert "there is no revision v9: it is used as it is" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("held", [b"x" * 400_000, b"x" * 400_001, FILES[FIRST] + b"x", FILES[FIRST][:-1]])
def test_odd_remains_do_not_spoil_a_file(server, held):
    target = folder().parents[1] / "blobs" / digest(FIRST, FILES[FIRST])
    target.parent.mkdir(parents=True)
    download.partial_of(target).write_bytes(held)
    assert pull() == 0
    assert_right()


def test_a_server_that_never_sends_right_bytes_ends_it(server, capsys):
    server.faults[SECOND] = [Serve(noise(300_000, i)) for i in range(100, 100 + download.TRIES)]
    assert pull() == 5
    assert "wrong checksum" in capsys.readouterr().err and not folder().exists()
    server.faults.clear()
    assert pull() == 0
    assert_right()


def test_a_server_that_sends_too_much_does_not_fill_the_disk(server, capsys):
    server.faults[SECOND] = [Serve(FILES[SECOND] + noise(1000, 5))]
    assert pull() == 5
    assert "sends more than 300.0 kB" in capsys.readouterr().err


def test_passing_refusals_are_waited_for(server):
    server.faults[""] = [Status(503), Status(429)]
    server.faults[FIRST] = [Status(500), Status(503), Cut(0), Status(429)]
    assert pull() == 0
    assert_right()


def test_a_lasting_failure_says_that_it_goes_on(server, capsys):
    server.faults[FIRST] = [Cut(5000)] + [Status(503)] * 100
    assert pull() == 5
    assert "at 5.0 kB of 400.0 kB. Try again: it goes on from there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (lambda server: setattr(server, "private", True), 3, "no such repository, or it is private"),
        (lambda server: setattr(server, "gated", True), 3, "terms must be accepted first"),
        (lambda server: server.faults[""].append(Status(404, "RepoNotFound")), 3, "no such repository"),
        (lambda server: server.faults[""].append(Status(403)), 3, "refuses the access (403)"),
        (lambda server: server.faults[""].extend([Status(500)] * 3), 5, "the hub answers 500"),
        (lambda server: server.files.clear(), 3, "no *.safetensors"),
        (LocalHub.stop, 5, "cannot be reached: "),
    ],
    ids=["private", "gated", "absent", "forbidden", "broken", "empty", "down"],
)
def test_refusals_say_what_to_do(server, capsys, prepare, code, words):
    prepare(server)
    assert pull() == code
    *_, said = capsys.readouterr().err.splitlines()
    assert words in said and said.startswith("halfbyte: owner/model: ")


def test_a_revision_that_is_not_there(server, capsys):
    assert pull("--revision", "v9") == 3
    assert "no revision v9" in capsys.readouterr().err
    assert pull("--revision", "../../x") == 3


def test_a_token_opens_a_private_model_and_stays_with_the_hub(server, monkeypatch):
    other = LocalHub(FILES)
    server.private, server.elsewhere = True, other.address
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull() == 0
    assert_right()
    assert {name for name, _, headers in other.asked if "Authorization" not in headers} == {FIRST, SECOND}
    other.stop()


def test_a_proxy_of_the_environment_is_used(server, monkeypatch, capsys):
    """The local hub is its own proxy: it answers for a host that does not exist."""
    point_at("http://hub.invalid", monkeypatch)
    monkeypatch.setenv("HTTP_PROXY", server.address)
    close_session()
    assert pull() == 0
    assert_right()
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    close_session()
    assert pull() == 5
    assert "http://hub.invalid cannot be reached through HTTP_PROXY" in capsys.readouterr().err


def test_the_space_is_stated_and_checked_first(server, capsys, monkeypatch):
    total = sum(map(len, FILES.values()))
    assert pull() == 0
    assert f"6 files, {total / 1e3:.1f} kB; {total / 1e3:.1f} kB to fetch, " in (said := capsys.readouterr().err)
    assert "B free in " in said
    monkeypatch.setattr(hub_cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert pull() == 0, "nothing is missing, so nothing is needed"
    server.asked.clear()
    assert pull("--force") == 5
    assert "770.1 kB are to be fetched, and 1.0 kB are free" in capsys.readouterr().err
    assert {name for name, _, _ in server.asked} == {""}


def test_a_full_disk_exits_5(server, capsys, monkeypatch):
    def write(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.Download, "_read", write)
    assert pull() == 5
    assert "No space left on device" in capsys.readouterr().err


def test_two_at_a_time_fetch_once(server):
    from concurrent.futures import ThreadPoolExecutor

    said = []
    with ThreadPoolExecutor(2) as pool:
        server.faults[FIRST] = [Cut(1000 * i) for i in range(1, 40)]
        made = list(pool.map(lambda _: hub.fetch("owner/model", say=said.append), range(2)))
    assert [one.folder for one in made] == [folder()] * 2
    assert sorted(len(one.fetched) for one in made) == [0, 6]
    assert_right()


def forbid_sockets(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.mark.quiet
def test_row_64_offline_opens_no_socket(server, capsys, monkeypatch):
    forbid_sockets(monkeypatch)
    start = time.perf_counter()
    assert pull("--offline") == 3
    assert time.perf_counter() - start < 1
    said = capsys.readouterr().err
    assert "not in the cache" in said and "--offline forbids" in said and len(said.splitlines()) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull() == 3
    assert "HF_HUB_OFFLINE forbids" in capsys.readouterr().err


def test_offline_finds_what_was_fetched(server, capsys, monkeypatch):
    pull()
    forbid_sockets(monkeypatch)
    assert pull("--offline") == 0
    assert hub.locate("owner/model", offline=True) == hub.locate("owner/model") == folder()
    assert main(["list"]) == 0
    assert "owner/model" in capsys.readouterr().out
    (folder() / SECOND).unlink()
    with pytest.raises(CheckpointError, match="not in the cache"):
        hub.locate("owner/model", offline=True)


def test_a_model_is_removed(server, capsys):
    pull()
    capsys.readouterr()
    assert main(["rm", "owner/model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == sum(map(len, FILES.values())) + len(COMMIT)
    assert not folder().parents[1].exists()
    assert main(["rm", "owner/model"]) == 3
    assert "not in the cache" in capsys.readouterr().err


def test_a_model_that_is_asked_for_is_fetched(server):
    assert hub.locate("owner/model") == folder()
    server.asked.clear()
    assert hub.locate("owner/model") == folder()
    assert server.asked == []


@pytest.mark.parametrize(
    ("terminal", "callback", "shown"),
    [(True, None, True), (True, lambda done, total: None, False), (False, None, False)],
)
def test_python_shows_a_download_on_a_terminal(server, monkeypatch, terminal, callback, shown):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with pytest.raises(CheckpointError):  # what has come is no model
        halfbyte.load("owner/model", progress=callback)
    assert_right()
    assert ("] fetching " in screen.getvalue()) == bool(screen.getvalue()) == shown


def test_the_embedded_model_has_a_name(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert hub.locate("tiny") == Path(hub.__file__).parent / "tiny"
    assert not caplog.messages
    (tmp_path / "tiny").mkdir()
    assert hub.locate(hub.locate("tiny")).resolve() == tmp_path / "tiny"  # which says it once
    assert caplog.messages == ["./tiny: the folder of this name is used, not the embedded model"]


def test_names_that_are_none(capsys):
    for arguments in (["no-owner"], ["owner/model", "--force", "--offline"]):
        with pytest.raises(SystemExit) as stopped:
            main(["pull", *arguments])
        assert stopped.value.code == 2
    for name in ("no-owner", "~nobody-of-this-name/model", ""):
        with pytest.raises(CheckpointError, match="no such folder"):
            hub.locate(name)
    with pytest.raises(CheckpointError, match=r"test_pull\.py: it is a file\. Give the folder"):
        hub.locate(__file__)


def test_a_file_that_lists_itself_outside_is_left(server):
    server.files = {**FILES, "../evil.json": b"{}", "..\\evil.json": b"{}"}
    assert pull() == 0
    assert_right()


def test_plain_lines_where_there_is_no_terminal(server, capsys, monkeypatch):
    assert pull() == 0
    said = capsys.readouterr()
    assert "\r" not in said.err and "\x1b" not in said.err
    assert said.out.splitlines()[0].split() == ["model", "owner/model", "at", COMMIT[:7]]


def test_errors_are_ours(server):
    server.faults[""] = [Status(500)] * 3
    with pytest.raises(StorageError):
        hub.fetch("owner/model")
