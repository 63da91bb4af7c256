"""An interrupt (Ctrl-C) between any two operations of what reads and keeps experts: the next reply is right."""

import sys

import pytest
import torch
from streaming import PROMPT, TINY, budget_of, tiered, tokens

from halfbyte import expert_batch, expert_cache, expert_reader, stored_experts, tiered_experts
from halfbyte.engine import logits
from halfbyte.expert_cache import POLICIES
from halfbyte.loading import load_model

PLACES = {one.__file__ for one in (expert_batch, expert_cache, expert_reader, stored_experts, tiered_experts)}
TRIES = 50


def interrupted(call, at):
    """Have a call interrupted before so many lines of these files; how many there were."""
    seen = 0

    def line(frame, event, arg):
        nonlocal seen
        seen += event == "line"
        if seen == at:
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename in PLACES else None)
    try:
        call()
    except KeyboardInterrupt:
        assert seen == at
    finally:
        sys.settrace(before)
    return seen


def require_the_same_after_interrupts(model, resident):
    wanted = logits(resident, PROMPT)[0]

    def answer():
        logits(model, PROMPT)
        tokens(model, 2)

    lines = interrupted(answer, -1)
    assert lines > 20 * TRIES
    for number in range(TRIES):
        at = 1 + (number * lines + number * 7) // TRIES % lines
        interrupted(answer, at)
        assert torch.equal(logits(model, PROMPT)[0], wanted), f"after an interrupt at line {at} of {lines}"
    assert tokens(model) == tokens(resident)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("held", [6, 24, 100])
def test_experts_on_disk(resident, policy, held):
    require_the_same_after_interrupts(
        load_model(TINY, expert_cache=budget_of(TINY, held), expert_policy=policy), resident
    )


def test_experts_on_disk_in_host_memory_and_on_a_device(resident):
    require_the_same_after_interrupts(tiered(TINY, 6, 24), resident)


def test_threads_that_come_late_are_sent_away():
    """What was handed out before an interrupt, and begun by nobody, is read by nobody."""
    batch = expert_batch.Batch([], {}, set(), 4)
    batch.threads = 4
    numbers = [batch.join(), batch.join()]
    batch.leave(None)
    batch.leave(OSError("a fault"))
    batch.stop()
    assert numbers == [0, 1] and batch.join() == -1 and batch.take() == -1 and str(batch.error) == "a fault"
    assert not batch.wait(batch.all_left, 0.01), "two never joined"
