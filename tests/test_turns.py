"""Turns of tests. A lock belongs to one opening of a file, so this process and its threads may stand for several."""

import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from turns import turn

PATIENCE = 30  # seconds for what a machine under load still does


def free(path, kind):
    """Whether somebody else could lock it now."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_most_run_beside_each_other_and_one_runs_alone(tmp_path):
    with turn(tmp_path, alone=False), turn(tmp_path, alone=False):
        assert not free(tmp_path / "turn", fcntl.LOCK_EX)
    with turn(tmp_path, alone=True):
        assert not free(tmp_path / "turn", fcntl.LOCK_SH)
    assert free(tmp_path / "turn", fcntl.LOCK_EX)


def test_who_waits_to_be_alone_is_next(tmp_path):
    order, deadline = [], time.monotonic() + PATIENCE

    def run(alone):
        with turn(tmp_path, alone=alone):
            order.append("alone" if alone else "beside")

    with ThreadPoolExecutor(2) as pool, turn(tmp_path, alone=False):
        pool.submit(run, True)
        while free(tmp_path / "gate", fcntl.LOCK_EX):
            assert time.monotonic() < deadline, "others may begin"
        pool.submit(run, False)
    assert order == ["alone", "beside"]


def test_the_forked_child_of_a_test_keeps_nobody_waiting(tmp_path):
    with turn(tmp_path, alone=True):
        child = os.fork()
        if not child:
            time.sleep(PATIENCE)
            os._exit(0)
    try:
        assert free(tmp_path / "turn", fcntl.LOCK_EX)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
