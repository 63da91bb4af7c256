"""Which of Numba's thread pools runs the kernels: omp where it is found, and where it is not, said and still right."""

import subprocess
import sys

from halfbyte import machine

WITHOUT_OMP = """
import sys
sys.modules["numba.np.ufunc.omppool"] = sys.modules["numba.np.ufunc.tbbpool"] = None  # as where libgomp is absent
import torch
from halfbyte import machine
from halfbyte.cli import main
from halfbyte.ops.rowwise import glu
x = torch.randn(64, 1024)
assert torch.allclose(glu(x, x), torch.nn.functional.silu(x) * x, atol=1e-5)
sys.exit(main(["doctor"]))
"""


def test_omp_runs_the_kernels():
    assert machine.threading_layer() == "omp"
    assert machine.slow_threads() is None


def test_the_slow_pool_is_spoken_of():
    done = subprocess.run([sys.executable, "-c", WITHOUT_OMP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "(workqueue)" in done.stdout and "libgomp" in done.stdout
