"""Experts on disk, and what disks and people do to them: rows 55 to 58 of the fault plan, for a model that runs.

test_reading.py has them for one that is loaded.
"""

import itertools
import logging
import math
import os
import resource
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from streaming import TINY, beside, budget_of, failing_after, shard, share_a_scale, tiered, tokens
from test_reading import limited

from halfbyte import cli, expert_reader
from halfbyte.accounting import skeleton
from halfbyte.checkpoint import finite
from halfbyte.checkpoint.shards import State
from halfbyte.errors import CheckpointError, StorageError
from halfbyte.expert_ranges import Range, Where
from halfbyte.expert_reader import ExpertReader
from halfbyte.host_experts import in_host_memory
from halfbyte.kernels.numba.reads import are_numbers
from halfbyte.loading import load_model


def test_row_55_deleted_while_it_runs(resident, copied, caplog):
    model = load_model(copied, expert_cache=budget_of(TINY, 5))
    shard(copied).unlink()
    with caplog.at_level(logging.WARNING):
        assert tokens(model) == tokens(resident)
    assert caplog.text.count("it was deleted") == 1


def test_row_56_cut_while_it_runs(resident, copied):
    """An error that names file and tensor; a map would have killed the process."""
    model = load_model(copied, expert_cache=budget_of(TINY, 5))
    assert tokens(model, 2) == tokens(resident, 2)
    os.truncate(shard(copied), 2000)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: it ends at byte \d+; tensor '.*switch_mlp.*' needs"
    ):
        tokens(model)


def test_row_56_overwritten_while_it_runs(copied):
    """Other bytes of the same size: found by the time at which they were written, before anything is computed."""
    model = load_model(copied, expert_cache=budget_of(TINY, 5))
    with shard(copied).open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        file.write(os.urandom(100_000))
    with pytest.raises(CheckpointError, match="changed after it had been checked"):
        tokens(model)


def test_row_13_check_weights(copied, capsys):
    """Of 16 experts in memory eight are looked at, unless somebody asks for all, or for none."""
    weights = load_file(shard(copied))
    name = next(name for name in weights if name.endswith("layers.3.mlp.switch_mlp.up_proj.scales"))
    seen = {15 * part // 7 for part in range(8)}
    weights[name][min({*range(16)} - seen), 0, 0] = float("nan")
    save_file(weights, shard(copied), {"format": "mlx"})
    command = ["generate", str(copied), "-p", "A fox.", "-m", "1", "--temp", "0"]
    for how, status in {"none": 0, "sampled": 0, "all": 3}.items():
        assert cli.main([*command, "--check-weights", how]) == status
    assert "tensor 'layers.3.mlp.switch_mlp.up_proj.scales' holds NaN" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["lfu", "lfu-ahead"])
def test_row_13_no_number_among_experts_on_disk(copied, policy):
    """Found when the expert is read for the first time, before anything is computed with it."""
    weights = load_file(shard(copied))
    name = next(name for name in weights if name.endswith("layers.3.mlp.switch_mlp.up_proj.scales"))
    weights[name][:, -1, -1] = float("nan")
    save_file(weights, shard(copied), {"format": "mlx"})
    model = load_model(copied, expert_cache=budget_of(TINY, 5), expert_policy=policy)
    for _ in range(2):  # what was refused is not known as seen
        with pytest.raises(CheckpointError, match=f"model.safetensors: tensor '{name}' holds NaN or infinite values"):
            tokens(model)


@pytest.mark.parametrize("expert", [0, 3])
def test_row_13_no_number_in_any_expert_on_disk_by_the_command(copied, expert):
    """In a process of its own: what rehearses a step there, before kernels are loaded, sees no weights."""
    weights = load_file(shard(copied))
    for name in weights:
        if name.endswith("switch_mlp.up_proj.scales"):
            weights[name][expert] = float("nan")
    save_file(weights, shard(copied), {"format": "mlx"})
    command = [sys.executable, "-m", "halfbyte", "generate", str(copied), "-p", "A fox met an owl.", "-m", "1"]
    done = subprocess.run([*command, "--expert-cache", str(budget_of(TINY, 5))], capture_output=True, text=True)
    assert done.returncode == 3 and "holds NaN or infinite values" in done.stderr, done.stderr


