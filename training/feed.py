"""Rows of token ids for training, made by worker processes while the model learns from the rows before."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from .conversations import Message, conversation
from .tokenizer import END_OF_TEXT, TURN_END, TURN_START, text

HELD_OUT = 1 << 40  # seeds of workers are below, those of held-out text above
TOGETHER = 32  # rows that a worker hands over at once, of 1024 tokens
Rows = tuple[NDArray[np.int16], NDArray[np.bool_]]  # ids, and which of them the assistant says


class Renderer:
    """Messages to ids, as the chat template renders them, and which ids are the assistant's own."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokens = tokenizers.Tokenizer.from_file(str(tokenizer))
        self.opening = self.tokens.encode(f"{TURN_START}assistant\n").ids
        self.start, self.end, self.between = (
            self.tokens.token_to_id(one) for one in (TURN_START, TURN_END, END_OF_TEXT)
        )

    def __call__(self, conversations: list[list[Message]]) -> Iterator[Rows]:
        for encoding in self.tokens.encode_batch_fast([text(messages) for messages in conversations]):
            ids = np.asarray([*encoding.ids, self.between], dtype=np.int16)
            learn = np.zeros(len(ids), dtype=np.bool_)
            ends = np.flatnonzero(ids == self.end)
            for at in np.flatnonzero(ids == self.start):
                first = at + len(self.opening)
                if ids[at:first].tolist() == self.opening:
                    learn[first : ends[np.searchsorted(ends, first)] + 1] = True
            yield ids, learn


def rows(tokenizer: Path, length: int, seed: int, long: bool) -> Iterator[Rows]:
    """Rows of length + 1 ids. Each begins with a conversation, and others follow until it is full.

    `long` rows begin, two times of three, with a conversation that takes up much of the row.
    """
    rng, render = random.Random(seed), Renderer(tokenizer)
    ready: deque[Rows] = deque()
    while True:
        ids, learn = np.zeros(length + 1, dtype=np.int16), np.zeros(length + 1, dtype=np.bool_)
        at = 0
        if long and rng.random() < 2 / 3:
            ready.extendleft(render([conversation(rng, tokens=rng.randint(length // 16, length * 15 // 16))]))
        while at <= length:
            if not ready:
                ready.extend(render([conversation(rng) for _ in range(TOGETHER)]))
            piece, mask = ready.popleft()
            room = min(len(piece), length + 1 - at)
            ids[at : at + room], learn[at : at + room] = piece[:room], mask[:room]
            at += room
        yield ids, learn


def batch(source: Iterator[Rows], count: int) -> Rows:
    made = [next(source) for _ in range(count)]
    return np.stack([ids for ids, _ in made]), np.stack([learn for _, learn in made])


def work(tokenizer: Path, length: int, seed: int, long: bool, queue: multiprocessing.Queue[Rows]) -> None:
    os.nice(10)  # the process that drives the GPU comes first
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are enough of us
    source, count = rows(tokenizer, length, seed, long), max(TOGETHER * 1024 // length, 1)
    while True:
        queue.put(batch(source, count))


class Feed:
    """Rows of one length. What the workers have not made in time is filled up with earlier rows."""

    def __init__(self, tokenizer: Path, length: int, seeds: range, *, long: bool) -> None:
        self.ids: list[NDArray[np.int16]] = []
        self.learn: list[NDArray[np.bool_]] = []
        self.used = self.again = 0  # rows taken for the first time, and once more
        self.rng, self.grown = random.Random(0), threading.Condition()
        context = multiprocessing.get_context("fork")  # before CUDA starts: forking later would break it
        self.queue: multiprocessing.Queue[Rows] = context.Queue(4 * len(seeds))
        for seed in seeds:
            given = (tokenizer, length, seed, long, self.queue)
            context.Process(target=work, args=given, daemon=True).start()

    def start(self) -> None:
        """Begin to collect. Apart from the start of the workers: threads and forks do not mix."""
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        while True:
            ids, learn = self.queue.get()
            with self.grown:
                self.ids.extend(ids)
                self.learn.extend(learn)
                self.grown.notify()

    def take(self, count: int) -> Rows:
        with self.grown:
            self.grown.wait_for(lambda: len(self.ids) >= count)
            fresh = min(len(self.ids) - self.used, count)
            chosen = [*range(self.used, self.used + fresh), *self.rng.sample(range(self.used), count - fresh)]
            self.used += fresh
            self.again += count - fresh
            return np.stack([self.ids[at] for at in chosen]), np.stack([self.learn[at] for at in chosen])
