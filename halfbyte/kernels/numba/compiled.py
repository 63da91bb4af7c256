"""How kernels are compiled: a few decorators, so that every kernel means the same by a division and a thread.

Dividing by zero gives infinity or NaN, as in torch. Kernels run in parallel where they say prange and are kept on disk.
What only kernels call has no wrappers for Python, which take half of the time to compile. A prange index is unsigned:
`np.intp(index)` keeps helpers from being compiled a second time for it.
"""

from numba import njit

kernel = njit(parallel=True, cache=True, error_model="numpy")
alone = njit(cache=True, error_model="numpy")  # called from Python, on one thread
unfolded = njit(inline="always", error_model="numpy")  # inlined before types are known
inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
