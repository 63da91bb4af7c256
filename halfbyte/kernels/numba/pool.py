"""Threads for parallel kernels, in place of Numba's: helpers that may come, and need not.

OpenMP's threads all take their share of every parallel loop, and the loop ends when the last of them has. Where cores
are shared, by a server and its clients or by reads from disk, one thread of a step is always waiting for a core, and
the others wait with it. Here whoever is there takes the next division of the loop; a helper that has no core takes
none, and nobody waits for it. A fork takes the helpers away: its child hires others.

Helpers look for work for about a millisecond, giving way to others meanwhile, then sleep. One loop at a time has them;
a loop that begins meanwhile, in another thread or inside of one, runs on its caller.

`word` holds the whole state of a loop: who may help (16 bits), its divisions (24), the next that is free (24). Whoever
moves `next` on by a compare-and-swap may read `job`, since that changes only when every division taken is done. A
helper counts itself asleep before it looks at `word` for the last time, a caller writes `word` before it looks at who
sleeps: one of them notices.
"""

import ctypes
import os
import platform
import sys

import numba
from llvmlite import binding

from .driver import addresses_of

MACHINES = {"x86_64": (202, "llvm.x86.sse2.pause", ""), "aarch64": (98, "llvm.aarch64.hint", "i32 1")}
"""Of each: the number of the futex call, and the instruction for who waits in a loop."""
LOOKS, SPINS = 1500, 32  # how often a helper looks before it sleeps, and the pauses between: 0.5 us, and giving way
PATIENCE = 4000  # looks of a caller at the last division of a helper, before it sleeps

