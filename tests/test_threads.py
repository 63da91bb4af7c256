"""Which of Numba's thread pools runs the kernels: omp where it is found, and where it is not, said and still right."""

import subprocess
import sys
from threading import Thread

import numba
import torch
from model_goldens import FOLDER

from halfbyte import machine
from halfbyte.loading import load_model
from halfbyte.scheduler import Scheduler

WITHOUT_OMP = """
import sys
sys.modules["numba.np.ufunc.omppool"] = sys.modules["numba.np.ufunc.tbbpool"] = None  # as where libgomp is absent
import torch
from halfbyte import machine
from halfbyte.cli import main
from halfbyte.ops.rowwise import glu
x = torch.randn(64, 1024)
assert torch.allclose(glu(x, x), torch.nn.functional.silu(x) * x, atol=1e-5)
assert main(["generate", "tiny", "--prompt", "Once", "-n", "4"]) == 0
sys.exit(main(["doctor"]))
"""


def test_omp_runs_the_kernels():
    assert machine.threading_layer() == "omp"
    assert machine.slow_threads() is None


def test_the_slow_pool_is_spoken_of():
    done = subprocess.run([sys.executable, "-c", WITHOUT_OMP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "(workqueue)" in done.stdout and "libgomp" in done.stdout
    assert done.stderr.count("workqueue") == 1


def test_waiting_asleep_is_spoken_of(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "unset it" in machine.slow_threads()


def test_the_thread_of_a_server_has_as_many_threads():
    """Numba counts for each thread anew."""
    model, before, seen = load_model(FOLDER / "qwen3_moe-4bit"), torch.get_num_threads(), []

    class Watched(Scheduler):
        def _drop_cancelled(self):
            seen.append(numba.get_num_threads())
            self.closing = True

    machine.use_threads(1)
    try:
        other = Thread(target=lambda: seen.append(numba.get_num_threads()))
        other.start()
        other.join()
        scheduler = Watched(model, model.new_cache(1, 20), frozenset(), lambda *pieces: None)
        scheduler.waiting.append(None)
        scheduler.start()
        scheduler.thread.join(60)
    finally:
        machine.use_threads(before)
    assert seen[1:] == [1]
