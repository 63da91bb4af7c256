"""How kernels are compiled: a few decorators, so that every kernel means the same by a division and a thread.

Dividing by zero gives infinity or NaN, as in torch. Kernels run in parallel where they say prange and are kept on disk.
What only kernels call has no wrappers for Python, which take half of the time to compile. Two things would have it
compiled a second time: a prange index, which is unsigned, and a literal. `np.intp(index)` and `np.intp(0)` do not.

Numba counts who holds an array, atomically, at every function that is given one: threads that share arrays take turns
at the counts, which took a quarter of attention's time. So what kernels call does not count. It can then neither make
arrays nor give any back, nor take new ones from another: nobody would free them. It has `lanes.stack_floats`; what
needs more is `allocating`, and leaves its loops to others. test_ops.py counts what every op leaves behind.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from threading import RLock, get_ident
from typing import Any

import numpy as np
from numba import njit

from .store import Kept

KERNELS: list[Any] = []  # every kernel that Python calls, of the modules imported so far
_hooks: list[Callable[[Any], None]] = []  # of those who listen to calls of kernels
_one_listens = RLock()
_tracers: set[int] = set()  # the thread that traces, if one does
_compiled: dict[Any, Any] = {}  # the code of a kernel for arguments of some kinds, as far as it was traced
_rehearsed: list[dict[Any, None]] = []  # what the rehearsal that runs has listed, if one does


def _called_from_python(**options):
    def decorate(function):
        made = njit(error_model="numpy", **options)(function)
        made._cache = Kept(function)
        KERNELS.append(made)
        for hook in _hooks:
            hook(made)
        return made

    return decorate


kernel = _called_from_python(parallel=True)
alone = _called_from_python()  # on one thread
unlocked = _called_from_python(nogil=True)  # the same, while other threads run Python
unfolded = njit(inline="always", error_model="numpy")  # inlined before types are known
allocating = njit(_nrt=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inner = njit(_nrt=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(_nrt=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@contextmanager
def _listening(note, *, others_wait=False):
    """Inside, note(kernel, arguments) says what is to run where Numba has no code loaded for a call of this thread.

    A kernel that is loaded for another thread then runs for this one too, unnoted, unless others wait with their calls.
    """
    me = get_ident()

    def listen(made):
        def asked(*arguments):
            if get_ident() == me:
                return note(made, arguments)
            with _one_listens if others_wait else nullcontext():
                return type(made)._compile_for_args(made, *arguments)

        made._compile_for_args = asked  # what Numba calls where it has no code for the types of the arguments

    with _one_listens:
        before = {made: made.__dict__.get("_compile_for_args") for made in KERNELS}
        for made in KERNELS:
            listen(made)
        _hooks.append(listen)
        try:
            yield
        finally:
            _hooks.remove(listen)
            for made in KERNELS:
                made.__dict__.pop("_compile_for_args")
                if (other := before.get(made)) is not None:
                    made._compile_for_args = other


def _kind(value):
    """What Numba's type of a kernel's argument depends on (an array, a number, a tuple of those): asking Numba takes
    ten times as long."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        return value.dtype, value.ndim, flags.c_contiguous, flags.f_contiguous, flags.writeable, flags.aligned
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return type(value) if not isinstance(value, int) or -(1 << 63) <= value < 1 << 63 else None


def _nothing(*arguments):
    """In place of a kernel: writes nothing. What launchers read of a kernel's results they allocate as zeros, or as
    what one that has not run may say."""
    return 0


@contextmanager
def rehearsal():
    """Inside, this thread's calls of kernels that are not loaded are listed, as (kernel, types), instead of run.

    So a rehearsal passes through the same calls as the real thing.
    """
    needed = {}

    def note(made, arguments):
        needed[made, tuple(map(made.typeof_pyval, arguments))] = None
        return _nothing

    _rehearsed.append(needed)
    try:
        with _listening(note):
            yield needed
    finally:
        _rehearsed.remove(needed)


class Unsteady(Exception):
    """A launcher does what has to be done at every call: its kernels' arguments cannot be kept."""


def looks_at_values():
    """Said by a launcher where its Python goes on from values that a kernel has written or will read."""
    if get_ident() in _tracers:
        raise Unsteady("values")


@contextmanager
def tracing():
    """Inside, no call of this thread runs a kernel: they are listed, as (compiled code, arguments).

    What was not compiled before is compiled; in a rehearsal it is only listed there, and its code is None here.
    """
    calls = []

    def note(made, arguments):
        key = made, tuple(map(_kind, arguments))
        if key not in _compiled:
            types = tuple(map(made.typeof_pyval, arguments))
            if types not in made.overloads and _rehearsed:
                _rehearsed[-1][made, types] = None
                calls.append((None, arguments))
                return _nothing
            if types not in made.overloads:
                made.compile(types)
                made._clear()
            _compiled[key] = made.overloads[types]
        calls.append((_compiled[key], arguments))
        return _nothing

    with _listening(note, others_wait=True):
        for made in KERNELS:
            made._clear()  # Numba's own table alone: what is compiled stays
        _tracers.add(get_ident())
        try:
            yield calls
        finally:
            _tracers.remove(get_ident())
            for made in KERNELS:
                for compiled in list(made.overloads.values()):
                    made.add_overload(compiled)
