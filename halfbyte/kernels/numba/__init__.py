"""CPU kernels in Numba. Importing this folder settles Numba's two global choices, before anything is compiled.

Threads: our own (pool.py) on Linux, unless NUMBA_THREADING_LAYER asks for others. Elsewhere the `omp` layer where
libgomp is found, the best neighbour to torch's own pool; else `tbb`; else `workqueue`, which takes 100 us a region:
`machine.slow_threads` says so.
Cache: what Numba itself keeps (machine.py's read probe) goes where the kernels go (store.py), not beside the sources.
"""

import os

from numba.core import config

from . import pool, store

if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
if "NUMBA_CACHE_DIR" not in os.environ and store.folder() is not None:
    config.CACHE_DIR = str(store.folder())

OWN_THREADS = pool.offered()
if OWN_THREADS:
    pool.install()
