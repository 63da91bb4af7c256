"""Every example, run as a newcomer runs it: its own process, in an empty folder, with the embedded model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {  # what each must print
    "batch": r"a fox and a lantern: .*fox.*\n\na.* tokens, \d+ a second together",
    "bigger_than_memory": r"fox.*1\.0 MB of experts in memory: \d+% of .*\n.* MB read .* GB/s\nthe reply is that of",
    "convert_and_perplexity": r"original +perplexity +\d.*\n6\.\d bits.*\n3\.\d bits.*\n2\.\d bits.* same guess \d+%",
    "load_and_stream": r"fox.*lantern.*\d+ tokens, \d+ a second; it ended by 'stop'",
    "op_from_torch": r"33\.6 MB of float32 became 5\.2 MB\nqmm ran in (numba|triton)\n",
    "openai_client": r"fox.*lantern.*\n\n21 tokens of a prompt, \d+ of a reply\n",
    "shared_prompt": r"\d+ shared tokens in .*\nWhere did Toby live\? .*Toby.*\nWho is .* fox.*\nIs there an owl",
}


def test_every_example_is_run():
    assert sorted(SAYS) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(path, tmp_path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[path.stem], done.stdout, re.S), done.stdout
    assert not list(tmp_path.iterdir())
