"""The vector vocabulary on its own: all halves and bfloat16 widened, exp, sums, tails; also as an older CPU has it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import get_num_threads, njit, set_num_threads

from halfbyte.kernels.numba import lanes, store
from halfbyte.kernels.numba.compiled import inner


@njit
def widen(a, y):
    for i in range(0, a.size, 16):
        lanes.store(y, i, lanes.load(a, i))


@njit
def exponentials(a, y):
    for i in range(0, a.size, 16):
        lanes.store(y, i, lanes.exp(lanes.load(a, i)))


@inner
def one_of(a, i):
    lanes.compiled_once()
    return a[i]


@inner
def doubled(pair, at):
    """The first of two arrays, doubled into the second by way of the stack."""
    once, twice = lanes.stack_floats(20), lanes.stack_floats(20)
    for i in range(20):
        once[i], twice[i] = pair[0][at + i], 2 * pair[0][at + i]
    for i in range(20):
        pair[1][at + i] = one_of(twice if once[i] == pair[0][at + i] else once, i)
    return once.ctypes.data % 64 + twice.ctypes.data % 64 + once.size - twice.size


@njit
def doubled_in_turns(a, y):
    total = 0
    for at in range(0, a.size, 20):
        total += doubled((a, y), at)
    return total


@njit
def first_n(a, n, y):
    lanes.store(y, 0, lanes.load_n(a, 0, n))


@njit
def sums(a, y):
    for i in range(0, a.size, 16):
        y[i // 16] = lanes.total(lanes.load(a, i))


@njit
def whole(a, y):
    lanes.store(y, 0, lanes.nearest(lanes.load(a, 0)))


def every_half():
    return np.arange(1 << 16, dtype=np.uint16)


def same(found, expected):
    numbers = ~np.isnan(expected)
    return np.array_equal(found[numbers], expected[numbers]) and np.isnan(found[~numbers]).all()


def test_every_half_and_every_bfloat16_is_widened_exactly():
    codes, y = every_half(), np.empty(1 << 16, np.float32)
    widen(codes.view(np.int16), y)
    assert same(y, codes.view(np.float16).astype(np.float32))
    widen(codes, y)
    assert same(y, (codes.astype(np.uint32) << 16).view(np.float32))


def test_exp_to_the_last_place():
    a, y = np.linspace(-110, 95, 1 << 16, dtype=np.float32), np.empty(1 << 16, np.float32)
    exponentials(a, y)
    with np.errstate(over="ignore"):
        exact = np.exp(a.astype(np.float64))
        apart = np.abs(y - exact) / np.spacing(np.minimum(exact, 3e38).astype(np.float32))
    fits = exact < 3.4e38
    assert apart[fits].max() < 1.5 and np.isinf(y[exact > 3.5e38]).all()


@pytest.mark.parametrize("n", range(17))
def test_a_tail_reads_nothing_after_it(n):
    y = np.empty(16, np.float32)
    for a in (np.arange(1, 17, dtype=np.float32), np.arange(1, 17).astype(np.float16).view(np.int16)):
        first_n(a[:n], n, y)
        assert np.array_equal(y, np.where(np.arange(16) < n, np.arange(1, 17), 0))


def test_room_on_the_stack_is_counted_by_nobody():
    a, y = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    assert doubled_in_turns(a, y) == 0 and np.array_equal(y, 2 * a)
    (compiled,) = doubled.overloads.values()
    assert "NRT_incref" not in compiled.library.get_llvm_str()


def test_sums_of_lanes():
    a, y = np.arange(64, dtype=np.float32), np.empty(4, np.float32)
    sums(a, y)
    assert np.array_equal(y, a.reshape(4, 16).sum(1))


def test_the_nearest_whole_number_is_even_between_two():
    a, y = np.linspace(-3.75, 3.75, 16, dtype=np.float32) * 2, np.empty(16, np.float32)
    whole(a, y)
    assert np.array_equal(y, np.rint(a)) and (a % 1 == 0.5).any()


@pytest.mark.skipif(lanes.platform.machine() != "x86_64", reason="NUMBA_CPU_NAME names x86 CPUs")
@pytest.mark.parametrize("cpu", ["nehalem", "haswell"])
def test_an_older_cpu_has_the_same_vocabulary(cpu):
    """nehalem has no F16C and no FMA: what LLVM would call instead is in no process, and would end this one."""
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not older"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@njit
def threads_by_name():
    return lanes.threads()


@njit
def threads_by_address():
    return get_num_threads()


def test_kernels_ask_for_threads_by_name():
    """By an address, a kernel that another process has kept would call whatever is there in this one."""
    before = get_num_threads()
    try:
        for count in (1, before):
            set_num_threads(count)
            assert threads_by_name() == threads_by_address() == count
    finally:
        set_num_threads(before)
    store.portable(threads_by_name.overloads[()])
    with pytest.raises(TypeError, match="threads_by_address calls an address of this process"):
        store.portable(threads_by_address.overloads[()])
