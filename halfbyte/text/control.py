"""Control tokens belong to the chat template. The same characters in somebody's text are text, and stay text.

A template mixes both into one string. So that they can be told apart afterwards, every look-alike in what it is given
gets a mark inside, after its first character, and so does a string that ends or begins with a part of one, which the
template's own characters could complete. Marks are Unicode noncharacters, which no text may contain. A template can
cut, join, trim or change the case of marked text: no control token comes out of it without a mark inside.
"""
# ruff: noqa: RUF001 (DeepSeek writes its tokens with ｜)

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import shown
from .template import TemplateError

MARK = "\ufdd0"
ALIAS = "\ufdd1", "\ufdd2"  # around an alias, whose digits are U+FDE0 to U+FDEF
IMPURE = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
# How control tokens are named, also where the tokenizer does not call them special.
TURN_LIKE = re.compile(r"<[|｜].*>|<.*[|｜]>")


def clean(text: str) -> str:
    """Text as tokenizers take it: lone surrogates and noncharacters become U+FFFD."""
    if text.isascii() or not IMPURE.search(text):
        return text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return IMPURE.sub("\ufffd", paired)


def each_string(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its strings changed, keys too."""
    try:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {each_string(key, change): each_string(one, change) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [each_string(one, change) for one in value]
        return value
    except RecursionError:
        raise TemplateError("The messages or tools nest too deeply for a chat template.") from None


class TokenSet:
    """Finds tokens in text: the longest at each place. One pattern of all would be slow: there may be thousands."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(tokens)
        self.lengths = sorted({len(token) for token in self.tokens}, reverse=True)
        firsts = "".join(sorted({re.escape(case) for token in self.tokens for case in _cases(token[0])}))
        self.first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def find(self, text: str, position: int, change: Callable[[str], str] = str) -> tuple[int, int] | None:
        """Start and end of the first token from `position` on, in text that `change` changes."""
        for found in self.first.finditer(text, position):
            start = found.start()
            for length in self.lengths:
                if start + length <= len(text) and change(text[start : start + length]) in self.tokens:
                    return start, start + length
        return None


class Guard:
    """Marks the look-alikes of some tokens, in any case, since a template may change it."""

    def __init__(self, tokens: Iterable[str]) -> None:
        lower = [token.lower() for token in tokens]
        self.tokens = TokenSet(lower)
        self.heads = {token[:n] for token in lower for n in range(1, len(token)) if not token[:n].isalnum()}
        self.tails = {token[n:] for token in lower for n in range(1, len(token)) if not token[n:].isalnum()}
        self.longest = max(self.tokens.lengths, default=0)

    def __call__(self, text: str) -> str:
        text, pieces, position = clean(text), [], 0
        while found := self.tokens.find(text, position, str.lower):
            pieces += [text[position : found[0] + 1], MARK]
            position = found[0] + 1
        text = "".join([*pieces, text[position:]])
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if any(text[max(start, end - n) : end].lower() in self.heads for n in range(1, self.longest)):
            text = text[:end] + MARK + text[end:]
        if any(text[start : start + n].lower() in self.tails for n in range(1, self.longest)):
            text = text[:start] + MARK + text[start:]
        return text


class Controls:
    """The control tokens of a tokenizer, and encoding that knows who wrote them.

    They are the special tokens, and those of the other added tokens that the templates write or that look like turns.
    """

    def __init__(self, tokens: Tokenizer, templates: Iterable[str], replies: Iterable[str] = ()) -> None:
        sources = list(templates)
        self.tokens = tokens
        self.ids = {
            token.content: id
            for id, token in tokens.get_added_tokens_decoder().items()
            if len(token.content) > 1
            and (token.special or TURN_LIKE.fullmatch(token.content) or any(token.content in one for one in sources))
            and not token.content.isspace()
        }
        self.all_ids = frozenset(self.ids.values())
        self.names = TokenSet(self.ids)
        self.guard = Guard(self.ids)
        # An assistant's text is the model's own: the marks of its reasoning and calls may stand in it.
        self.guard_assistant = Guard(self.ids.keys() - set(replies))

    def encode_text(self, text: str) -> list[int]:
        """Text without control tokens, whatever it looks like."""
        text = clean(text)
        ids = self.encode_trusted(text)
        return self._encode_aliased(text) if self._count(ids) else ids

    def encode_trusted(self, text: str) -> list[int]:
        """Text in which control tokens are meant."""
        ids: list[int] = self.tokens.encode(text, add_special_tokens=False).ids
        return ids

    def encode_marked(self, marked: str) -> list[int]:
        """What a template made of guarded strings."""
        text, marks = _without_marks(marked)
        pieces, position, searched, imitated = [], 0, 0, False
        while found := self.names.find(text, searched):
            start, end = found
            if bisect_right(marks, start) < bisect_left(marks, end):  # a mark inside: an imitation
                searched, imitated = start + 1, True
            else:
                pieces += [text[position:start], _alias(self.ids[text[start:end]])]
                position = searched = end
        if not imitated:
            ids = self.encode_trusted(text)
            if self._count(ids) <= len(pieces) // 2:  # no more than the template wrote: normalising made none either
                return ids
        return self._encode_aliased("".join([*pieces, text[position:]]))

    def _count(self, ids: list[int]) -> int:
        return sum(map(self.all_ids.__contains__, ids))

    @cached_property
    def _aliased(self) -> tuple[Tokenizer, dict[int, int]]:
        """The same tokenizer with control tokens under other names, and the true ids of its added tokens."""
        added = self.tokens.get_added_tokens_decoder()
        names = {id: _alias(id) if token.content in self.ids else token.content for id, token in added.items()}
        aliased = Tokenizer(self.tokens.model)  # shared, not copied
        aliased.normalizer = self.tokens.normalizer
        aliased.pre_tokenizer = self.tokens.pre_tokenizer
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        aliased.add_tokens(
            [AddedToken(names[id], **{flag: getattr(one, flag) for flag in flags}) for id, one in added.items()]
        )
        found = ((aliased.token_to_id(name), id) for id, name in names.items())
        return aliased, {here: id for here, id in found if here is not None}

    def _encode_aliased(self, text: str) -> list[int]:
        aliased, real = self._aliased
        ids: list[int] = aliased.encode(text, add_special_tokens=False).ids
        forbidden = self.all_ids - real.keys()
        if forbidden.intersection(ids):
            token = next(name for name, id in self.ids.items() if id in forbidden.intersection(ids))
            raise TemplateError(
                f"The text holds {shown(token)}, which this tokenizer always takes for a control token. Leave it out."
            )
        return [real.get(id, id) for id in ids]


def _cases(character: str) -> set[str]:
    return {case for case in (character, character.lower(), character.upper()) if len(case) == 1}


def _alias(id: int) -> str:
    return ALIAS[0] + "".join(chr(0xFDE0 + int(digit, 16)) for digit in f"{id:x}") + ALIAS[1]


def _without_marks(marked: str) -> tuple[str, list[int]]:
    """The text, and the places in it where marks stood, ascending."""
    pieces = marked.split(MARK)
    marks, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        marks.append(position)
    return "".join(pieces), marks
