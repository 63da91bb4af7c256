"""The machine that models run on: what it is called, its threads, and how fast its memory can be read, measured."""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
STREAMS = 8  # a thread's own reads run this far apart: one stream alone is slower on many machines
BLOCK = 64  # elements read from a stream before the next one's turn
READ_BYTES = 256 << 20
REST = 0.01  # seconds until threads of torch, and of ours, no longer look for more work on cores that others need
_chosen: list[int] = []  # by use_threads
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "neon": "NEON"}  # the widest first


class ReadProbe:
    """Reads 256 MB with every thread, eight streams each. `seconds()` is one read; its checksum is verified.

    A probe whose result nobody looks at is deleted by the compiler and reads infinitely fast. The memory comes from
    torch, as weights do.
    """

    def __init__(self) -> None:
        import numba
        import torch

        self.data = torch.arange(READ_BYTES // 8).numpy()
        self.threads = numba.get_num_threads()
        self.expected = len(self.data) * (len(self.data) - 1) // 2
        self.seconds()

    def seconds(self) -> float:
        read = compiled_read()
        start = time.perf_counter()
        total = read(self.data, self.threads)
        elapsed = time.perf_counter() - start
        if total != self.expected:
            raise RuntimeError(f"the read probe summed to {total}, not {self.expected}: its time means nothing")
        return elapsed

    def bandwidth(self, reads: int = 9) -> float:
        """Bytes a second, the median of several reads."""
        time.sleep(REST)
        return READ_BYTES / statistics.median(self.seconds() for _ in range(reads))


@cache
def compiled_read() -> Callable[[Any, int], int]:
    import_module("halfbyte.kernels.numba")  # settles the threading layer and the cache folder
    from numba import njit, prange

    @njit(cache=True)  # type: ignore[untyped-decorator]
    def total(data: Any, start: int, stop: int) -> Any:
        span, result = data[start:stop], 0
        for i in range(span.size):
            result += span[i]
        return result

    @njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
    def read(data: Any, threads: int) -> Any:
        stream = data.size // threads // STREAMS // BLOCK * BLOCK
        result = total(data, threads * STREAMS * stream, data.size)
        for thread in prange(threads):
            first = thread * STREAMS * stream
            for start in range(first, first + stream, BLOCK):
                for i in range(STREAMS):
                    result += total(data, start + i * stream, start + i * stream + BLOCK)
        return result

    return read  # type: ignore[no-any-return]


def threading_layer() -> str:
    """Which threads run the CPU kernels: our own, or one of Numba's pools, omp, tbb or workqueue."""
    if import_module("halfbyte.kernels.numba").OWN_THREADS:  # it settles which are tried, in which order
        return "own"
    import numba

    numba.get_num_threads()  # starts them
    return str(numba.threading_layer())


def slow_threads() -> str | None:
    """What to do where the threads of CPU kernels are slow to start, which nobody else would say; None where not."""
    if threading_layer() == "workqueue":
        return "numba has only its workqueue threads, 100 us a region: install libgomp (libgomp1), or `pip install tbb`"
    if threading_layer() == "omp" and os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return "OMP_WAIT_POLICY=PASSIVE sends threads to sleep between kernels, which doubles their time: unset it"
    return None


def queueing_seconds() -> float:
    """How long this process's threads have waited for a CPU so far, all together; 0 where the system does not tell."""
    waited = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has just ended
            waited += int(task.read_text().split()[1])
    return waited / 1e9


def facts() -> dict[str, Any]:
    """What a number depends on."""
    import numba
    import torch

    return {
        "cpu": cpu_name(),
        "threads": numba.get_num_threads(),
        "vectors": vector_features(),
        "threading_layer": threading_layer(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def vector_features() -> list[str]:
    """The vector instruction sets that Numba compiles for; the CPU's name where NUMBA_CPU_NAME asks for another."""
    from llvmlite import binding
    from numba.core import config

    if config.CPU_NAME is not None:
        return [str(config.CPU_NAME)]
    having = {name for name, present in binding.get_host_cpu_features().items() if present}
    return [f for f in ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx512bf16", "neon", "sve") if f in having]


def backend(device: Any) -> str:
    """What a torch device is, in a few words: `cpu, AVX-512, 2 threads`."""
    import torch

    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return str(device)
    having = vector_features()
    widest = next((name for feature, name in VECTORS.items() if feature in having), "no vectors")
    threads = torch.get_num_threads()
    return f"cpu, {widest}, {threads} thread{'' if threads == 1 else 's'}"


def use_threads(count: int) -> None:
    """So many threads for torch and for the CPU kernels; at most one a core, which is the default."""
    import torch

    import_module("halfbyte.kernels.numba")  # settles the threading layer
    import numba

    if not 1 <= count <= numba.config.NUMBA_NUM_THREADS:
        raise ValueError(f"must be from 1 to {numba.config.NUMBA_NUM_THREADS}, it is {count}")
    torch.set_num_threads(count)
    numba.set_num_threads(count)
    _chosen.append(count)


def share_threads() -> None:
    """For a thread that computes in another's place: Numba counts for each thread anew."""
    if _chosen:
        use_threads(_chosen[-1])


@contextmanager
def one_for_torch() -> Iterator[None]:
    """Inside, torch keeps to the calling thread where our own threads run the kernels.

    What it computes between them is little, and its threads would then look for more for milliseconds, on cores that
    the kernels need. (A thread that uses torch for the first time meanwhile keeps to one as well.)
    """
    import torch

    before = torch.get_num_threads()
    if before == 1 or threading_layer() != "own":
        yield
        return
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


@cache
def warn_of_slow_threads() -> None:
    """A line of the log, once a process."""
    if (said := slow_threads()) is not None:
        log.warning("%s", said)
