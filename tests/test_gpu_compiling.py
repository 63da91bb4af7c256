"""GPU kernels are compiled ahead by processes, once: shown without a GPU, by a driver that answers with a target."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from halfbyte.kernels.triton import compiling

TESTS = Path(__file__).parent
SCRIPT = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
import torch, triton
from cross_compile import Pretended, TARGETS
from halfbyte.kernels.triton import compiling, device
from halfbyte.ops.dispatch import using
from halfbyte.ops.rowwise import rms_norm, softcap

target, facts = TARGETS["sm_90"]
triton.runtime.driver.set_active(Pretended(target))
device.pretend(facts)
said = []

def steps():
    with using("triton"):
        for _ in range(3):
            rms_norm(torch.empty(4, 64, device="meta"))
            softcap(torch.empty(4, 64, device="meta"), 30.0)

print(compiling.prepare(steps, lambda done, total: said.append((done, total))), said)
print(compiling.prepare(steps, lambda done, total: said.append((done, total))), len(said))
for _ in range(2):
    print(compiling.prepare(lambda: print("rehearsed"), None, "a model"))
with compiling.rehearsal() as noted:
    steps()
print(len(noted), all(compiling.compiled(kernel.key) for kernel in noted))
"""


SAID = ["2 [(0, 2), (1, 2), (2, 2)]", "0 3", "rehearsed", "0", "0", "2 True"]
MARKED = f"""
import os, sys
sys.path.insert(0, {str(TESTS.parent)!r})
from halfbyte.kernels.triton import compiling

print([compiling.prepare(lambda: None, None, "a model") for _ in range(2)], os.environ["TRITON_CACHE_DIR"])
"""


def run(script, cache):
    """The lines that it prints, and those of its warnings."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_kernels_are_compiled_by_other_processes_and_found_afterwards(tmp_path):
    assert run(SCRIPT, tmp_path) == (SAID, [])


def test_without_a_folder_to_keep_them_they_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").write_text("in the way")
    said, warnings = run(SCRIPT, tmp_path / "file" / "cache")
    assert said == SAID and len(warnings) == 1


@pytest.mark.parametrize("place", ["/proc/nope", "/dev/null", "", "open"])
def test_a_folder_that_cannot_be_used_is_named_once(tmp_path, place):
    """Row 70: one that cannot be written, and one that everybody can write code into."""
    if place == "open":
        place = tmp_path / "open"
        place.mkdir()
        place.chmod(0o777)
    (said,), warnings = run(MARKED, place)
    assert said.startswith("[0, 0] ") and "halfbyte-triton-" in said
    assert len(warnings) == 1 and warnings[0].startswith(f"{place}: ") and "TRITON_CACHE_DIR" in warnings[0]
    assert not Path(said.removeprefix("[0, 0] ")).exists(), "it is that process's"


class State(NamedTuple):
    st_mode: int
    st_uid: int
    st_gid: int


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize(
    ("mode", "owner", "members", "why"),
    [
        (0o755, 1000, ["me"], ""),
        (0o775, 1000, ["me"], ""),  # the group that most systems make for each user
        (0o775, 1000, ["me", "you"], "its group can write to it"),
        (0o757, 1000, ["me"], "everybody can write to it"),
        (0o700, 1001, ["me"], "it belongs to another user"),
    ],
)
def test_folders_that_others_could_put_code_into(mode, owner, members, why, monkeypatch):
    import grp
    import pwd

    mine, yours = Mock(pw_name="me", pw_gid=1000), Mock(pw_name="you", pw_gid=1001)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwall", lambda: [mine, yours])
    monkeypatch.setattr(pwd, "getpwuid", {1000: mine}.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", {1000: Mock(gr_mem=members)}.__getitem__)
    assert compiling.exposed(State(mode, owner, 1000)) == why
    assert compiling.exposed(State(0o775, 1000, 4242)) == "its group can write to it", "nobody knows who is in it"
