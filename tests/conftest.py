"""Uninitialised memory is NaN in tests: a kernel that forgets an element fails. Without a GPU, Triton interprets."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import browser
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

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
# The page's tests click and type in a real browser. Where CI runs, there is one.
if not browser.installed():
    collect_ignore.append("test_page.py")

# `pytest --hypothesis-profile full` is what .ci/full runs.
settings.register_profile("default", deadline=None)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile("default")


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
