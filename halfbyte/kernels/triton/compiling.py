"""Compiling before the first step: everything a model launches, counted, on all cores, once.

Steps are rehearsed: launchers run, nothing is launched, and each kernel that would be is noted with its types. What is
not in Triton's cache on the disk yet is compiled by processes that need no GPU, and is found there afterwards. Whatever
goes wrong in them only leaves more to compile at the first launch.
"""

import atexit
import hashlib
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import triton
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)
ROOT = str(Path(__file__).parents[3])
START = f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import serve; serve()"
MARK = "prepared.txt"
MOST_PROCESSES = 16  # each takes 500 MB


class Kernel:
    """A kernel and the types that it is to be compiled for: what Triton's cache knows it by."""

    def __init__(self, function, signature, constexprs, options, attrs, target):
        self.module, self.name = function.fn.__module__, function.fn.__qualname__
        self.signature, self.constexprs, self.options, self.attrs = signature, constexprs, options, attrs
        self.target = target

    @property
    def source(self):
        return ASTSource(getattr(import_module(self.module), self.name), self.signature, self.constexprs, self.attrs)

    @cached_property
    def key(self):
        """Of the folder that it has in Triton's cache."""
        source, backend = self.source, backend_of(self.target)
        options = backend.parse_options({**self.options, **source.parse_options()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode("utf-8")).hexdigest(), f"{source.name[:150]}.json"

    def compile(self):
        triton.compile(self.source, target=self.target, options=self.options)


@cache
def backend_of(target):
    return make_backend(target)


def compiled(key):
    folder, name = key
    return name in (get_cache_manager(folder).get_group(name) or {})


@contextmanager
def rehearsal():
    """Inside, nothing is launched; gives the list of kernels that would have been compiled for it."""
    noted, places, run, do_compile = [], [], JITFunction.run, JITFunction._do_compile

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        kernels, _, target, *_ = self.device_caches[device]
        noted.append(Kernel(self, signature, constexprs, options.__dict__, attrs, target))
        kernels[key] = noted[-1]  # so that it is noted once
        places.append((kernels, key))

    JITFunction._do_compile = note
    JITFunction.run = lambda self, *args, grid, warmup, **more: run(self, *args, grid=grid, warmup=True, **more)
    try:
        yield noted
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        for kernels, key in places:
            del kernels[key]


def prepare(steps, progress=None, subject=""):
    """Have the kernels that `steps()` launches compiled; returns how many never were.

    progress(done, total) counts them; where there are none it is not called. A rehearsal takes seconds: of a `subject`
    that was prepared once, by the same sources, nothing is rehearsed again. A mark in Triton's cache says so.
    """
    have_cache()
    mark = get_cache_manager(hashlib.sha256(f"{subject} {sources()} {triton.__version__}".encode()).hexdigest())
    if subject and mark.get_file(MARK) is not None:
        return 0
    count = rehearsed(steps, progress)
    if subject:
        mark.put(subject, MARK, binary=False)
    return count


@cache
def have_cache():
    """Have Triton keep what it compiles: in a folder of this process where its own is no place, or not the user's."""
    wanted = knobs.cache.dir
    try:
        os.makedirs(wanted, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
        if not (why := exposed(os.stat(wanted))):
            return
        why += ", and what lies there is executed"
    except OSError as error:
        why = error.strerror or error
    passing = tempfile.mkdtemp(prefix="halfbyte-triton-")
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    knobs.cache.dir = passing  # in the environment too, for the processes that compile
    log.warning(
        "%s: %s. Until then GPU kernels are compiled at every start, in a temporary folder; TRITON_CACHE_DIR names "
        "another place for them.", wanted, why,
    )  # fmt: skip


def exposed(found):
    """Why somebody else may have written what this is the state of; "" where nobody else can have.

    A group may, if it is the user's alone, as most systems make them: Triton's folders are as the user's others are.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & stat.S_IWOTH:
        return "everybody can write to it"
    return "its group can write to it" if found.st_mode & stat.S_IWGRP and not alone(found.st_gid) else ""


def alone(gid):
    """Whether nobody but this user is in a group."""
    import grp
    import pwd

    try:
        members = {*grp.getgrgid(gid).gr_mem, *(one.pw_name for one in pwd.getpwall() if one.pw_gid == gid)}
        return members <= {pwd.getpwuid(os.geteuid()).pw_name}
    except KeyError:  # a number without a name: who knows
        return False


def sources():
    """What tells one state of this package from another."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def rehearsed(steps, progress):
    with rehearsal() as noted:
        steps()
    missing = list({kernel.key: kernel for kernel in noted if not compiled(kernel.key)}.values())
    if not missing:
        return 0
    waiting, done = SimpleQueue(), SimpleQueue()
    for kernel in sorted(missing, key=lambda kernel: -len(kernel.signature)):  # the long ones first
        waiting.put(kernel)
    workers = [Worker(waiting, done) for _ in range(min(cores(), MOST_PROCESSES, len(missing)))]
    try:
        for count in range(len(missing)):
            if progress is not None:
                progress(count, len(missing))
            done.get()
        if progress is not None:
            progress(len(missing), len(missing))
    finally:
        for worker in workers:
            worker.stop()
    return len(missing)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that compiles, and the thread that talks to it. A kernel that it fails at counts as done: the first
    launch will say what is wrong with it."""

    def __init__(self, waiting, done):
        self.waiting, self.done = waiting, done
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START],  # -P: nothing is imported from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        Thread(target=self.run, daemon=True).start()

    def run(self):
        with suppress(Empty):
            while True:
                kernel = self.waiting.get_nowait()
                with suppress(Exception):  # it has died, or cannot be told
                    self.process.stdin.write(pickle.dumps(kernel))
                    self.process.stdin.flush()
                    self.process.stdout.readline()
                self.done.put(kernel)

    def stop(self):
        self.process.kill()
        self.process.communicate()


def serve():
    """What the process does: compile what standard input asks for, until it ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever is printed here must not be among the answers
    with suppress(EOFError, BrokenPipeError):
        while True:
            kernel = pickle.load(sys.stdin.buffer)
            with suppress(Exception):
                kernel.compile()
            answers.write(b"done\n")
            answers.flush()