@pytest.mark.parametrize(("how", "refused"), [("none", False), ("sampled", False), ("all", True)])
def test_row_13_check_weights_in_host_memory(copied, how, refused):
    weights = load_file(shard(copied))
    name = next(name for name in weights if name.endswith("layers.3.mlp.switch_mlp.up_proj.scales"))
    weights[name][1] = float("nan")  # 0, 2, 4, ... are looked at of 16, unless somebody asks for all
    save_file(weights, shard(copied), {"format": "mlx"})
    with pytest.raises(CheckpointError, match="holds NaN") if refused else nullcontext():
        in_host_memory(skeleton(copied)[1], check=how)


@pytest.mark.parametrize("load", [load_model, lambda folder: beside(folder, 7), lambda folder: tiered(folder, 7, 40)])
def test_row_13_no_number_for_a_whole_stack(copied, load):
    share_a_scale(copied, {2: 3.0})
    weights = load_file(shard(copied))
    (name,) = (name for name in weights if name.endswith("global_scale"))
    save_file({**weights, name: torch.full_like(weights[name], float("nan"))}, shard(copied), {"format": "mlx"})
    with pytest.raises(CheckpointError, match=r"down_proj\.global_scale' holds NaN"):
        load(copied)


def test_row_56_cut_while_it_reads_ahead(resident, copied):
    """A guess that cannot be read is nobody's error; an expert that is needed is."""
    model = load_model(copied, expert_cache=budget_of(TINY, 16), expert_policy="lfu-ahead")
    assert tokens(model) == tokens(resident) and model.residency.shelves[0].cache.read_ahead
    whole = shard(copied).read_bytes()
    os.truncate(shard(copied), 2000)
    (cache,) = (shelf.cache for shelf in model.residency.shelves)
    first = next(iter(model.residency.lenders.values()))
    first.ahead.begin(first.following, list(range(16)), [])
    first.ahead.settle()
    assert not any(key in cache.places for key in [(1, expert) for expert in first.ahead.experts])
    with pytest.raises(CheckpointError, match="it ends at byte"):
        tokens(model)
    shard(copied).write_bytes(whole)
    with pytest.raises(CheckpointError, match="changed after it had been checked"):
        tokens(model)


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.uint8, "mxfp4")]
)
def test_compiled_code_sees_what_is_no_number(dtype, mode):
    """In any of the slots it is asked about, at either end of one, and in no other."""
    slots, mask = torch.zeros(5, 33, dtype=dtype), finite.mask_of(dtype, mode)
    bad = mask if dtype == torch.uint8 else -math.inf
    about = [np.array([number]) for number in (slots.data_ptr(), slots[0].nbytes, slots.itemsize, mask)]
    for slot, at in itertools.product(range(5), (0, 16, 32)):
        slots[slot, at] = bad
        for asked in ([0, 2, 4], [1, 3], [2]):
            assert are_numbers(np.array(asked), *about) == (slot not in asked)
        slots[slot, at] = mask - 1 if dtype == torch.uint8 else torch.finfo(dtype).max
    assert are_numbers(np.arange(5), *about)


def test_a_guess_whose_reads_do_not_begin_is_forgotten(resident, monkeypatch):
    model = load_model(TINY, expert_cache=budget_of(TINY, 16), expert_policy="lfu-ahead")
    first = next(iter(model.residency.lenders.values()))
    cache = first.shelf.cache
    for error, is_raised in ((StorageError("no file"), False), (MemoryError(), True)):
        with monkeypatch.context() as patch:
            patch.setattr(model.residency.reader, "start", Mock(side_effect=error))
            with pytest.raises(MemoryError) if is_raised else nullcontext():
                first.ahead.begin(first.following, list(range(16)), [])
        assert first.ahead.experts and not any((1, expert) in cache.places for expert in first.ahead.experts)
        assert tokens(model) == tokens(resident)


