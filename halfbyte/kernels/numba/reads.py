"""Reads of files for threads that need nothing of Python meanwhile, its lock least of all, which kernels hold; and a
look at what was read."""

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
def read_rest(taken, descriptors, starts, experts, slots, memory, sizes, flags, places, filled):
    """One thread's part of what `read_kept` does."""
    parts, one = sizes.size, one_more(taken.ctypes.data)
    while one < filled.size:
        row, part = one // parts, one % parts
        path, start = starts[experts[row], part]
        places[one, 0], places[one, 1] = memory[part] + slots[row] * sizes[part], sizes[part]
        table = np.uintp(places[one:].ctypes.data)
        count = preadv2(np.intc(descriptors[path]), table, np.intc(1), start, np.intc(flags))
        filled[one] = count == sizes[part]
        one = one_more(taken.ctypes.data)


@kernel
def kept_kernel(taken, descriptors, starts, experts, slots, memory, sizes, flags, threads, places, filled):
    for _ in prange(threads):
        read_rest(taken, descriptors, starts, experts, slots, memory, sizes, flags, places, filled)


def read_kept(descriptors, starts, experts, slots, memory, sizes, flags):
    """Fill slots with what the system has of experts in its own memory, on all threads; of which parts it had all.

    descriptors: of the files   starts [E, P, 2]: the number of a file, and where a part starts there   experts, slots
    [R]: which expert, into which slot   memory, sizes [P]: the address of the first slot's part, and the bytes of one.
    All int64.   flags: what has the system answer at once where it would have to read   ->   bool [R, P]
    """
    taken, filled = np.zeros(1, np.int64), np.zeros((len(experts), len(sizes)), np.bool_)
    places = np.empty((filled.size, 2), np.int64)  # as the system wants them
    threads = get_num_threads()
    kept_kernel(taken, descriptors, starts, experts, slots, memory, sizes, flags, threads, places, filled.reshape(-1))
    return filled


@intrinsic(prefer_literal=True)
def bits_at(typing, address, width):
    """The integer of so many bytes (a constant) at an address."""
    size = width.literal_value

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8 * size).as_pointer())
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.int64(types.int64, width), generate


@inner
def has_all_bits(address, count, width, mask):
    """Whether one of `count` integers of `width` bytes has all bits of the mask."""
    found = False
    if width == 1:
        for i in range(count):
            found |= (bits_at(address + i, 1) & mask) == mask
    elif width == 2:
        for i in range(count):
            found |= (bits_at(address + 2 * i, 2) & mask) == mask
    else:
        for i in range(count):
            found |= (bits_at(address + 4 * i, 4) & mask) == mask
    return found


@kernel
def numbers_kernel(slots, memory, sizes, widths, masks, found):
    parts = sizes.size
    for one in prange(found.size):
        row, part = one // parts, one % parts
        address = memory[part] + slots[row] * sizes[part]
        found[one] = has_all_bits(address, sizes[part] // widths[part], widths[part], masks[part])


def are_numbers(slots, memory, sizes, widths, masks):
    """Whether in none of these slots a value has all the bits that mark NaN and infinities.

    memory, sizes, widths, masks [P]: the address of the first slot's part, the bytes of one, of one value of it, and
    those bits.   All int64.
    """
    found = np.ones(len(slots) * len(sizes), np.bool_)  # a rehearsal runs no kernel, and so has not looked
    numbers_kernel(slots, memory, sizes, widths, masks, found)
    return not found.any()
