"""The machine that executes Metal kernels on a CPU: it computes as a GPU would, and finds what a GPU would not say."""

import re
import sys

import pytest
import torch
from metal import executor
from metal.translation import translate

from halfbyte.kernels.metal import shaders
from halfbyte.kernels.metal.rowwise import rms_norm, rms_norm_chain
from halfbyte.ops.dispatch import using

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="the machine is built by GCC for Linux; a Mac runs the kernels on its own GPU"
)
SUMS = """
#include <metal_stdlib>
using namespace metal;
template <typename T> [[kernel, max_total_threads_per_threadgroup(128)]] void sums(
    device const T *x, device T *y, constant int &D,
    uint row [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[4];
  float sum = 0;
  for (int i = index; i < D; i += 128) sum += x[row * D + i];
  sum = simd_sum(sum);
  if (lane == 0) parts[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) y[row] = parts[0] + parts[1] + parts[2] + parts[3];
}
template [[host_name("sums")]] [[kernel]] decltype(sums<float>) sums<float>;
"""
ROWS, WIDTH = 3, 300


def run(source=SUMS, x=None, y=None, D=WIDTH, order=2, threads=ROWS * 128, size=128, cast="int32"):
    x = torch.arange(ROWS * WIDTH, dtype=torch.float32) if x is None else x
    y = torch.empty(ROWS) if y is None else y
    with executor.scheduled(order):
        kernel = executor.compile_shader(source).sums
        kernel(x, y, D, threads=threads, group_size=size, arg_casts={2: cast} if cast else None)
    return y


def changed(old, new):
    assert old in SUMS
    return SUMS.replace(old, new)


@pytest.mark.parametrize("order", [0, 1, 2, 7])
def test_a_kernel_computes(order):
    assert run(order=order).tolist() == torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).sum(1).tolist()


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS = {
    "a barrier is missing": (changed(BARRIER, ""), "race: parts|uninitialised: parts"),
    "a barrier fences other memory": (changed("mem_flags::mem_threadgroup", "mem_flags::mem_device"), "race: parts"),
    "a read past the end": (changed("x[row * D + i]", "x[row * D + i + 1]"), "out of bounds: argument 0, read"),
    "a write past the end": (changed("y[row] =", "y[row + 1] ="), "out of bounds: argument 1, write"),
    "a read far outside": (changed("x[row * D + i]", "x[row * D + i + (1 << 28)]"), "out of bounds"),
    "memory that nobody wrote": (changed("if (lane == 0) parts[simd]", "if (simd == 0) parts[0]"), "uninit|race"),
    "two lanes write": (changed("if (lane == 0) parts", "parts"), "race: parts, two writes"),
    "two threadgroups write": (changed("y[row]", "y[0]"), "race: argument 1, two writes .* of two threadgroups"),
    "a barrier in a branch": (changed(BARRIER, f"if (simd != 1) {BARRIER}"), "divergence: a barrier that some"),
    "a simd sum in a branch": (changed("sum = simd_sum(sum);", "if (lane > 3) sum = simd_sum(sum);"), "divergence"),
    "too much threadgroup memory": (changed("parts[4];", "parts[8193];"), "limit: parts, threadgroup memory"),
    "a vector at an odd place": (
        changed("sum += x[row", "sum += (*(device const float4 *)(x + i))[0] * 0 + x[row"),
        "ali",
    ),
    "a local array's end": (changed("float sum = 0;", "float a[4] = {0}, sum = a[D / 75];"), "out of bounds: a local"),
}


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, order):
    source, finding = FAULTS[name]
    with pytest.raises(executor.Fault, match=finding):
        run(source, order=order)


def test_a_finding_names_its_line():
    line = changed("x[row * D + i]", "x[row * D + i + 1]").split("\n").index("  float sum = 0;") + 2
    with pytest.raises(executor.Fault, match=rf"sums: .* by thread \d+ \(line {line}\)"):
        run(FAULTS["a read past the end"][0])


def test_lanes_of_a_simd_group_need_a_fence_too():
    fence = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    exchange = f"threadgroup float all[128]; all[index] = sum; {fence} sum += all[index ^ 1] - all[index ^ 1];"
    source = changed("sum = simd_sum(sum);", f"{exchange} sum = simd_sum(sum);")
    assert run(source).tolist() == run().tolist()
    with pytest.raises(executor.Fault, match=r"race: all|uninitialised: all"):
        run(source.replace(fence, ""))