def test_compiled_code_leaves_to_python_what_it_cannot_read(resident, monkeypatch):
    """Descriptors that are none: the system refuses each of its reads, and Python opens the files itself."""
    model = load_model(TINY, expert_cache=budget_of(TINY, 5))
    monkeypatch.setattr(model.residency.reader, "_opened", lambda paths: nullcontext({}))
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(n := real(fd, views, at)) or n)
    assert tokens(model, 3) == tokens(resident, 3) and sum(read) == model.residency.reader.bytes


@pytest.mark.parametrize("flags", sorted({expert_reader.NOWAIT, 0}), ids=lambda flags: "now" if flags else "on threads")
def test_compiled_code_reads_what_is_there(resident, copied, monkeypatch, flags):
    monkeypatch.setattr(expert_reader, "NOWAIT", flags)
    model = load_model(copied, expert_cache=budget_of(TINY, 5))
    for lender in model.residency.lenders.values():
        lender.following = None  # what is read ahead is read on threads
    if flags:
        shard(copied).read_bytes()  # the system may have forgotten it
        monkeypatch.setattr(model.residency.reader, "_work", lambda batch: batch.leave(AssertionError("threads read")))
    monkeypatch.setattr(os, "preadv", lambda *args: pytest.fail("Python reads"))
    assert tokens(model, 3) == tokens(resident, 3)


@pytest.mark.skipif(not expert_reader.NOWAIT, reason="a system that does not say what it has in memory")
def test_what_the_system_has_not_in_memory_is_read_on_threads(tmp_path):
    """The first half of a file was dropped from there, as far as the system obliged; whoever asks for all gets all."""
    file, data = tmp_path / "experts", os.urandom(1 << 20)
    file.write_bytes(data)
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, len(data) // 2, os.POSIX_FADV_DONTNEED)
        state = State.of(os.fstat(opened.fileno()))
    memory, size = bytearray(len(data)), 1 << 16
    wanted = [Range(file, at, "w", memoryview(memory)[at : at + size]) for at in range(0, len(data), size * 2)]
    where = Where([file], np.array([[(0, one.start)] for one in wanted]), np.array([size]))
    experts, slots, memory_at = range(len(wanted)), range(0, 2 * len(wanted), 2), np.array([wanted[0].address])
    reader = ExpertReader({file: state})
    filled = reader.take(where, experts, slots, memory_at)[:, 0]
    assert filled[-1] and reader.bytes == size * filled.sum()
    for one, whole in zip(wanted, filled, strict=True):
        assert bytes(one.view) == data[one.start : one.stop] if whole else not any(one.view)
    reader.start(one for one, whole in zip(wanted, filled, strict=True) if not whole)
    reader.finish()
    assert all(bytes(one.view) == data[one.start : one.stop] for one in wanted) and reader.bytes == len(data) // 2
    os.truncate(file, 1000)
    assert not reader.take(where, experts, slots, memory_at).any()
    with pytest.raises(CheckpointError, match="it ends at byte 1000; tensor 'w' needs"):
        reader.start(wanted)
        reader.finish()
    reader.close()


