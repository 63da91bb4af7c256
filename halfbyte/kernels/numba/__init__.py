"""CPU kernels in Numba. Importing this folder settles Numba's two global choices, before anything is compiled.

Threads: the `omp` layer, the best neighbour to torch's own pool (`workqueue` takes 100 us a region).
Cache: one folder for each state of these sources. Numba itself looks only at the file that holds a kernel, and would
go on using a compiled kernel whose building blocks (lanes.py) have changed.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from numba.core import config


def _cache_folder() -> Path:
    """Where compiled kernels are kept: the user's cache folder, or one of this process where that is not writable."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", base)
    folder = Path(base) / "halfbyte" / f"numba-{sources.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="halfbyte-numba-"))


if "NUMBA_THREADING_LAYER" not in os.environ:
    config.THREADING_LAYER = "omp"
if "NUMBA_CACHE_DIR" not in os.environ:
    config.CACHE_DIR = str(_cache_folder())
