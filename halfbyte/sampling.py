"""How tokens are chosen: what a request may ask for, what it gets by default, and the rows of a batch on the device."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import limits
from .errors import shown
from .ops.dispatch import wide
from .ops.sampling import Sampling, sample
from .step import upload

log = logging.getLogger(__name__)
SEEDS = 1 << 63  # of either sign
BIAS = 100.0  # of either sign, as OpenAI's


def plain(value: Any) -> Any:
    """A single number of NumPy's or torch's as Python's, and tables of them; all else as it is."""
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # no number, or several
        return value


@dataclass(frozen=True)
class SamplingParams:
    """One request's wishes. The defaults are greedy; a value out of range is refused here, before anything runs."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: another one each time
    logprobs: int = 0  # how many of the likeliest tokens are reported with each token

    def __post_init__(self) -> None:
        self._number("temperature", 0, limits.TEMPERATURE)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, limits.REPETITION, above=True)
        self._number("presence_penalty", -limits.PENALTY, limits.PENALTY)
        self._number("frequency_penalty", -limits.PENALTY, limits.PENALTY)
        self._integer("top_k", -1, (1 << 31) - 1)
        self._integer("logprobs", 0, limits.TOP_LOGPROBS)
        if self.seed is not None:
            self._integer("seed", -SEEDS, SEEDS - 1)
        if self.logit_bias is not None:
            self._check_bias(self.logit_bias)

    @classmethod
    def of(cls, generation_config: Mapping[str, Any] | None = None, **given: Any) -> SamplingParams:
        """What was given, not None; for the rest what generation_config.json says; for the rest the defaults.

        Without do_sample a model is meant to be greedy, whatever temperature stands beside it. What the file has wrong
        is ignored and said.
        """
        config = dict(generation_config or {})
        names = ["repetition_penalty"]
        if config.get("do_sample") is True:
            config.setdefault("temperature", 1.0)
            names += ["temperature", "top_k", "top_p", "min_p"]
        defaults = {}
        for name in names:
            if config.get(name) is not None:
                try:
                    cls(**{name: config[name]})
                    defaults[name] = config[name]
                except ValueError as error:
                    log.warning("generation_config.json: %s It is ignored.", error)
        if unknown := given.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"{', '.join(sorted(unknown))}: there is no such sampling parameter.")
        return cls(**{**defaults, **{name: value for name, value in given.items() if value is not None}})

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and low <= value <= high and not (above and value == low)):
            span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise ValueError(f"{name} must be a number {span}, it is {shown(value)}.")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, it is {shown(value)}.")

    def _check_bias(self, bias: Mapping[int, float]) -> None:
        if not isinstance(bias, Mapping):
            raise ValueError("logit_bias must be an object of token ids.")
        for id, value in bias.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= BIAS
            if type(id) is not int or id < 0 or not number:
                said = f"a token id and a number from -{BIAS:g} to {BIAS:g} were expected"
                raise ValueError(f"logit_bias: {shown(id)}: {shown(value)}: {said}.")


class Logprobs(NamedTuple):
    """Of each row: the chosen token's, and the likeliest tokens' with their ids, descending."""

    chosen: Tensor  # float32 [B]
    ids: Tensor  # int64 [B, top]
    top: Tensor  # float32 [B, top]


def logprobs(logits: Tensor, ids: Tensor, top: int = 0) -> Logprobs:
    """Log-probabilities as the model gave them, before penalties, temperature and filters.   logits [B, V]   ids [B]"""
    scores = torch.log_softmax(logits.float(), -1)
    best = scores.topk(min(top, scores.shape[1]), -1)
    return Logprobs(scores.gather(-1, ids.long()[:, None])[:, 0], best.indices, best.values)


class Sampler:
    """Draws the tokens of requests that live in slots. What a request asked for stays on the device as long as it does.

    Nothing of a row depends on the others: its numbers are a function of its own parameters, seed and position.
    The penalties count what was generated. A repetition penalty is meant for the whole text, so a row with one counts
    the prompt too (as do its other penalties then).
    """

    def __init__(self, slots: int, V: int, device: torch.device | str = "cpu") -> None:
        self.V, self.device = V, torch.device(device)
        self.params = [SamplingParams()] * slots
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.settings = torch.zeros(6, slots, dtype=torch.float32, device=device)  # in the order of start()
        self.settings[1] = 1.0  # top_p: greedy rows, and those of nobody
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.counts: Tensor | None = None  # int32 [slots, V], once a row has penalties

    def start(self, slot: int, params: SamplingParams, prompt: Sequence[int] = ()) -> int:
        """A request takes a slot. Returns its seed, drawn where none was asked for."""
        if params.logit_bias and max(params.logit_bias) >= self.V:
            raise ValueError(f"logit_bias: token id {max(params.logit_bias)}, but there are {self.V}.")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.params[slot] = params
        self.seeds[slot] = seed
        self.top_k[slot] = max(params.top_k, 0)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        settings = [params.temperature, params.top_p, params.min_p, *penalties]
        self.settings[:, slot] = upload(settings, self.device, torch.float32)
        if params.penalised:
            if self.counts is None:
                self.counts = torch.zeros(len(self.params), self.V, dtype=torch.int32, device=self.device)
            counted = prompt if params.repetition_penalty != 1 else ()
            ids = torch.tensor(list(counted), dtype=torch.int64, device=self.device)
            self.counts[slot] = torch.bincount(ids, minlength=self.V).int()
        return seed

    def __call__(self, logits: Tensor, slots: Sequence[int], positions: Tensor) -> Tensor:
        """The next token of each row.   logits [B, V]   slots, one a row   positions int [B]   ->   ids int32 [B]

        positions: where the drawn token will stand in its text. Rows without penalties are not counted.
        """
        rows = upload(list(slots), self.device, torch.int64)
        params = [self.params[slot] for slot in slots]
        penalised = any(one.penalised for one in params)
        counts = self.counts[rows] if penalised and self.counts is not None else None
        ids = sample(self._biased(logits, params), self._fields(params, rows, counts), self.seeds[rows], positions)
        if penalised and self.counts is not None:
            self.counts[rows, ids.long()] += 1
        return ids

    def _fields(self, params: Sequence[SamplingParams], rows: Tensor, counts: Tensor | None) -> Sampling:
        """None where a field is off in every row, so that the op does no work for it."""
        temperature, top_p, min_p, repetition, presence, frequency = self.settings[:, rows]
        drawn = [one for one in params if one.temperature > 0]
        return Sampling(
            temperature,
            self.top_k[rows] if any(one.top_k > 0 for one in drawn) else None,
            top_p if any(one.top_p < 1 for one in drawn) else None,
            min_p if any(one.min_p > 0 for one in drawn) else None,
            repetition if counts is not None else None,
            presence if counts is not None else None,
            frequency if counts is not None else None,
            counts,
        )

    def _biased(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        entries = [(row, id, bias) for row, one in enumerate(params) for id, bias in (one.logit_bias or {}).items()]
        if not entries:
            return logits
        row, id, bias = (torch.tensor(column, device=self.device) for column in zip(*entries, strict=True))
        biased = wide(logits).clone()
        biased[row, id] += bias.to(biased.dtype)
        return biased