@pytest.mark.parametrize("which", [0, 1])
def test_our_own_barriers_are_needed(which, monkeypatch):
    """A chain of norms takes two sums, one after the other. Without either of a sum's barriers it is found out."""
    executor.install()
    source = shaders.source("rowwise")
    at = [
        m.start() for m in re.finditer(re.escape(BARRIER), source) if m.start() > source.index("Twofold group_total(")
    ]
    less = source[: at[which]] + source[at[which] + len(BARRIER) :]
    x, weight = torch.randn(2, 300), torch.ones(300)
    rms_norm_chain(x, weight, x, [weight])
    monkeypatch.setattr(shaders, "source", lambda family: less)
    shaders.kernel.cache_clear()
    with pytest.raises(executor.Fault, match="parts"):
        rms_norm_chain(x, weight, x, [weight])
    shaders.kernel.cache_clear()


@pytest.mark.parametrize(
    ("given", "finding"),
    [
        ({"cast": None}, "another size than its parameter"),
        ({"threads": ROWS * 128 + 1}, "threads in groups"),
        ({"threads": ROWS * 256, "size": 256}, "256 threads in a group"),  # more than it was compiled for
        ({"threads": ROWS * 48, "size": 48}, "48 threads in a group"),  # half a simd group
        ({"y": torch.empty(0)}, "an empty buffer"),
        ({"D": None}, "the argument None"),
    ],
)
def test_a_launch_is_checked(given, finding):
    with pytest.raises(executor.Fault, match=finding):
        run(**given)


def test_views_of_one_tensor_may_be_bound_together():
    x = torch.arange(ROWS * WIDTH, dtype=torch.float32)
    beside = torch.cat([x, torch.empty(ROWS)])
    assert run(x=beside, y=beside[ROWS * WIDTH :]).tolist() == run(x=x).tolist()
    with pytest.raises(executor.Fault, match="race: argument 0"):
        run(x=x, y=x[1:4])


REFUSED = {
    "a double": ("float sum = 0;", "double sum = 0;", "line 9: Metal has no `double`"),
    "a lambda": ("float sum = 0;", "float sum = [](float a) { return a; }(0);", "Metal has no"),
    "bfloat, which an M1 may not have": ("float sum = 0;", "bfloat sum = 0;", "Metal has no `bfloat`"),
    "a letter of no ASCII": ("float sum = 0;", "float sum = 0;  // größe", "ASCII"),
    "two widths of places": ("uint row [[", "uint2 all [[threads_per_threadgroup]], uint row [[", "all numbers or all"),
    "threadgroup memory outside of a kernel": (
        "using namespace metal;",
        "using namespace metal;\ninline void spare() {\n  threadgroup float more[4];\n}",
        "may stand in a kernel alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_cpu_compiler_takes_is_refused(name):
    old, new, message = REFUSED[name]
    with pytest.raises(SyntaxError, match=message):
        translate(changed(old, new))


def test_a_pointer_needs_an_address_space():
    with pytest.raises(SyntaxError, match=r"`float \*x` needs one of"):
        translate("float first(float *x) { return x[0]; }")


def test_a_launcher_binds_what_its_kernel_takes():
    executor.install()
    x, weight = torch.randn(5, 96), torch.randn(96, dtype=torch.bfloat16)
    with executor.recording() as launches, using("metal"):
        y = rms_norm(x, weight, 1e-5, out=x)
    assert y is x
    [launch] = launches
    assert launch.kernel == "rms_norm_float_bf16_float_4"
    assert launch.threads == (5 * 32, 1, 1) and launch.group_size == (32, 1, 1)
    assert launch.arguments[0] is x and launch.arguments[1] is weight and launch.arguments[7] is x
    assert launch.arguments[10:] == (96, 1e-5, 1.0, 1, 1, 1)


def test_a_size_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="below 2\\^31"):
        shaders.launch(None, 1 << 31, groups=1, size=32)
    with pytest.raises(ValueError, match=r"2\^32 threads an axis"):  # a thread's place in the grid would wrap
        shaders.launch(None, groups=(1 << 25, 1), size=(256, 1))


def test_more_buffers_than_metal_takes_are_refused():
    with pytest.raises(ValueError, match="at most 512 buffers"):
        shaders.launch(None, [torch.zeros(1)] * 513, groups=1, size=32)
