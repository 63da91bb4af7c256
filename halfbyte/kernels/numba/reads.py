"""Reads of files for threads that need nothing of Python meanwhile: its lock least of all, which kernels hold."""

import numpy as np
from llvmlite import ir
from numba import get_num_threads, prange, types
from numba.extending import intrinsic

from .compiled import inner, kernel, unlocked

# The system's own calls; addresses go in as integers.
pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
preadv = types.ExternalFunction("preadv", types.intp(types.intc, types.uintp, types.intc, types.int64))
preadv2 = types.ExternalFunction("preadv2", types.intp(types.intc, types.uintp, types.intc, types.int64, types.intc))
memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))


@intrinsic
def one_more(typing, address):
    """What the int64 at an address is, which becomes one more: for one thread at a time."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, number(1), "monotonic")

    return types.int64(types.intp), generate


@unlocked
def read_runs(taken, runs, places, pages, page, clock, ended):
    """Fill the memory of runs that no other thread took, until none is left: -1, or the number of one that failed.

    taken [1]: how many are taken   runs [R, 6]: descriptor, start, stop, its first place and the one after its last,
    whether the disk can fill them   places [P, 2]: address and size, as the system wants them   pages: the address of a
    buffer for what begins or ends inside of pages   ended [2]: when the last read did, by `clock`.   All int64.
    """
    while True:
        run = one_more(taken.ctypes.data)
        if run >= runs.shape[0]:
            return -1
        descriptor, start, stop, first, end, straight = runs[run]
        if straight:
            count = preadv(np.intc(descriptor), np.uintp(places[first:].ctypes.data), np.intc(end - first), start)
            whole = count == stop - start
        else:
            begin = start - start % page
            size = (stop - begin + page - 1) // page * page
            whole = pread(np.intc(descriptor), np.uintp(pages), np.uintp(size), begin) >= stop - begin
        if not whole:
            return run
        if not straight:
            source = pages + start - begin
            for place in range(first, end):
                memcpy(np.uintp(places[place, 0]), np.uintp(source), np.uintp(places[place, 1]))
                source += places[place, 1]
        clock_gettime(np.intc(clock), np.uintp(ended.ctypes.data))


@inner
def read_rest(taken, files, places, flags, filled):
    """One thread's part of what `read_kept` does."""
    one = one_more(taken.ctypes.data)
    while one < files.shape[0]:
        descriptor, start = files[one]
        table = np.uintp(places[one:].ctypes.data)
        filled[one] = preadv2(np.intc(descriptor), table, np.intc(1), start, np.intc(flags)) == places[one, 1]
        one = one_more(taken.ctypes.data)


@kernel
def kept_kernel(taken, files, places, flags, threads, filled):
    for _ in prange(threads):
        read_rest(taken, files, places, flags, filled)


def read_kept(files, places, flags):
    """Fill memory with what the system has of files in its own, on all threads; of which places [R] it had all.

    files [R, 2]: descriptor and start   places [R, 2]: address and size, as the system wants them   All int64.
    flags: what has the system answer at once where it would have to read
    """
    taken, filled = np.zeros(1, np.int64), np.zeros(len(files), np.bool_)
    kept_kernel(taken, files, places, flags, get_num_threads(), filled)
    return filled
