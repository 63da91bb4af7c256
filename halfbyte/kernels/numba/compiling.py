"""Compiling before the first step: everything a model needs, counted, on all cores, once.

Numba's compiler has one lock, so a second core takes a second process. It gets a kernel's name and types and returns
its code; whatever goes wrong there only leaves more to compile here.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Condition, Thread

from .compiled import rehearsal
from .store import portable

ROOT = str(Path(__file__).parents[3])
START = f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import serve; serve()"
MOST_PROCESSES = 4  # each takes 300 MB
WORTH = 3  # kernels for a process: with fewer, starting it takes as long as compiling them


def prepare(steps, progress=None):
    """Load the kernels that `steps()` calls, after compiling those that never were; returns how many those are.

    progress(done, total) counts them; where there are none it is not called.
    """
    with rehearsal() as needed:
        steps()
    missing = [(made, types) for made, types in needed if not made._cache.has(types)]
    # Those with many arguments take longest, and come first, so that no core waits for another at the end.
    jobs = Jobs(sorted(missing, key=lambda job: -len(job[1])))
    if progress is not None and missing:
        progress(0, len(missing))
    count = min(cores(), MOST_PROCESSES, len(missing) // WORTH) - 1
    workers = [Worker(jobs) for _ in range(count)]
    try:
        while jobs.unfinished:
            if job := jobs.take():
                made, types = job
                made.compile(types)
                jobs.finish()
            else:
                jobs.wait()
            if progress is not None:
                progress(len(missing) - jobs.unfinished, len(missing))
    finally:
        for worker in workers:
            worker.stop()
    for made, types in needed:
        made.compile(types)
    return len(missing)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Jobs:
    """What is still to be compiled, shared by those who compile."""

    def __init__(self, jobs):
        self.waiting, self.unfinished = deque(jobs), len(jobs)
        self.changed = Condition()

    def take(self):
        with self.changed:
            return self.waiting.popleft() if self.waiting else None

    def finish(self):
        with self.changed:
            self.unfinished -= 1
            self.changed.notify_all()

    def give_back(self, job):
        with self.changed:
            self.waiting.append(job)
            self.changed.notify_all()

    def wait(self):
        """Until another has finished one, or has given one back."""
        with self.changed:
            if self.unfinished and not self.waiting:
                self.changed.wait()


class Worker:
    """A process that compiles, and the thread that talks to it."""

    def __init__(self, jobs):
        self.jobs, self.process = jobs, None
        with suppress(OSError):
            if not getattr(sys, "frozen", False):  # there sys.executable is no Python
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", START],  # -P: nothing is imported from the current folder
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self.thread = Thread(target=self.run, daemon=True)
                self.thread.start()

    def run(self):
        while job := self.jobs.take():
            made, types = job
            try:
                pickle.dump((made.__module__, made.__name__, types), self.process.stdin)
                self.process.stdin.flush()
                made._cache.accept(types, pickle.load(self.process.stdout))
            except Exception:  # it has died
                self.jobs.give_back(job)
                return
            self.jobs.finish()

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.thread.join()
            self.process.communicate()


def serve():
    """What the process does: compile what standard input asks for, until it ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever is printed here must not be among the answers
    with suppress(EOFError, BrokenPipeError):
        while True:
            module, name, types = pickle.load(sys.stdin.buffer)
            made = getattr(import_module(module), name)
            made._cache = Caught()
            made.compile(types)
            pickle.dump(made._cache.data, answers)
            answers.flush()


class Caught:
    """In place of a kernel's cache: keeps the one that was compiled last."""

    def load_overload(self, signature, target_context):
        return None

    def save_overload(self, signature, compiled):
        self.data = portable(compiled)
