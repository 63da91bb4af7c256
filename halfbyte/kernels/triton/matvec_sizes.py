"""Launch sizes of the kernels for few rows: those of matvec.py and of nibbles.py."""

from typing import NamedTuple

import triton

from .device import INTERPRETED


class Chunks(NamedTuple):
    """Launch sizes of matvec_kernel."""

    rows: int  # and chunks of a tile
    chunks: int
    warps: int
    programs: int  # for one job; where these are fewer than the blocks of outputs, a program takes several

    def tile(self, bits, gated):
        """Outputs, and codes of a row."""
        return self.rows, 32 * self.chunks


class Nibbles(NamedTuple):
    """Launch sizes of nibbles_kernel."""

    rows: int  # of a tile: 16 or 32
    blocks: int  # of a span, each what four threads load of a row
    parts: int  # warps, each with its own spans
    programs: int = 1 << 30  # as in Chunks
    spread: bool = False  # blocks of a span take turns
    registers: int | None = None  # of a thread, at most

    def tile(self, bits, gated):
        return self.rows // (2 if gated else 1), 512 // bits * self.blocks * self.parts


MANY = 64  # outputs for each processor, from which a matrix is large; 2026-11-15, H200
WARPS_AT_ONCE = 24  # of nibbles_kernel that a processor has registers for, where no program loops


def nibble_sizes(N, K, M, jobs, form, gated, processors):
    """2026-11-15, H200, one row of bfloat16. 248320 x 2048 in 73 to 79 us, 91 to 84 % of what a sum reads; in 2 bits in
    48, 76 %; in mxfp4 in 84 to 86, 73 %. 12288 x 4096 in 9.2, with a program for every block in 10 to 11; two rows in
    12.3, in tiles of 32 in 14.3. 2048 x 4096 in 3.1, 1024 x 4096 in 2.5.

    2026-11-16: 12352 x 2048 is quicker where all programs start at once and ask for all weights before they wait: a
    step of Qwen3.5-35B-A3B takes 1304 us, with two, three or four of them for each processor 1375, 1365 and 1365.

    Nine of 257 experts of 512 x 2048 in 8.7. Spread, gate and up alone take 6.1 instead of 7.5, but with down 9.9, and
    9.1 where that is spread too: both are on the chip at once, and equal numbers of registers may fit better.

    A step of Qwen3-30B-A3B: 5120 x 2048 not spread, 1452 to 1443 us; down projections of eight experts of 2048 x 768 in
    tiles of 32, 1477 to 1442. Those of 2048 x 512, a warp each, are quicker in tiles of 16.
    """
    block = 512 // form.bits
    blocks = min(4, 8 * form.group // block)
    parts = triton.next_power_of_2(triton.cdiv(K, block * blocks))
    tiles = triton.cdiv(N * (2 if gated else 1), 16) * jobs
    if INTERPRETED:  # which takes as long for a small tile
        return Nibbles(32, blocks, min(4, parts), 2)
    if M > 1:
        return Nibbles(16, blocks, min(4, parts))
    if tiles >= 32 * processors:
        if form.bits == 2:  # words come so fast that preparing activations for each block would take longer
            return Nibbles(32, blocks, min(4, parts), max(1, 4 * processors // jobs))
        return Nibbles(32, blocks, min(8 if blocks == 2 else 4, parts))
    if jobs > 1 and parts == 2 and not gated:
        return Nibbles(32, blocks, parts)
    if tiles > 4 * processors and jobs == 1 and tiles * parts > WARPS_AT_ONCE * processors:
        return Nibbles(16, blocks, min(8, parts), 2 * processors)
    while blocks > 1 and tiles * parts <= 4 * processors and parts < 16:  # a warp or less for each scheduler
        blocks, parts = blocks // 2, parts * 2
    return Nibbles(16, blocks, min(16, parts), spread=jobs == 1 and tiles <= 2 * processors)


def choosing_sizes(launch):
    """Of gate and up that choose their experts: nothing is loaded before, so all programs may as well be there at once.

    2026-11-16, H200, a step of Qwen3.5-35B-A3B: 1300 us with 90 registers, 1279 with 80, 1301 with 72.
    """
    return launch._replace(registers=80) if isinstance(launch, Nibbles) and launch.parts <= 4 else launch


def chunk_sizes(N, K, M, jobs, bits, gated, processors):
    """2026-11-15, H200: 2048 x 4096 in 3.5 us, 1024 x 4096 in 3.0; 8 bits 248320 x 2048 at 98 % of what a sum reads."""
    chunks = triton.next_power_of_2(triton.cdiv(K, 32))
    if INTERPRETED:  # which takes as long for a small tile
        return Chunks(min(256, triton.next_power_of_2(N)), min(chunks, 64), 1, 1 << 30)
    if N * jobs >= MANY * processors and chunks > 16:
        warps = min(8, max(1, chunks * M // 64))
        rows, resident = (8, 24) if bits <= 4 and M == 1 else (4, 32)
        programs = 1 << 30 if gated else max(1, resident // warps * processors // jobs)
        return Chunks(rows, min(chunks, 64 * warps // M), warps, programs)
    warps = min(8, max(1, chunks * M // 32))
    rows = 2 if N * jobs <= 8 * processors else 4 if gated or M > 1 else 8
    return Chunks(rows, min(chunks, 32 * warps // M), warps, 1 << 30)


def dense_sizes(K):
    """R, BLOCK and warps. 2026-11-15, H200."""
    return 2, min(triton.next_power_of_2(K), 1024), 4
