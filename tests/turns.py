"""Locks between the processes of `pytest -n 2`: most tests run beside others, one that measures time runs alone."""

import fcntl
from contextlib import ExitStack, contextmanager


@contextmanager
def locked(path, kind=fcntl.LOCK_EX):
    with path.open("a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file, too


@contextmanager
def turn(folder, *, alone):
    """Beside others, or while nobody else has a turn. Who waits for that keeps the gate, so that nobody else begins."""
    with ExitStack() as held:
        with locked(folder / "gate"):
            held.enter_context(locked(folder / "turn", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
