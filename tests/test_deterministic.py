"""--deterministic: prompts have steps of their own, and the setting needs no GPU."""

import subprocess
import sys

import pytest
import torch

from halfbyte import hub
from halfbyte.cli import parser
from halfbyte.commands.arguments import require_device
from halfbyte.engine import Engine, Request
from halfbyte.loading import load_model
from halfbyte.ops.dispatch import is_deterministic, make_deterministic


@pytest.fixture
def deterministic():
    make_deterministic()
    yield
    make_deterministic(False)


def test_a_prompt_has_its_steps_to_itself(deterministic):
    model = load_model(hub.locate("tiny"))
    engine = Engine(model, model.new_cache(2, 64, chunk=4))
    answering, prompting = Request([5, 6], 20), Request(list(range(7, 17)), 20)
    engine.submit(answering)
    engine.step()
    engine.submit(prompting)
    steps = [engine.step() for _ in range(3)]
    assert [[made.request for made in step] for step in steps] == [[], [], [prompting]]
    assert {made.request for made in engine.step()} == {answering, prompting}


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_it_is_asked_of_gpus_alone(command, monkeypatch):
    """Elsewhere it would only keep a server from answering while it reads a prompt."""
    given = parser([command]).parse_args([command, "--deterministic"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device(given)
    assert not is_deterministic()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        require_device(given)
        assert is_deterministic()
        make_deterministic(False)
        given.device = "cpu"
        require_device(given)
        assert not is_deterministic()
    finally:
        make_deterministic(False)


def test_the_setting_needs_no_triton():
    """A CPU build of torch comes without it."""
    code = "import sys; sys.modules['triton'] = None; from halfbyte.ops.dispatch import make_deterministic; "
    done = subprocess.run([sys.executable, "-c", code + "make_deterministic()"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not is_deterministic(), "of that process alone"
