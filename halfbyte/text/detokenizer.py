"""mlx-lm's streaming detokenizer: ids go in one by one, text comes out as it gets sure."""

from __future__ import annotations

from collections.abc import Callable

from .decoder import Decoder


class StreamingDetokenizer:
    """`text` is all of it so far, `last_segment` what came since it was last asked for, `tokens` the ids."""

    def __init__(self, make: Callable[[], Decoder]) -> None:
        self._make = make
        self.reset()

    def reset(self) -> None:
        self._decoder, self.text, self.tokens, self.offset = self._make(), "", list[int](), 0

    def add_token(self, token: int) -> None:
        self.tokens.append(int(token))
        self.text += self._decoder.push(self.tokens[-1])

    def finalize(self) -> None:
        """Give the rest: no token follows."""
        self.text += self._decoder.finish()

    @property
    def last_segment(self) -> str:
        segment, self.offset = self.text[self.offset :], len(self.text)
        return segment
