"""Uninitialised memory is NaN in tests: a kernel that forgets an element fails. Without a GPU, Triton interprets."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import browser
import pytest
import torch
import turns
from compilations import under_way
from hypothesis import settings
from metal import executor

from halfbyte import machine

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

executor.install()  # without an Apple GPU, a CPU executes Metal's kernels

# There is no Triton for macOS. These files are about its kernels; others leave its language out.
collect_ignore = [
    "test_batched_decode.py",
    "test_cross_compile.py",
    "test_fused_experts.py",
    "test_fused_projections.py",
    "test_fusion.py",
    "test_gpu_compiling.py",
    "test_graph.py",
][: None if find_spec("triton") is None else 0]

# `pytest --hypothesis-profile full` is what .ci/full runs.
settings.register_profile("default", deadline=None)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """Those that are quiet come late and together, where they wait for no long test beside them; compilations last.

    Whoever measures time has a second try: the machine may have been somebody else's for a second.
    """
    items.sort(key=lambda item: (compiles(item), is_quiet(item)))
    for item in items:
        if is_quiet(item) or item.get_closest_marker("timed") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))


def compiles(item):
    return item.path.name == "test_cross_compile.py"


def is_quiet(item):
    return item.get_closest_marker("quiet") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Idle threads spin for a while, on cores that the other process needs: in these processes they sleep at once."""
    os.environ["GOMP_SPINCOUNT"] = "0"


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        machine.threading_layer()  # has begun its threads; what tests start has the environment that users have
        os.environ.pop("GOMP_SPINCOUNT", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """With `pytest -n`, the other processes wait while a test that is marked `quiet` runs, fixtures and all."""
    if not hasattr(item.config, "workerinput") or compiles(item):  # which only waits for other processes
        return (yield)
    shared = Path(item.config.getoption("basetemp")).parent  # where each process has a folder
    with turns.turn(shared, alone=is_quiet(item)):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def compilations(request, tmp_path_factory):
    """Whether kernels compile for other GPUs, by the run that test_cross_compile.py asks for: under way from now on."""
    runs = [item.callspec.params["run"] for item in request.session.items if compiles(item)]
    alone = len(runs) == len(request.session.items)
    cores, folder = os.cpu_count() or 1, tmp_path_factory.getbasetemp()
    worker = getattr(request.config, "workerinput", {"workercount": 1})
    if worker["workercount"] > 1:
        folder = folder.parent
        if int(worker["workerid"].removeprefix("gw")) % 2:
            runs.reverse()  # two processes that begin at either end meet in the middle
    threads = max(1, (cores if alone else cores - 1) // worker["workercount"])
    with under_way(runs, folder, threads) as results:
        yield results


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model that speaks: mlx-lm's random qwen3_5_moe-4bit with a small real tokenizer, under an odd name."""
    import small_tokenizers
    from model_goldens import FOLDER

    made = tmp_path_factory.mktemp("a model") / "café"
    shutil.copytree(FOLDER / "qwen3_5_moe-4bit", made)
    return small_tokenizers.save(made, generation_config={"eos_token_id": 3, "do_sample": False})


@pytest.fixture
def preadv(monkeypatch):
    """`preadv(stand_in)` puts another function in the place of os.preadv: Python then reads, not compiled code."""

    from halfbyte import expert_reader

    def put(stand_in):
        monkeypatch.setattr(expert_reader, "compiled", lambda name: None)
        monkeypatch.setattr(os, "preadv", stand_in)

    return put


@pytest.fixture(scope="session")
def resident():
    """The embedded model, all in memory."""
    from streaming import TINY

    from halfbyte.loading import load_model

    return load_model(TINY)


@pytest.fixture
def copied(tmp_path):
    """The embedded model in a folder that a test may spoil."""
    from streaming import TINY

    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def pytest_terminal_summary(terminalreporter):
    sources = sorted((Path(__file__).parents[1] / "halfbyte").rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    terminalreporter.write_line(f"the package has {lines} lines in {len(sources)} files")
    if not browser.installed():  # said aloud: a skip is one letter among thousands
        terminalreporter.write_line(f"WARNING: {browser.MISSING}", yellow=True, bold=True)
