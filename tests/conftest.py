"""Uninitialised memory is NaN in tests: a kernel that forgets an element fails. Without a GPU, Triton interprets."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT

import browser
import pytest
import torch
from hypothesis import settings
from metal import executor

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
    items.sort(key=compiles)  # they come last, and the others stay in their order


def compiles(item):
    return item.path.name == "test_cross_compile.py"


@pytest.fixture(scope="session", autouse=True)
def compilations(request):
    """Whether kernels compile for other GPUs, by the run that test_cross_compile.py asks for: under way from now on."""
    runs = [item.callspec.params["run"] for item in request.session.items if compiles(item)]
    alone = len(runs) == len(request.session.items)
    cores, begun = os.cpu_count() or 1, []

    def compiled(run):
        environment = {**os.environ, "TRITON_INTERPRET": "0"}  # there Triton compiles, where here it interprets
        command = ["nice", "-n", "19", sys.executable, Path(__file__).with_name("cross_compile.py"), *run]
        process = subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=environment)
        begun.append(process)
        said, _ = process.communicate()
        return process.returncode, said

    with ThreadPoolExecutor(cores if alone else max(1, cores - 1)) as pool:
        yield {run: pool.submit(compiled, run) for run in runs}
        pool.shutdown(wait=False, cancel_futures=True)
        for process in begun:  # where the session ends early
            process.terminate()


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