def test_files_that_were_opened_before_one_that_has_changed_are_closed(tmp_path):
    states = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x" * 100)
        states[tmp_path / name] = State.of(os.stat(tmp_path / name))
    (tmp_path / "c").write_bytes(b"y" * 50)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="changed after it had been checked"):
        ExpertReader(states)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_row_57_interrupts_and_short_reads(resident, preadv):
    model = load_model(TINY, expert_cache=budget_of(TINY, 5))
    lock, turns = threading.Lock(), iter(range(10**9))

    def stutter(fd, views, at, real=os.preadv):
        with lock:
            turn = next(turns)
        if turn % 5 == 0:
            raise InterruptedError
        return real(fd, [views[0][: 13 + len(views[0]) // 2]], at)

    preadv(stutter)
    assert tokens(model, 3) == tokens(resident, 3)


def test_row_57_a_disk_that_fails_once(resident, monkeypatch, preadv):
    """The request gets the error; the next one gets the right tokens: nothing half read counts as read."""
    model, expected = load_model(TINY, expert_cache=budget_of(TINY, 40)), tokens(resident)
    for good in (0, 70, 300, 1000):
        preadv(failing_after(good))
        with pytest.raises(StorageError, match=r"reading at byte \d+: Input/output error") as caught:
            tokens(model)
        assert caught.value.exit_code == 5 and "model.safetensors" in str(caught.value)
        monkeypatch.undo()
        assert tokens(model) == expected


def test_an_interrupt_while_it_waits_leaves_nothing_half_read(resident, monkeypatch, preadv):
    """Ctrl-C, and threads that go on writing into their slots: whoever reads next waits for them."""
    model, real, expected = load_model(TINY, expert_cache=budget_of(TINY, 6)), os.preadv, tokens(resident)
    reader = model.residency.reader

    def slow(fd, views, at):
        threading.Event().wait(0.02)
        return real(fd, views, at)

    for count in (0, 3, 30):
        left = iter(range(count))

        def interrupted(left=left, finish=reader.finish):
            if next(left, None) is None:
                raise KeyboardInterrupt
            finish()

        monkeypatch.setattr(reader, "finish", interrupted)
        preadv(slow)
        with pytest.raises(KeyboardInterrupt):
            tokens(model)
        monkeypatch.undo()
        assert tokens(model) == expected


def test_row_57_a_disk_that_stalls(resident, monkeypatch, preadv, caplog):
    model, real = load_model(TINY, expert_cache=budget_of(TINY, 128)), os.preadv
    once = iter([0.3])

    def stall(fd, views, at):
        threading.Event().wait(next(once, 0))
        return real(fd, views, at)

    preadv(stall)
    monkeypatch.setattr(expert_reader, "STALLED", 0.1)
    with caplog.at_level(logging.WARNING):
        assert tokens(model, 3) == tokens(resident, 3)
    assert model.residency.reader.stalls >= 1 and "the disk is slow" in caplog.text


def test_row_58_more_shards_than_descriptors(resident, copied):
    """A shard a tensor, of which a few may be open."""
    stored = load_file(shard(copied))
    shard(copied).unlink()
    (copied / "model.safetensors.index.json").unlink(missing_ok=True)
    for i, (name, tensor) in enumerate(stored.items()):
        save_file({name: tensor}, copied / f"model-{i + 1:05d}-of-{len(stored):05d}.safetensors")
    assert len(stored) > 159
    expected = tokens(resident, 3)
    used = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, used + 48):
        model = load_model(copied, expert_cache=budget_of(TINY, 5))
        assert tokens(model, 3) == expected


def test_row_72_odd_surroundings(copied, tmp_path):
    """No HOME, the C locale, a time zone that is none, spaces and letters of other scripts in the path."""
    odd = tmp_path / "mein Modell, größer als スペース"
    copied.rename(odd)
    kept = {name: os.environ[name] for name in ("PATH", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX") if name in os.environ}
    kept.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    command = ["generate", str(odd), "--prompt", "x", "-n", "2", "--expert-cache", str(budget_of(TINY, 5))]
    ran = subprocess.run(
        [sys.executable, "-m", "halfbyte", *command], cwd=Path(__file__).parents[1], capture_output=True, timeout=120,
        env={**kept, "LC_ALL": "C", "TZ": "Nowhere/There"},
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr.decode(errors="replace")
