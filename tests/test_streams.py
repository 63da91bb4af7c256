"""Pieces on their way from the engine's thread to the server's loop: when it is woken for them."""

from unittest.mock import Mock

import pytest

from halfbyte.engine import Request
from halfbyte.jobs import Job, Piece
from halfbyte.server import streams
from halfbyte.text.reply import Event


class Loop:
    """An event loop whose time passes when it is told to."""

    def __init__(self):
        self.now, self.soon, self.timers = 0.0, [], []

    def is_closed(self):
        return False

    def call_soon_threadsafe(self, call):
        self.soon.append(call)

    def call_later(self, seconds, call):
        timer = Mock(due=self.now + seconds, call=call)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def run(self):
        while self.soon:
            self.soon.pop(0)()

    def sleep(self, seconds):
        end = self.now + seconds
        self.run()
        while due := [timer for timer in self.timers if timer.due <= end]:
            timer = min(due, key=lambda one: one.due)
            self.now = timer.due
            timer.call()
            self.run()
        self.now = end


class Desk(streams.Desk):
    """Keeps what arrived, and when."""

    def __init__(self, pause=0.001):
        super().__init__(1000, pause)
        self.loop, self.told = Loop(), []

    def _arrive(self, pieces):
        if pieces:
            self.told.append((round(1000 * self.loop.now, 3), "".join(piece.events[0].text for _, piece in pieces)))
        super()._arrive(pieces)

    def step(self, replies, text, **last):
        self.deliver([(job, Piece([Event("text", text)], **last)) for job in replies])


def jobs(count):
    return [Job(Request([1], 9), b"", None, made=2) for _ in range(count)]


def test_replies_of_many_wait_for_each_other():
    desk, replies = Desk(), jobs(5)
    for number in range(6):
        desk.step(replies, str(number))
        desk.loop.sleep(0.0015)
    assert desk.told == [(0, "00000"), (4, "1111122222"), (8, "333334444455555")]


def test_what_waits_is_told_though_no_step_follows():
    """The others may have gone, or the next step may be a long prompt's."""
    desk, replies = Desk(), jobs(5)
    desk.step(replies, "0")
    desk.loop.sleep(0.001)
    desk.step(replies, "1")
    desk.loop.sleep(1)
    assert desk.told == [(0, "00000"), (4, "11111")] and desk.loop.timers == []
    desk.step(replies, "2")
    desk.loop.run()
    assert desk.told[2:] == [(1001, "22222")]


def test_a_lone_reply_is_told_word_by_word():
    desk, replies = Desk(), jobs(1)
    for number in range(3):
        desk.step(replies, str(number))
        desk.loop.run()
    assert desk.told == [(0, "0"), (0, "1"), (0, "2")]


@pytest.mark.parametrize("last", [{"finish_reason": "stop"}, {"error": "it broke"}])
def test_an_end_is_told_at_once_behind_what_waited(last):
    desk, (first, second) = Desk(), jobs(2)
    for text in "ab":
        desk.step([first, second], text)
        desk.loop.run()
    desk.step([second], "c", **last)
    desk.loop.run()
    assert desk.told == [(0, "aa"), (0, "bbc")]


def test_an_end_and_what_waited_are_told_once():
    """The loop is late: both have it come."""
    desk, replies = Desk(), jobs(2)
    desk.step(replies, "a")
    desk.step(replies, "b", finish_reason="stop")
    desk.loop.sleep(1)
    assert desk.told == [(0, "aabb")] and desk.loop.timers == []


def test_what_waited_is_told_before_the_engine_is_given_up():
    desk, (one, other) = Desk(), jobs(2)
    desk.scheduler = Mock()
    ticket = desk.submit([one])
    for text in "ab":
        desk.step([one, other], text)
        desk.loop.run()
    desk.fail_all("the engine has stopped")
    said = [piece.error or piece.events[0].text for _, piece in ticket.arrived]
    assert said == ["a", "b", "the engine has stopped"] and desk.kept == []


def test_what_comes_together_is_nobodys_delay():
    """A reader is too slow by what it had left before, not by how much comes at a time."""
    desk, replies = Desk(), jobs(5)
    desk.scheduler = Mock()
    quick, idle = desk.submit(replies[:1]), desk.submit(replies[1:2])
    for step in range(40):
        desk.step(replies, "word " * 20)  # seven of them are more than the buffer holds
        desk.loop.sleep(0.0004)
        if step % 10 == 9:
            quick.arrived, quick.size = [], 0
    assert "the reply was not read in time" in [piece.error for _, piece in idle.arrived]
    assert quick.open == {0} and desk.scheduler.cancel.call_count == 1


def test_a_first_word_is_told_at_once():
    desk, replies = Desk(), jobs(3)
    desk.step(replies, "a")
    desk.loop.run()
    replies[2].made = 1
    desk.step(replies, "b")
    desk.loop.run()
    assert desk.told == [(0, "aaa"), (0, "bbb")]


def test_nobody_waits_where_writing_takes_no_cores():
    desk, replies = Desk(pause=0.0), jobs(5)
    for number in range(3):
        desk.step(replies, str(number))
        desk.loop.run()
    assert len(desk.told) == 3
