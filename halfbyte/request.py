"""What is asked of the engine, and what it gives back token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .sampling import SamplingParams

Processor = Callable[[Tensor, Tensor], Tensor]  # (the text's ids so far [T], logits [1, V]) -> logits [1, V]
Chooser = Callable[[Tensor], Tensor]  # log-probabilities [1, V] -> an id [1]


@dataclass(eq=False)
class Request:
    """A text to go on with. A program may change the logits (`processors`) or choose by itself (`chooser`)."""

    prompt: list[int]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    processors: Sequence[Processor] = ()
    chooser: Chooser | None = None
    goes_on: bool = False  # with the text that its slot holds already
    pause: int = 0  # a step ends after so many tokens of the prompt: there the caller can mark the state
    keeps: bool = True  # somebody reads the state that it leaves in its slot; else that may be a token ahead
    wants_logits: bool = True
    slot: int | None = None
    computed: int = 0  # tokens of the prompt that are in the cache
    made: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Made(NamedTuple):
    """A token that a step has made; `logits` are the row [V] that it was drawn from, or [0] where nobody wants them."""

    request: Request
    id: int
    logits: Tensor


def replayable(request: Request) -> bool:
    """Whether a request goes on from one token by what its slot and its sampling parameters say alone."""
    plain = not request.processors and request.chooser is None and not request.params.logit_bias
    return plain and not request.params.penalised


def ended(request: Request, stopped: str | None) -> str | None:
    """Why a reply has ended. A stop string counts, also where its last token was the last that was allowed."""
    return "stop" if stopped is not None else request.finish_reason
