"""Replies of a given form: a JSON schema or a grammar, compiled by llguidance to the tokens that may come next."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from . import limits
from .chat import Tokenizer
from .errors import HalfbyteError
from .text.confined import Worker
from .text.grammar_worker import made, said

Kind = Literal["json_schema", "grammar", "regex"]  # a grammar is Lark's, or llama.cpp's GBNF
Form = tuple[Kind | Literal["tool"], str]
REMEMBERED = 4096  # forms that were found fine
REFUSALS = 1024  # of forms, each a line of what is wrong
AGAIN_SECONDS = 60.0  # until what took too long or too much memory is tried again: the machine may have been busy


class GrammarError(HalfbyteError, ValueError):
    """A schema or a grammar that cannot be followed."""

    exit_code = 2


class Constraint:
    """What may follow in one reply. `mask` is asked before a token is drawn, `push` told which one was."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary
        self.active = True  # not while the model thinks: the form is that of its answer

    def copy(self) -> Constraint:
        """For another reply of the same form. This one must be at its beginning."""
        return Constraint(self.matcher.deep_copy(), self.vocabulary)

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self.matcher.is_stopped())

    def mask(self, logits: Tensor) -> Tensor:
        """The logits [1, V] with -inf where a token would leave the form."""
        if not self.active:
            return logits
        allowed = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8).to(logits.device)
        bits = (allowed[:, None] >> torch.arange(8, device=logits.device, dtype=torch.uint8)) & 1
        self._check()
        banned = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        flat = bits.flatten()[: self.vocabulary].bool()
        banned[: len(flat)] = ~flat
        return logits.masked_fill(banned, -torch.inf)

    def push(self, id: int, thinking: bool = False) -> None:
        """`thinking`: the reasoning still goes on after this token. The first token after it is the form's first."""
        if self.active:
            self.matcher.consume_token(id)
            self._check()
        self.active = not thinking

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarError("the reply can no longer follow its grammar, which leads nowhere or is too complex")


class Follower:
    """A constraint as `logits_processors` of stream_generate take it: it learns from the text what was drawn."""

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.constraint, self.ends = constraint, sorted(tokenizer.eos_ids)
        self.reply, self.decoder = tokenizer.reply(prompt), tokenizer.decoder()
        self.seen: int | None = None  # tokens of the text so far
        constraint.active = self.reply.state != "reasoning"

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        new = [] if self.seen is None else ids[self.seen :].tolist()
        self.seen = len(ids)
        for id in new:
            self.reply.push(self.decoder.push(id))
            self.constraint.push(id, thinking=self.reply.state == "reasoning")
        if not self.constraint.complete:
            return self.constraint.mask(logits)
        ended = torch.full_like(logits, -torch.inf)
        ended[:, self.ends] = 0.0
        return ended


def check(*forms: Form) -> None:
    """Refuse what no reply could follow, whatever the tokenizer, and what takes too long or too much memory to compile.
    The schema of a tool that nobody insists on must only be one.
    """
    if not (new := untried(*forms)):
        return
    answer, keys = worker.ask(forms=new), list(map(digest, new))
    if "error" in answer:
        _refused.put(together(keys), answer["error"], AGAIN_SECONDS if "spent" in answer else math.inf)
        raise GrammarError(answer["error"])
    for key in keys:
        _fine.put(key, "")


def untried(*forms: Form) -> list[Form]:
    """Those that must be tried first, since they were not found fine lately. What was refused lately is refused."""
    new = {key: form for form in forms if _fine.get(key := digest(form)) is None}
    if new and (wrong := _refused.get(together(new))) is not None:
        raise GrammarError(wrong)
    return list(new.values())


def digest(form: Form) -> bytes:
    return hashlib.sha256(" ".join(form).encode("utf-8", "surrogatepass")).digest()


def together(keys: Iterable[bytes]) -> bytes:
    """Of what is tried in one go: one form is wrong, nobody says which, or all of them take too long."""
    return hashlib.sha256(b"".join(keys)).digest()


class Verdicts:
    """What was found of forms lately: whoever offers tools does so with every request. Bounded; what was not asked for
    longest goes first."""

    def __init__(self, most: int) -> None:
        self.most, self.lock = most, threading.Lock()
        self.found: dict[bytes, tuple[str, float]] = {}  # by key: what is wrong, and until when that holds

    def get(self, key: bytes) -> str | None:
        with self.lock:
            verdict = self.found.pop(key, None)
            if verdict is None or verdict[1] < time.monotonic():
                return None
            self.found[key] = verdict
            return verdict[0]

    def put(self, key: bytes, wrong: str, seconds: float = math.inf) -> None:
        with self.lock:
            self.found.pop(key, None)
            self.found[key] = wrong, time.monotonic() + seconds
            if len(self.found) > self.most:
                del self.found[next(iter(self.found))]


_fine, _refused = Verdicts(REMEMBERED), Verdicts(REFUSALS)  # apart: refusals push out nothing that is fine
worker = Worker(
    "grammar_worker.py", limits.SCHEMA_SECONDS, limits.SCHEMA_MEMORY, limits.SCHEMA_OUTPUT,
    lambda: GrammarError("the process that tries them does not start. Is llguidance installed?"),
)  # fmt: skip


class Grammars:
    """Compiles for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._prepared: Any = None
        self._lock = threading.Lock()

    def constraint(self, kind: Kind, source: str) -> Constraint:
        """A constraint at its beginning, or a GrammarError."""
        import llguidance

        check((kind, source))  # what takes long there took no longer than it may, and takes about as long here
        matcher = llguidance.LLMatcher(self._tokenizer(), made(kind, source), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the work that is left over for the first token
        if matcher.is_error():
            raise GrammarError(said(matcher.get_error()))
        return Constraint(matcher, self.vocabulary)

    def term(self, text: str) -> str:
        """A text in a grammar: where it is a special token, which no text can spell, that token."""
        added = self.tokenizer.tokens.get_added_tokens_decoder()
        special = [id for id, token in added.items() if token.special and token.content == text]
        return f"<[{special[0]}]>" if special else json.dumps(text, ensure_ascii=False)

    def _tokenizer(self) -> Any:
        """Made once: with a vocabulary of 250 000 tokens it takes seconds."""
        import llguidance

        with self._lock:
            if self._prepared is None:
                eos = sorted(self.tokenizer.eos_ids) or None
                self._prepared = llguidance.LLTokenizer(
                    self.tokenizer.tokens.to_str(), n_vocab=self.vocabulary, eos_token=eos
                )
            return self._prepared
