"""Starting: imports that cost nothing, kernels that are compiled once, and a cache that can only cost time."""

import json
import os
import stat
import subprocess
import sys

import pytest
from streaming import TINY, budget_of
from test_models import every_model, model_of

from halfbyte import progress
from halfbyte.compilation import compile_kernels
from halfbyte.engine import logits

# Two small kernels, prepared as a model's are; prints how many were compiled, the progress and the results' bits.
START = """
import json, torch
from halfbyte.ops.dispatch import find
from halfbyte.ops.rowwise import glu, softcap
x, said = torch.linspace(-3, 3, 50), []
count = find("numba", "compiling", "prepare")(lambda: (glu(x, x), softcap(x, 2.0)), lambda *at: said.append(at))
bits = torch.stack([glu(x, x), softcap(x, 2.0)]).view(torch.int32).sum().item()
print(json.dumps([count, said, bits]))
"""
DONE = [[0, 2], [1, 2], [2, 2]]


def launch(cache):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True)


def start(cache):
    return answer(launch(cache))


def answer(process):
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(text)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A cache folder after its first start, and what that said."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, start(cache)


def kernels_of(cache):
    return sorted((cache / "halfbyte").glob("numba-*/*.kernel"))


@pytest.mark.timed
def test_import_is_instant_and_loads_nothing_heavy():
    """A tenth of a second. Best of five, in time of the CPU, so that other processes do not count."""
    code = (
        "import sys, time; start = time.process_time(); import halfbyte\n"
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() for _ in "12345"
    ]
    assert {heavy for _, heavy in said} == {"False"}
    assert min(float(seconds) for seconds, _ in said) < 0.1


def cpu_seconds_of_children():
    spent = os.times()
    return spent.children_user + spent.children_system


def test_the_first_start_compiles_and_counts(first):
    cache, (count, said, _) = first
    assert (count, said) == (2, DONE)
    assert [path.name.split("-")[0] for path in kernels_of(cache)] == ["rowwise.glu_kernel", "rowwise.softcap_kernel"]


def test_the_second_start_compiles_nothing_and_makes_the_folder_private_again(first):
    cache, (_, _, bits) = first
    (folder,) = (cache / "halfbyte").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert start(cache) == [0, [], bits]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_damaged_kernels_are_compiled_again(first):
    cache, (_, _, bits) = first
    emptied, turned = kernels_of(cache)
    whole = turned.read_bytes()
    emptied.write_bytes(b"")
    turned.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert start(cache) == [2, DONE, bits]
    assert all(path.stat().st_size > 1000 for path in (emptied, turned))


def test_a_cache_that_cannot_be_written_only_costs_time(first, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert start(tmp_path / "file") == [2, DONE, first[1][2]]


def test_processes_that_compile_at_once_do_not_break_each_other(first, tmp_path):
    together = [launch(tmp_path) for _ in range(2)]
    assert {answer(process)[2] for process in together} == {first[1][2]}
    assert len(kernels_of(tmp_path)) == 2 and len(list((tmp_path / "halfbyte").glob("numba-*/*"))) == 2


@every_model
def test_what_is_announced_is_all_that_a_model_needs(name):
    """Kernels that a text needs beyond those would be compiled in the middle of it, unannounced."""
    from halfbyte.kernels.numba.compiled import KERNELS

    model = model_of(name)
    model.compiled = False
    compile_kernels(model)
    assert compile_kernels(model) == 0
    ready = {made: len(made.signatures) for made in KERNELS}
    _, kept = logits(model, [5, 6, 7, 8])
    logits(model, [9], kept)
    assert {made: len(made.signatures) for made in KERNELS} == ready


def test_nothing_is_compiled_in_a_reply_with_experts_on_disk():
    """In a process of its own: here others have compiled what it needs."""
    code = f"""
from halfbyte.compilation import compile_kernels
from halfbyte.engine import Engine, Request
from halfbyte.loading import load_model
model = load_model({str(TINY)!r}, expert_cache={budget_of(TINY, 18)})
compile_kernels(model)
from halfbyte.kernels.numba.compiled import KERNELS
ready = {{made: len(made.signatures) for made in KERNELS}}
engine = Engine(model, model.new_cache(1, 16))
engine.submit(Request([5, 6, 7, 8], 5))
while engine.busy:
    engine.step()
print([made.__name__ for made in KERNELS if len(made.signatures) != ready.get(made)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_compilation_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)
    shown = progress.kernels()
    for done in range(3):
        shown(done, 2)
    assert capsys.readouterr().err == "compiling CPU kernels, once: 0/2\ncompiling CPU kernels, once: 1/2\n"
