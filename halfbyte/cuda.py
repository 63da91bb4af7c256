"""How long work takes on an NVIDIA GPU, and how quick the GPU is: all of it timed as replays of CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from .bench import Inputs, Rotation, Row, copies, moved, written
from .cases import Case
from .check import tensors
from .ops.dispatch import reference

ROTATED = 224 << 20  # bytes of inputs that calls rotate over: several times the L2
ROTATION = Rotation(ROTATED, copies=256, memory=32 << 30)
REPLAYS = 20
WORKING = torch.bfloat16  # activations on a GPU


def measure(case: Case, row: Row) -> None:
    """Fill in the row's times: the kernel's on rotating inputs, its body's on the same, the floor that bounds it."""
    inputs = case.inputs(WORKING, device="cuda")
    row.bytes_moved = moved(case, inputs)
    turns = copies(inputs, distinct(inputs, row.bytes_moved), ROTATION)
    row.from_memory = len(turns) * row.bytes_moved >= ROTATED
    row.graph = never_waits(case, inputs)
    seconds = graph_seconds if row.graph else eager_seconds
    row.seconds = seconds([bound(case, turn) for turn in turns])
    with reference():
        capturable = never_waits(case, inputs)
        row.torch_seconds = (graph_seconds if capturable else eager_seconds)([bound(case, t) for t in turns[:4]], 5)
    row.speedup = row.torch_seconds / row.seconds
    row.bytes_per_second = row.bytes_moved / row.seconds
    if case.flops is not None:
        row.flops_per_second = case.flops(*inputs) / row.seconds
        row.of_matmul = row.flops_per_second / matmul_rate()
    if written(case, inputs) * 4 > row.bytes_moved:
        row.of_copy = row.bytes_per_second / copy_bandwidth(row.bytes_moved)
    row.of_read = row.bytes_per_second / read_bandwidth()


def distinct(inputs: Inputs, moved: int) -> int:
    """The different bytes that a call touches: what it changes in place is moved twice."""
    return min(moved, sum(t.nbytes for t in tensors(inputs)))


def bound(case: Case, inputs: Inputs) -> Callable[[], Any]:
    args, kwargs = inputs
    return lambda: case.op(*args, **kwargs)


def never_waits(case: Case, inputs: Inputs) -> bool:
    """Whether a call leaves the host free to run ahead; only then can a graph hold it."""
    bound(case, inputs)()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound(case, inputs)()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def graph_seconds(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """The median seconds of one call. `calls` do the same work on different inputs; one graph holds them all in order.

    Each call runs once before, so that nothing is compiled or copied to the device inside the capture. Results are
    kept, so that they do not share memory: writes leave the cache as they would in a model.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    graph.replay()
    seconds = timed(graph.replay, replays) / len(calls)
    del kept
    return seconds


def eager_seconds(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """As graph_seconds, for what waits for the device: Python and launches are inside."""

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()
    return timed(all_of_them, replays) / len(calls)


def timed(work: Callable[[], Any], repeats: int) -> float:
    """The median seconds between two events around the work."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in marks)) / 1e3


@cache
def read_bandwidth() -> float:
    """Bytes a second that torch's sum reads from 2 GiB of memory."""
    x = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    return int(x.nbytes) / graph_seconds([x.sum])


@cache
def copy_bandwidth(moved: int) -> float:
    """Bytes a second, read and written, of torch copies that move as many bytes, rotated past the L2."""
    size = max(moved // 2, 1)
    pairs = [
        (torch.ones(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8, device="cuda"))
        for _ in range(min(ROTATION.copies, -(-ROTATED // size)))
    ]
    return 2 * size / graph_seconds([copying(*pair) for pair in pairs])


def copying(source: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source)


@cache
def bus_bandwidth() -> float:
    """Bytes a second that come from pinned host memory."""
    here = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(here.shape, dtype=here.dtype, device="cuda")
    return int(here.nbytes) / timed(lambda: there.copy_(here, non_blocking=True), REPLAYS)


@cache
def matmul_rate(size: int = 8192) -> float:
    """Floating point operations a second of a large bfloat16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / graph_seconds([lambda: a @ b])


def facts() -> dict[str, Any]:
    """The GPU, and its two measured rates."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "read_bytes_per_second": read_bandwidth(),
        "matmul_flops_per_second": matmul_rate(),
    }


def header(machine: dict[str, Any]) -> list[str]:
    read, rate = machine["read_bytes_per_second"] / 1e12, machine["matmul_flops_per_second"] / 1e12
    return [
        f"{machine['gpu']}, {machine['processors']} processors, CUDA {machine['cuda']}",
        f"torch {machine['torch']}, triton {machine['triton']}",
        f"reads {read:.2f} TB/s (torch sum of 2 GiB), multiplies {rate:.0f} TFLOP/s (torch, bf16, 8192 cubed)",
    ]
