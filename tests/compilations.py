"""Kernels are compiled for other GPUs beside the tests and behind them in priority; test_cross_compile.py asks how."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT

import turns


@contextmanager
def under_way(runs, folder, threads):
    """Exit status and output of cross_compile.py, by run, in time. Processes that share a folder share the work: one of
    them compiles, and the others wait for what it leaves there."""
    begun, ending = [], threading.Event()

    def compiled(run):
        result = folder / f"{' '.join(run)}.json"
        with turns.locked(result.with_suffix(".lock")):
            if result.exists():
                return json.loads(result.read_text())
            if ending.is_set():
                return None  # nobody asks any more
            environment = {**os.environ, "TRITON_INTERPRET": "0"}  # there Triton compiles, where here it interprets
            command = ["nice", "-n", "19", sys.executable, Path(__file__).with_name("cross_compile.py"), *run]
            process = subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=environment)
            begun.append(process)
            said, _ = process.communicate()
            if process.returncode >= 0:  # else it was terminated, and the next one to ask compiles anew
                result.write_text(json.dumps([process.returncode, said]))
            return process.returncode, said

    with ThreadPoolExecutor(threads) as pool:
        yield {run: pool.submit(compiled, run) for run in runs}
        ending.set()  # perhaps early, perhaps before another process
        pool.shutdown(wait=False, cancel_futures=True)
        for process in begun:
            process.terminate()
