"""Starting: imports that cost nothing, kernels that are compiled once, and a cache that can only cost time."""

import hashlib
import json
import os
import pickle
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
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=pipe, stderr=pipe, text=True)


def start(cache):
    return answer(launch(cache))


def start_with_warnings(cache):
    """What a start says, and what it warns of in that folder."""
    process = launch(cache)
    text, warnings = process.communicate(timeout=300)
    assert process.returncode == 0, warnings
    return json.loads(text), [line for line in warnings.splitlines() if str(cache) in line]


def answer(process):
    text, warnings = process.communicate(timeout=300)
    assert process.returncode == 0, warnings
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


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_second_start_compiles_nothing(first):
    cache, (_, _, bits) = first
    (folder,) = (cache / "halfbyte").iterdir()
    assert mode(folder) == mode(folder.parent) == 0o700
    assert {mode(path) for path in kernels_of(cache)} == {0o600}
    assert start_with_warnings(cache) == ([0, [], bits], [])


class Planted:
    """Code in the place of a kernel: it says that it ran."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no modes here")
def test_a_folder_that_others_can_write_to_is_not_used(first, tmp_path):
    """Row 70: whatever lies in it may be theirs, and is neither run nor written."""
    cache, (_, _, bits) = first
    kernel = kernels_of(cache)[0]
    before, code = kernel.read_bytes(), pickle.dumps(Planted(tmp_path / "ran"))
    kernel.write_bytes(hashlib.sha256(code).digest() + code)
    kernel.parent.chmod(0o777)
    try:
        said, warnings = start_with_warnings(cache)
        assert said == [2, DONE, bits]
        assert not (tmp_path / "ran").exists() and mode(kernel.parent) == 0o777
        assert len(warnings) == 1 and warnings[0].startswith(f"{kernel.parent}: ") and "chmod 700" in warnings[0]
        assert kernel.read_bytes().endswith(code)
    finally:
        kernel.parent.chmod(0o700)
        kernel.write_bytes(before)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """The store of kernels, as in a process that has not looked for its folder yet; that is to be below `tmp_path`."""
    from halfbyte.kernels.numba import store

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store.folder.cache_clear()
    yield store
    store.folder.cache_clear()


def wanted(store):
    return store.base() / store.version()


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")


@posix
@pytest.mark.parametrize(("level", "loose"), [(1, 0o770), (1, 0o707), (0, 0o720), (0, 0o702)])
def test_folders_that_others_can_write_to_are_refused_once(store, caplog, level, loose):
    """The one of this version, and the one above, where they could put another in its place."""
    wanted(store).mkdir(parents=True)
    spoilt = [wanted(store), store.base()][level]
    store.base().chmod(0o755)
    spoilt.chmod(loose)
    assert store.folder() != wanted(store) and store.folder() is store.folder()
    (warning,) = caplog.messages
    assert warning.startswith(f"{spoilt}: ") and "chmod 700" in warning and "XDG_CACHE_HOME" in warning
    assert not store.state()["lasts"] and not list(wanted(store).iterdir()) and mode(spoilt) == loose


@posix
def test_a_folder_of_another_user_is_refused(store, caplog, monkeypatch):
    assert store.folder() == wanted(store) and not caplog.messages
    store.folder.cache_clear()
    someone = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: someone)
    assert store.folder() != wanted(store)
    (warning,) = caplog.messages
    assert warning.startswith(f"{store.base()}: ") and "another user" in warning and "XDG_CACHE_HOME" in warning
    assert "remove it" in warning and "chmod" not in warning, "who may not do that is not told to"


@posix
@pytest.mark.parametrize("given", ["", "cache"])
def test_nobody_home(store, caplog, monkeypatch, tmp_path, given):
    """No folder of this name is made wherever a program happens to be started; a relative name does not count."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert not store.folder().is_relative_to(tmp_path) and not list(tmp_path.iterdir())
    (warning,) = caplog.messages
    assert "no home folder" in warning and "XDG_CACHE_HOME" in warning


@posix
def test_a_folder_of_ours_is_used_wherever_it_lies(store, caplog, tmp_path):
    """Others may read it, a link may lead to it, and what lies above it is not judged."""
    real = tmp_path / "elsewhere"
    real.mkdir()
    real.chmod(0o755)
    store.base().symlink_to(real)
    tmp_path.chmod(0o777)
    assert store.folder() == wanted(store) and mode(wanted(store)) == 0o700 and not caplog.messages


@posix
def test_what_is_made_is_ours_alone_from_the_start(store, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        kept = store.Kept(store.digest)
        kept.save(("types",), b"code")
    finally:
        os.umask(before)
    path = kept.path(("types",))
    assert path.parent == wanted(store) and mode(path) == 0o600 and kept.has(("types",))
    assert {mode(above) for above in path.parents if above.is_relative_to(tmp_path / "new")} == {0o700}


@posix
@pytest.mark.parametrize("spoilt", ["mode", "owner"])
def test_files_that_others_can_write_to_are_compiled_again(store, caplog, monkeypatch, spoilt):
    kept, kinds = store.Kept(store.digest), [("one",), ("two",)]
    for kind in kinds:
        kept.save(kind, b"code")
    if spoilt == "mode":
        for kind in kinds:
            kept.path(kind).chmod(0o622)
    else:
        someone = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: someone)
    assert not any(kept.has(kind) for kind in kinds)
    (warning,) = caplog.messages
    assert warning.startswith(f"{wanted(store)}: ") and "compiled again" in warning
    monkeypatch.undo()
    kept.save(kinds[0], b"code")
    assert mode(kept.path(kinds[0])) == 0o600


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
    said, warnings = start_with_warnings(tmp_path / "file")
    assert said == [2, DONE, first[1][2]]
    assert len(warnings) == 1 and "XDG_CACHE_HOME" in warnings[0]


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


def test_nothing_is_compiled_for_the_first_who_draws_otherwise():
    """Several at a time, by everything that a request may ask for; in a process of its own, as above."""
    code = f"""
from halfbyte.compilation import compile_kernels
from halfbyte.engine import Engine, Request
from halfbyte.loading import load_model
from halfbyte.sampling import SamplingParams
model = load_model({str(TINY)!r})
compile_kernels(model, slots=16)
from halfbyte.kernels.numba.compiled import KERNELS
ready = {{made: len(made.signatures) for made in KERNELS}}
engine = Engine(model, model.new_cache(16, 16))
drawn = dict(temperature=0.8, top_k=20, top_p=0.9)
penalised = dict(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
for more in ({{}}, drawn, drawn | dict(min_p=0.1), drawn | penalised) * 4:
    engine.submit(Request([5, 6, 7, 8], 5, SamplingParams(**more)))
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