CODE = """
%job = type {{ ptr, ptr, ptr, ptr, ptr, i64, i64 }} ; function, arguments, dimensions, steps, data, inner ones, arrays
@job = internal global %job zeroinitializer, align 64
@word = internal global i64 0, align 64
@done = internal global i32 0, align 64
@asleep = internal global i32 0, align 64
@bell = internal global i32 0, align 64 ; counts loops: what helpers sleep on
@taken = internal global i32 0, align 64 ; some loop has the helpers
@caller_sleeps = internal global i32 0
@helpers = internal global i64 0

declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @pthread_setspecific(i32, ptr)
declare ptr @pthread_getspecific(i32)
declare void @{pause}({pause_kind})
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; Of those who sleep at a place with some of the `bits` that are woken, at most `count` wake.
define internal void @wait(ptr %place, i32 %seen, i32 %bits) {{
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %place, i32 137, i32 %seen, ptr null, ptr null, i32 %bits)
  ret void
}}

define internal void @wake(ptr %place, i32 %count, i32 %bits) {{
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %place, i32 138, i32 %count, ptr null, ptr null, i32 %bits)
  ret void
}}

; The bit of a helper; those from the 31st on share one.
define internal i32 @bit(i64 %me) {{
  %many = icmp ugt i64 %me, 31
  %place = select i1 %many, i64 31, i64 %me
  %narrow = trunc i64 %place to i32
  %bit = shl i32 1, %narrow
  ret i32 %bit
}}

; One division: every argument moved on by its step, as Numba's own pools do.
define internal void @divide(ptr %job, i64 %division) {{
  %whole = load %job, ptr %job
  %function = extractvalue %job %whole, 0
  %arguments = extractvalue %job %whole, 1
  %dimensions = extractvalue %job %whole, 2
  %steps = extractvalue %job %whole, 3
  %data = extractvalue %job %whole, 4
  %inner = extractvalue %job %whole, 5
  %arrays = extractvalue %job %whole, 6
  %counted = add i64 %inner, 1
  %counts = alloca i64, i64 %counted
  %places = alloca ptr, i64 %arrays
  %bytes = shl i64 %counted, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %counts, ptr %dimensions, i64 %bytes, i1 false)
  store i64 1, ptr %counts
  br label %each
each:
  %i = phi i64 [ 0, %0 ], [ %next, %move ]
  %more = icmp ult i64 %i, %arrays
  br i1 %more, label %move, label %run
move:
  %from = getelementptr ptr, ptr %arguments, i64 %i
  %base = load ptr, ptr %from
  %pace = getelementptr i64, ptr %steps, i64 %i
  %step = load i64, ptr %pace
  %offset = mul i64 %step, %division
  %moved = getelementptr i8, ptr %base, i64 %offset
  %to = getelementptr ptr, ptr %places, i64 %i
  store ptr %moved, ptr %to
  %next = add i64 %i, 1
  br label %each
run:
  call void %function(ptr %places, ptr %counts, ptr %steps, ptr %data)
  ret void
}}

; Whether a loop has a division for this helper; the caller is number 0.
define internal i1 @offers(i64 %word, i64 %me) {{
  %next = and i64 %word, 16777215
  %shifted = lshr i64 %word, 24
  %total = and i64 %shifted, 16777215
  %most = lshr i64 %word, 48
  %left = icmp ult i64 %next, %total
  %allowed = icmp ule i64 %me, %most
  %offered = and i1 %left, %allowed
  ret i1 %offered
}}

; Do divisions until none is left.
define internal void @work(i64 %me) {{
  br label %look
look:
  %word = load atomic i64, ptr @word seq_cst, align 8
  %offered = call i1 @offers(i64 %word, i64 %me)
  br i1 %offered, label %take, label %leave
take:
  %after = add i64 %word, 1
  %swap = cmpxchg ptr @word, i64 %word, i64 %after seq_cst seq_cst
  %mine = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %mine, label %run, label %look
run:
  %division = and i64 %word, 16777215
  call void @divide(ptr @job, i64 %division)
  %before = atomicrmw add ptr @done, i32 1 seq_cst
  %now = add i32 %before, 1
  %shifted = lshr i64 %word, 24
  %total = and i64 %shifted, 16777215
  %count = trunc i64 %total to i32
  %last = icmp eq i32 %now, %count
  br i1 %last, label %tell, label %look
tell:
  %sleeps = load atomic i32, ptr @caller_sleeps seq_cst, align 4
  %slept = icmp ne i32 %sleeps, 0
  br i1 %slept, label %rouse, label %leave
rouse:
  call void @wake(ptr @done, i32 1, i32 -1)
  br label %leave
leave:
  ret void
}}

; Numba's `get_thread_id`: a place for a thread's own sums.
define i32 @number() {{
  %mine = call ptr @pthread_getspecific(i32 {key})
  %wide = ptrtoint ptr %mine to i64
  %number = trunc i64 %wide to i32
  ret i32 %number
}}

define internal ptr @help(ptr %number) {{
  %me = ptrtoint ptr %number to i64
  call i32 @pthread_setspecific(i32 {key}, ptr %number)
  br label %begin
begin:
  call void @work(i64 %me)
  br label %look
look:
  %looks = phi i64 [ 0, %begin ], [ %looked, %yield ]
  %word = load atomic i64, ptr @word seq_cst, align 8
  %offered = call i1 @offers(i64 %word, i64 %me)
  br i1 %offered, label %begin, label %spin
spin:
  %spins = phi i64 [ 0, %look ], [ %spun, %spin ]
  call void @{pause}({pause_argument})
  %spun = add i64 %spins, 1
  %enough = icmp eq i64 %spun, {spins}
  br i1 %enough, label %yield, label %spin
yield:
  call i32 @sched_yield()
  %looked = add i64 %looks, 1
  %tired = icmp eq i64 %looked, {looks}
  br i1 %tired, label %sleep, label %look
sleep:
  %heard = load atomic i32, ptr @bell seq_cst, align 4
  atomicrmw add ptr @asleep, i32 1 seq_cst
  %last = load atomic i64, ptr @word seq_cst, align 8
  %still = call i1 @offers(i64 %last, i64 %me)
  br i1 %still, label %awake, label %rest
rest:
  %bits = call i32 @bit(i64 %me)
  call void @wait(ptr @bell, i32 %heard, i32 %bits)
  br label %awake
awake:
  atomicrmw sub ptr @asleep, i32 1 seq_cst
  br label %begin
}}

; Have so many helpers, as far as the system lets us.
define internal void @hire(i64 %wanted) {{
  %id = alloca i64
  br label %each
each:
  %have = load i64, ptr @helpers
  %enough = icmp uge i64 %have, %wanted
  br i1 %enough, label %leave, label %make
make:
  %number = add i64 %have, 1
  %given = inttoptr i64 %number to ptr
  %failed = call i32 @pthread_create(ptr %id, ptr null, ptr @help, ptr %given)
  %well = icmp eq i32 %failed, 0
  br i1 %well, label %made, label %leave
made:
  store i64 %number, ptr @helpers
  %thread = load i64, ptr %id
  call i32 @pthread_detach(i64 %thread)
  br label %each
leave:
  ret void
}}

; Numba's `numba_parallel_for`: dimensions[0] divisions, by at most so many threads.
define void @parallel_for(
  ptr %function, ptr %arguments, ptr %dimensions, ptr %steps, ptr %data, i64 %inner, i64 %arrays, i32 %threads
) {{
  %own = alloca %job
  %j0 = insertvalue %job poison, ptr %function, 0
  %j1 = insertvalue %job %j0, ptr %arguments, 1
  %j2 = insertvalue %job %j1, ptr %dimensions, 2
  %j3 = insertvalue %job %j2, ptr %steps, 3
  %j4 = insertvalue %job %j3, ptr %data, 4
  %j5 = insertvalue %job %j4, i64 %inner, 5
  %described = insertvalue %job %j5, i64 %arrays, 6
  %total = load i64, ptr %dimensions
  %wide = zext i32 %threads to i64
  %several = icmp ugt i64 %total, 1
  %others = icmp sgt i32 %threads, 1
  %counts = icmp ult i64 %total, 16777216
  %shared0 = and i1 %several, %others
  %shared = and i1 %shared0, %counts
  br i1 %shared, label %ask, label %alone
ask:
  %swap = cmpxchg ptr @taken, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %mine, label %together, label %alone
together:
  %most = sub i64 %wide, 1
  call void @hire(i64 %most)
  store %job %described, ptr @job
  store atomic i32 0, ptr @done seq_cst, align 4
  %high = shl i64 %most, 48
  %middle = shl i64 %total, 24
  %word = or i64 %high, %middle
  store atomic i64 %word, ptr @word seq_cst, align 8
  atomicrmw add ptr @bell, i32 1 seq_cst
  %asleep = load atomic i32, ptr @asleep seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %ring, label %own_share
ring:
  %last_bit = call i32 @bit(i64 %most)
  %below = sub i32 %last_bit, 1
  %bits = or i32 %last_bit, %below ; of those who may help
  call void @wake(ptr @bell, i32 2147483647, i32 %bits)
  br label %own_share
own_share:
  call void @work(i64 0)
  %count = trunc i64 %total to i32
  br label %look
look:
  %looks = phi i64 [ 0, %own_share ], [ %looked, %pause ]
  %done = load atomic i32, ptr @done seq_cst, align 4
  %ended = icmp eq i32 %done, %count
  br i1 %ended, label %end, label %pause
pause:
  call void @{pause}({pause_argument})
  %looked = add i64 %looks, 1
  %tired = icmp ugt i64 %looked, {patience}
  br i1 %tired, label %sleep, label %look
sleep:
  store atomic i32 1, ptr @caller_sleeps seq_cst, align 4
  %seen = load atomic i32, ptr @done seq_cst, align 4
  %over = icmp eq i32 %seen, %count
  br i1 %over, label %wake_up, label %rest
rest:
  call void @wait(ptr @done, i32 %seen, i32 -1)
  br label %wake_up
wake_up:
  store atomic i32 0, ptr @caller_sleeps seq_cst, align 4
  %now = load atomic i32, ptr @done seq_cst, align 4
  %enough = icmp eq i32 %now, %count
  br i1 %enough, label %end, label %sleep
end:
  store atomic i32 0, ptr @taken seq_cst, align 4
  ret void
alone:
  store %job %described, ptr %own
  br label %each
each:
  %i = phi i64 [ 0, %alone ], [ %following, %one ]
  %more = icmp ult i64 %i, %total
  br i1 %more, label %one, label %leave
one:
  call void @divide(ptr %own, i64 %i)
  %following = add i64 %i, 1
  br label %each
leave:
  ret void
}}

; In a child of a fork: nobody helps yet, and no loop runs.
define void @reset() {{
  store i64 0, ptr @helpers
  store i64 0, ptr @word
  store i32 0, ptr @asleep
  store i32 0, ptr @taken
  ret void
}}
"""


def offered():
    """Whether these threads serve here, unless somebody asks for Numba's."""
    return sys.platform == "linux" and platform.machine() in MACHINES and "NUMBA_THREADING_LAYER" not in os.environ


def install():
    """From now on, what Numba loads runs its parallel loops here."""
    futex, pause, argument = MACHINES[platform.machine()]
    key = ctypes.c_uint()
    if ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None):
        raise OSError("no key is left for what threads keep for themselves (pthread_key_create)")
    text = CODE.format(
        futex=futex, pause=pause, pause_argument=argument, pause_kind=argument.partition(" ")[0], looks=LOOKS,
        spins=SPINS, patience=PATIENCE, key=key.value,
    )  # fmt: skip
    numba.get_num_threads()  # Numba names its own first
    parallel_for, number, reset = addresses_of(text, ["parallel_for", "number", "reset"])
    binding.add_symbol("numba_parallel_for", parallel_for)
    binding.add_symbol("get_thread_id", number)
    os.register_at_fork(after_in_child=ctypes.CFUNCTYPE(None)(reset))
