"""Experts in host memory and slots for some of them on the device: which expert gets which slot, and the copies.

Nothing is known to the host: one program chooses slots, and as many programs as there could be copies look whether
there is one for them. Host memory that is pinned has an address on the device, and is read over the bus as it is: 16
bytes a thread, megabytes under way, so that the bus is never without work.
"""

import torch
import triton
import triton.language as tl

from .device import INTERPRETED, overlap
from .elementary import begin_early

DECAY = tl.constexpr(11)  # of 1024, of a score: a choice counts half after 64 steps
CHOICE = tl.constexpr(1 << 12)  # what being chosen adds; scores stay below 2^19, so a key of 4096 experts below 2^31
LAST = tl.constexpr(2**31 - 1)  # the key of experts that stay
BLOCK = 4096  # words of a program that copies
WARPS = 8


@triton.jit
def assign_slots_kernel(
    ids, table, counts, slots, loads, E, pairs, room, choices, ids_row, slots_row, limit,
    FORESEEN: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program, one warp: all is in registers, so the few experts that are missing find their slots one by one.

    It may follow another stream, and so overlaps nothing.
    """
    pair, expert = tl.arange(0, PAIRS), tl.arange(0, BINS)
    has, known = pair < pairs, expert < E
    mine = tl.load(ids + (pair // choices) * ids_row + pair % choices, has, other=0).to(tl.int32)
    chosen = tl.histogram(mine, BINS, mask=has) > 0
    place = tl.load(table + expert, known, other=-1)
    score = tl.load(table + E + expert, known, other=0)
    missing = chosen & (place < 0)
    if FORESEEN:
        absent = (tl.gather(place, mine, 0) < 0) & has
        first = absent & (tl.cumsum(absent.to(tl.int32), 0) <= limit)
        missing = tl.histogram(mine, BINS, mask=first) > 0
        tl.store(table + 2 * E + expert, 1, missing)
    else:
        ahead = tl.load(table + 2 * E + expert, chosen, other=0)
        score = score - (score * DECAY >> 10) + tl.where(chosen, CHOICE, 0)
        tl.store(table + E + expert, score, known)
        tl.store(table + 2 * E + expert, 0, known)
    ones = missing.to(tl.int32)
    rank, count = tl.cumsum(ones, 0) - ones, tl.sum(ones, 0)
    key = tl.where((place >= 0) & (chosen == 0), score * BINS + expert, LAST)
    slot = place
    for turn in range(count):
        victim = tl.min(key, 0) % BINS
        freed = tl.sum(tl.where(expert == victim, place, 0), 0)
        slot = tl.where(missing & (rank == turn), freed, slot)
        key = tl.where(expert == victim, LAST, key)
        tl.store(table + victim, -1)
    tl.store(table + expert, slot, missing)
    tl.store(loads + 2 * rank, expert, missing)
    tl.store(loads + 2 * rank + 1, slot, missing)
    tl.store(loads + 2 * pair, -1, (pair >= count) & (pair < room))
    tl.store(loads + 2 * pair + 1, -1, (pair >= count) & (pair < room))
    tl.store(slots + (pair // choices) * slots_row + pair % choices, tl.gather(slot, mine, 0), has)
    if FORESEEN:
        tl.store(counts + 3, tl.load(counts + 3) + count)
    else:
        tl.store(counts, tl.load(counts) + tl.sum(chosen.to(tl.int32), 0))
        tl.store(counts + 1, tl.load(counts + 1) + count)
        tl.store(counts + 2, tl.load(counts + 2) + tl.sum(ahead, 0))


def assign_slots(ids, state, *, limit=None, out=None):
    table, counts = state
    (T, A), E, pairs = ids.shape, table.shape[1], ids.numel()
    room = pairs if limit is None else min(limit, pairs)
    if out is None:
        slots = torch.empty((T, A), dtype=ids.dtype, device=ids.device)
        out = slots, torch.empty((room, 2), dtype=torch.int32, device=ids.device)
    slots, loads = out
    assign_slots_kernel[(1,)](
        ids, table, counts, slots, loads, E, pairs, room, A, ids.stride(0), slots.stride(0), room,
        FORESEEN=limit is not None, BINS=max(32, triton.next_power_of_2(E)), PAIRS=triton.next_power_of_2(pairs),
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def copy_part(source, target, size, expert, slot, block, BLOCK: tl.constexpr):
    """A block of one part of an expert."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + expert * size + at, at < size, cache_modifier=".cg")
    tl.store(target + slot * size + at, words, at < size)


@triton.jit
def fill_slots_kernel(
    loads, sources, targets, sizes, starts, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program 0 of the grid is a block of an expert, all its parts counted through; program 1 is a load."""
    begin_early(OVERLAP)
    block, load = tl.program_id(0), tl.program_id(1)
    expert, slot = tl.load(loads + 2 * load).to(tl.int64), tl.load(loads + 2 * load + 1).to(tl.int64)
    if expert >= 0:
        for part in tl.static_range(PARTS):
            if (block >= starts[part]) & (block < starts[part + 1]):
                copy_part(sources[part], targets[part], sizes[part], expert, slot, block - starts[part], BLOCK)


def fill_slots(loads, sources, targets):
    each = [part[0].nbytes for part in targets]
    word = torch.int32 if all(size % 4 == 0 for size in each) else torch.uint8
    sizes = [size // word.itemsize for size in each]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + triton.cdiv(size, BLOCK))
    as_words = [[part.view(len(part), -1).view(word) for part in parts] for parts in (sources, targets)]
    fill_slots_kernel[(starts[-1], len(loads))](
        loads, *map(tuple, as_words), tuple(sizes), tuple(starts), PARTS=len(sizes), BLOCK=BLOCK,
        num_warps=1 if INTERPRETED else WARPS, **overlap(loads.device),
    )  # fmt: skip
    return targets
