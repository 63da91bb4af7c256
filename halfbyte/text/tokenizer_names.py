"""What scripts ask of a tokenizer, under the names that transformers and mlx-lm have for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, overload

import tokenizers

from ..errors import shown
from .decoder import Decoder
from .detokenizer import StreamingDetokenizer
from .reply import Syntax

MOST_ID = (1 << 32) - 1  # the tokenizers package counts in 32 bits


class TokenizerNames(ABC):
    """The base of Tokenizer, which says what is said here in terms of the attributes below."""

    tokens: tokenizers.Tokenizer
    named: dict[str, str]
    templates: dict[str, str]
    syntax: Syntax
    eos_ids: frozenset[int]

    @abstractmethod
    def decoder(self) -> Decoder: ...

    def __len__(self) -> int:
        return int(self.tokens.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Every token's id, those of added tokens too."""
        vocabulary: dict[str, int] = self.tokens.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def bos_token(self) -> str | None:
        return self.named.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.named.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.named.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.named.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id(self.unk_token)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of text, where it ends replies; else the first that does."""
        own = self._id(self.eos_token)
        return own if own in self.eos_ids else min(self.eos_ids, default=None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a reply; they may be set."""
        return self.eos_ids

    @eos_token_ids.setter
    def eos_token_ids(self, ids: Iterable[int] | None) -> None:
        self.eos_ids = frozenset(ids or ())

    def add_eos_token(self, token: str) -> None:
        """Let one more token, or id in digits, end replies."""
        id = int(token) if str(token).isdecimal() else self._id(token)
        if id is None or self.convert_ids_to_tokens(id) is None:
            raise ValueError(f"add_eos_token: {shown(token)} is no token of this model")
        self.eos_ids |= {id}

    @property
    def chat_template(self) -> str | None:
        """The template that most use; None is a base model."""
        return self.templates.get("default")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    @property
    def has_thinking(self) -> bool:
        return bool(self.think_start)

    @property
    def think_start(self) -> str | None:
        return self.syntax.think[0] or None

    @property
    def think_end(self) -> str | None:
        return self.syntax.think[1] or None

    @property
    def has_tool_calling(self) -> bool:
        return bool(self.syntax.call[0])

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """The tokens as the vocabulary has them, of one id or of several; None where there is no such id."""
        if isinstance(ids, int):
            return self.tokens.id_to_token(ids) if 0 <= ids <= MOST_ID else None
        return [self.convert_ids_to_tokens(int(id)) for id in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """The ids of one token or of several; unk_token_id, which may be None, where there is no such token."""
        if isinstance(tokens, str):
            id = self._id(tokens)
            return self.unk_token_id if id is None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new one each time."""
        return StreamingDetokenizer(self.decoder)

    def _id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self.tokens.token_to_id(token)
        return found


def refuse_other_forms(tools: Any, options: dict[str, Any]) -> None:
    """Take what transformers' apply_chat_template does with ids out of the options, which are then a template's."""
    if isinstance(tools, bool):
        raise ValueError("apply_chat_template: the second argument is the tools: say add_generation_prompt by its name")
    wrappings = "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"
    for name in (*wrappings, "tokenizer_kwargs"):
        if options.pop(name, None):
            raise ValueError(f"apply_chat_template: {name} is not taken: it gives a list of ids, or a text")
    if options.pop("chat_template", None) is not None:
        raise ValueError("apply_chat_template: chat_template is not taken here, but by load, in tokenizer_config")
