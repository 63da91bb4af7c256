"""The commands about models, run as a user runs them; exit codes 2 usage, 3 bad model, 4 memory, 5 storage."""

import json
import shutil

import pytest
import torch

from halfbyte.cache import bytes_of
from halfbyte.cli import main
from halfbyte.loading import load_model


@pytest.fixture()
def ask(capsys):
    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def refused(ask, *arguments):
    with pytest.raises(SystemExit) as exit:
        ask(*arguments)
    assert exit.value.code == 2


def test_info_says_what_a_model_is(ask, folder):
    status, text, _ = ask("info", folder)
    assert status == 0
    for said in ("qwen3_5_moe", "4 of width 128", "4 of 8 a token", "4-bit affine, groups of 64: 99.2%", "888.2 kB"):
        assert said in text
    values = json.loads(ask("info", folder, "--json")[1])
    assert values["formats"] == {"4-bit affine, groups of 64": 1543168, "8-bit affine, groups of 64": 4608}
    assert values["weights"] == 888232 and values["experts_per_token"] == 4


def test_info_reads_no_weights(ask, folder, monkeypatch):
    def read(*arguments):
        raise AssertionError("bytes of weights were read")

    monkeypatch.setattr("halfbyte.checkpoint.weights.read", read)
    assert ask("info", folder)[0] == 0


def test_plan_measures_and_says_whether_it_fits(ask, folder, monkeypatch):
    status, text, _ = ask("plan", folder, "--device", "cpu", "--context", "100")
    assert status == 0 and "it fits" in text and "tok/s" in text
    values = json.loads(ask("plan", folder, "--device", "cpu", "--context", "100", "--json")[1])
    model = load_model(folder)
    kept = bytes_of(model.kept, 1, 100, 1, torch.float32)  # as on a CPU: twice what a GPU keeps of each token
    assert values["device_bytes"] == 888232 + kept and kept > 205824 + 100 * 2 * 512
    more = values["bytes_per_token"] + kept - bytes_of(model.kept, 1, 0, 1, torch.float32)
    assert values["tokens_per_second_at_context"] == pytest.approx(values["read_bytes_per_second"] / more)
    speed = values["read_bytes_per_second"] / values["bytes_per_token"]
    assert values["tokens_per_second_at_most"] == pytest.approx(speed)
    monkeypatch.setattr("halfbyte.memory.available", lambda device: 1000)
    status, text, _ = ask("plan", folder, "--device", "cpu")
    assert status == 0 and "too little" in text and "--ram" in text


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_plan_of_a_device_that_is_not_here(ask, folder, capsys, monkeypatch, device):
    monkeypatch.setattr(torch.cuda if device == "cuda" else torch.backends.mps, "is_available", lambda: False)
    refused(ask, "plan", folder, "--device", device)
    assert "argument --device: torch finds no" in capsys.readouterr().err


def test_doctor_says_what_is_used_and_why_not_the_rest(ask):
    status, text, _ = ask("doctor")
    assert status == 0
    for said in ("halfbyte  0.", "cuda", "mps", "numba", "threads", "free on cpu", "i16", "kernels for 22 of 22 ops"):
        assert said in text
    assert "executed and race-checked on a CPU, not yet timed on Apple hardware" in " ".join(text.split())
    assert json.loads(ask("doctor", "--json")[1])["devices"].keys() == {"cuda", "mps", "cpu"}


def test_perplexity_of_a_text(ask, folder, tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    options = (folder, tmp_path / "text", "--device", "cpu", "--context", 64, "--json")
    values = json.loads(ask("perplexity", *options)[1])
    compared = json.loads(ask("perplexity", *options, "--kl", folder)[1])
    assert values["perplexity"] == compared["perplexity"] > 1
    assert compared["kl"] == pytest.approx(0, abs=1e-9) and compared["agreement"] == 1
    text = ask("perplexity", *options[:-1], "--kl", folder)[1]
    assert "nats a token" in text and "100.00%" in text


def test_perplexity_is_that_of_the_logits(folder):
    import torch

    from halfbyte.engine import logits
    from halfbyte.loading import load_model
    from halfbyte.quality import quality

    model, ids = load_model(folder), [(5 * i + 1) % 300 for i in range(41)]
    parts = [(ids[0:17], ids[1:17]), (ids[16:33], ids[17:33]), (ids[32:41], ids[33:41])]
    losses = [
        torch.nn.functional.cross_entropy(logits(model, window[:-1])[0], torch.tensor(after), reduction="sum")
        for window, after in parts
    ]
    found = quality(model, ids, context=16)
    assert found.tokens == 40 and found.loss == pytest.approx(float(sum(losses)) / 40, rel=1e-5)


def test_perplexity_refuses(ask, folder, tmp_path):
    (tmp_path / "empty").write_text("")
    refused(ask, "perplexity", folder, tmp_path / "empty", "--device", "cpu")
    refused(ask, "perplexity", folder, tmp_path / "absent", "--device", "cpu")


def test_verify_finds_a_value_that_is_no_number(ask, folder, tmp_path):
    assert ask("verify", folder)[0] == 0
    shutil.copytree(folder, tmp_path / "bad")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "bad" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("switch_mlp.up_proj.scales"))
    tensors[name].view(-1)[-5] = float("nan")
    save_file(tensors, path, {"format": "mlx"})
    status, _, said = ask("verify", tmp_path / "bad")
    assert status == 3 and name.split("model.")[-1] in said


@pytest.mark.parametrize(("text", "said"), [("{", "not a tokenizer"), (None, "there is no such file")])
def test_verify_opens_the_tokenizer(ask, folder, tmp_path, text, said):
    assert "tokenizer" in ask("verify", folder)[1]
    path = shutil.copytree(folder, tmp_path / "bad") / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    status, _, error = ask("verify", tmp_path / "bad")
    assert status == 3 and "tokenizer.json: " in error and said in error


def test_verify_knows_the_hub_s_checksums(ask, folder, tmp_path):
    repository = tmp_path / "models--owner--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "main"
    blobs.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    shutil.move(snapshot / "model.safetensors", blobs / ("0" * 64))
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{'0' * 64}")
    status, _, said = ask("verify", snapshot)
    assert status == 3 and "sha256" in said


@pytest.mark.parametrize("command", ["info", "plan", "verify", "generate"])
def test_a_bad_model_exits_3_and_says_where(ask, command, tmp_path):
    more = ("-p", "x") if command == "generate" else ()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, _, said = ask(command, tmp_path, *more)
    assert status == 3 and "config.json" in said and "qwen3_moe" in said and len(said.splitlines()) == 1
    assert ask(command, tmp_path / "absent", *more)[0] == 3


def test_offline_fetches_nothing(ask, monkeypatch):
    import socket

    def connect(*arguments):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket.socket, "connect", connect)
    status, _, said = ask("info", "some-owner/some-model", "--offline")
    assert status == 3 and "--offline" in said
