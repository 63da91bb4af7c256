"""Work that may take seconds, and that some requests wait for before they have jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .refusals import queue_full

T = TypeVar("T")


class Line:
    """One after another, in a thread of its own, or as many at a time as it has threads. One more than `most` that wait
    is refused; whoever leaves, by being cancelled, costs nothing but what is under way already.
    """

    def __init__(self, name: str, most: int, threads: int = 1) -> None:
        self.pool, self.most = ThreadPoolExecutor(threads, name), most + threads
        self.length = 0  # with those whose turn it is

    async def run(self, work: Callable[[], T]) -> T:
        if self.length >= self.most:
            raise queue_full()
        self.length += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        finally:
            self.length -= 1

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
