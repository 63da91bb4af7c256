"""How kernels are compiled: a few decorators, so that every kernel means the same by a division and a thread.

Dividing by zero gives infinity or NaN, as in torch. Kernels run in parallel where they say prange and are kept on disk.
What only kernels call has no wrappers for Python, which take half of the time to compile. Two things would have it
compiled a second time: a prange index, which is unsigned, and a literal. `np.intp(index)` and `np.intp(0)` do not.
"""

from collections.abc import Callable
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from numba import njit

from .store import Kept

KERNELS: list[Any] = []  # every kernel that Python calls, of the modules imported so far
_hooks: list[Callable[[Any], None]] = []  # of the rehearsal that runs, if one does


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
unfolded = njit(inline="always", error_model="numpy")  # inlined before types are known
inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@contextmanager
def rehearsal():
    """Inside, this thread's calls of kernels that are not loaded are listed, as (kernel, types), instead of run.

    They return 0 and write nothing. What launchers read of a kernel's results they allocate as zeros, so a rehearsal
    passes through the same calls as the real thing.
    """
    needed = {}
    me = get_ident()

    def listen(made):
        def note(*arguments):
            if get_ident() != me:
                return type(made)._compile_for_args(made, *arguments)
            needed[made, tuple(map(made.typeof_pyval, arguments))] = None
            return lambda *arguments: 0

        made._compile_for_args = note  # what Numba calls where it has no code for the types of the arguments

    for made in KERNELS:
        listen(made)
    _hooks.append(listen)
    try:
        yield needed
    finally:
        _hooks.remove(listen)
        for made in KERNELS:
            made.__dict__.pop("_compile_for_args", None)
