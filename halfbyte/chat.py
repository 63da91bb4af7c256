"""From messages to ids and from ids to text: the tokenizer, the chat template and the reply of a model folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from . import files, limits, strict_json
from .errors import CheckpointError, shown
from .text import template
from .text.control import Controls, clean, each_string
from .text.decoder import Decoder, Stops, detokenizer
from .text.messages import Messages, cut_at_end, marked_end, normal
from .text.reply import Reply, Syntax, syntax
from .text.template import TemplateError
from .text.tokenizer_names import MOST_ID, TokenizerNames, refuse_other_forms

log = logging.getLogger(__name__)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TAIL = 16  # ids at the end of a prompt that show whether it opens the reasoning


class Tokenizer(TokenizerNames):
    """The text side of a model folder. Everything that was read from it is here; nothing is read later."""

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        named: Mapping[str, str],
        templates: Mapping[str, str],
        eos_ids: Iterable[int],
        generation_config: Mapping[str, Any],
        vocab_size: int,
    ) -> None:
        self.tokens, self.named, self.templates = tokens, dict(named), dict(templates)
        self.eos_ids = frozenset(eos_ids)
        self.generation_config = dict(generation_config)  # where sampling.py finds its defaults
        self.vocab_size = vocab_size
        self.syntax: Syntax = syntax(self.templates.get("default", "".join(self.templates.values())))
        self.controls = Controls(tokens, self.templates.values(), self.syntax.markers)
        self._detokenizer = detokenizer(tokens)
        self._told = False  # that control tokens in a text are text
        self._special = frozenset(id for id, token in tokens.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def open(
        cls, folder: Path | str, vocab_rows: int | None = None, instead: Mapping[str, Any] | None = None
    ) -> Tokenizer:
        """The tokenizer of a model folder. `vocab_rows`: the rows of the model's embedding, which its ids must fit.

        `instead`: special tokens by their names, and a chat_template, in place of what the files say.
        """
        folder = Path(folder)
        tokens = _read_tokens(folder)
        changed = _changed(tokens, instead or {})
        settings = _read_json(folder, "special_tokens_map.json") | _read_json(folder, "tokenizer_config.json")
        settings |= changed
        named = {name: _content(settings[name]) for name in NAMED_TOKENS if settings.get(name) is not None}
        generation = _generation_config(folder)
        rows = _vocabulary(tokens)
        if vocab_rows is not None and rows > vocab_rows:
            raise CheckpointError(
                f"{folder / 'tokenizer.json'}: it has ids up to {rows - 1}, but the model has {vocab_rows} embeddings. "
                "The tokenizer is another model's: download the folder again."
            )
        eos_ids = _eos_ids(folder, generation, tokens, named.get("eos_token"), vocab_rows or rows)
        templates = template.find(folder, settings)
        if "chat_template" in changed:
            templates["default"] = changed["chat_template"]
        return cls(tokens, named, templates, eos_ids, generation, rows)

    @property
    def bos_id(self) -> int | None:
        return self.bos_token_id

    def encode(self, text: str, special: bool | None = None, *, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a text, nothing added. Control tokens in it are text, or themselves where `special` says so.

        Said either way, `add_special_tokens` is transformers': control tokens are meant, and those that open and close
        a text are added or not.
        """
        if add_special_tokens is not None:
            ids: list[int] = self.tokens.encode(clean(text), add_special_tokens=add_special_tokens).ids
            return ids
        if special is None and not self._told and self.controls.names.find(text, 0):
            self._told = True
            log.warning(
                "encode: control tokens in the text are taken as text, for it may be anybody's. "
                "encode(text, add_special_tokens=False) means them."
            )
        return self.controls.encode_trusted(clean(text)) if special else self.controls.encode_text(text)

    def prompt_ids(self, text: str) -> list[int]:
        """A raw prompt as mlx-lm takes it: control tokens are meant, and one that opens a text is put before it."""
        opened = self.bos_token is not None and text.startswith(self.bos_token)
        return self.encode(text, add_special_tokens=not opened)

    def decode(self, ids: int | Sequence[int], special: bool = True, *, skip_special_tokens: bool | None = None) -> str:
        """The text of ids, with special tokens or without them, which is also said as transformers says it."""
        given = ids.tolist() if hasattr(ids, "tolist") else ids
        skip = not special if skip_special_tokens is None else skip_special_tokens
        all_ids = [given] if isinstance(given, int) else list(given)
        if wrong := [id for id in all_ids if not 0 <= id <= MOST_ID]:
            raise ValueError(f"decode: {shown(wrong[0])} is no token id")
        text: str = self.tokens.decode(all_ids, skip_special_tokens=skip)
        return text

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text: where characters span tokens, a part of one."""
        return self._detokenizer().bytes_of(id)

    def decoder(self, stop: str | Iterable[str] | Stops = (), special: bool = True) -> Decoder:
        """What turns ids into text as they come; in the end it is what decode() gives."""
        return Decoder(self._detokenizer(), stop, hidden=() if special else self._special)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_args: Any,
    ) -> str:
        """The text that the chat template makes of messages, byte for byte that of transformers. Parts are one text.

        `continue_final_message`: it ends where the content of the last message does, which the model is to go on with.
        """
        given = [each_string(message, clean) for message in normal(messages)]
        more = each_string({"tools": tools, **template_args}, clean)
        return self._render(given, more, add_generation_prompt, continue_final_message)

    def chat_ids(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_args: Any,
    ) -> list[int]:
        """The ids of a conversation. Control tokens are those the template writes; in messages they are text."""
        guard, own = self.controls.guard, self.controls.guard_assistant
        given = [each_string(one, own if one["role"] == "assistant" else guard) for one in normal(messages)]
        more = each_string({"tools": tools, **template_args}, guard)
        return self.controls.encode_marked(self._render(given, more, add_generation_prompt, continue_final_message))

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """chat_ids or render, under the name that mlx-lm's scripts call. Where transformers' opens no reply unless told
        to, this one does unless told not to: a prompt is what most want."""
        refuse_other_forms(tools, kwargs)
        if add_generation_prompt and continue_final_message:
            raise ValueError("apply_chat_template: add_generation_prompt and continue_final_message exclude each other")
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        make = self.chat_ids if tokenize else self.render
        return make(conversation, tools, opens, continue_final_message, **kwargs)

    def reply(self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """What takes the reply to a prompt apart, into reasoning, text and, where tools were offered, calls."""
        opening = self.syntax.think[0]
        tail = self.decode(prompt_ids[-TAIL:]).rstrip()
        return Reply(self.syntax, tools, thinking=bool(opening) and tail.endswith(opening))

    def _render(self, messages: list[Any], more: Mapping[str, Any], opens: bool, continues: bool) -> str:
        named = "tool_use" if more.get("tools") and "tool_use" in self.templates else "default"
        if named not in self.templates:
            there = f"only {', '.join(sorted(self.templates))}" if self.templates else "none"
            raise TemplateError(
                f"The model folder has no default chat template ({there}). It may be a base model: "
                "give it a raw prompt, or add a chat_template.jinja."
            )
        given = marked_end(messages) if continues else messages
        conversation = {"messages": given, "add_generation_prompt": opens}
        text = template.render(self.templates[named], {"documents": None, **self.named, **more, **conversation})
        return cut_at_end(text) if continues else text


def _read_tokens(folder: Path) -> tokenizers.Tokenizer:
    path = files.find(folder, "tokenizer.json")
    data = files.read_small(path, limits.TOKENIZER_BYTES)
    try:
        tokens = tokenizers.Tokenizer.from_buffer(data)
        tokens.no_truncation()
        tokens.no_padding()
        tokens.encode("a")  # a tokenizer that cannot read is found out here
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # also the PanicException of its Rust code, which is no Exception
        raise CheckpointError(f"{path}: not a tokenizer: {shown(str(error))}. Download the file again.") from None
    return tokens


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """An optional file's object."""
    if not (folder / name).exists():
        return {}
    path = files.find(folder, name)
    return strict_json.parse_object(files.read_small(path, limits.CONFIG_BYTES), str(path))


def _generation_config(folder: Path) -> dict[str, Any]:
    """It only holds defaults, so where it is broken the model still runs."""
    try:
        return _read_json(folder, "generation_config.json")
    except CheckpointError as error:
        log.warning("%s It is ignored.", error)
        return {}


def _changed(tokens: tokenizers.Tokenizer, instead: Mapping[str, Any]) -> dict[str, str]:
    """What a program says in place of tokenizer_config.json. It may allow code to run, which never does."""
    given = {name: value for name, value in instead.items() if name != "trust_remote_code" and value is not None}
    known = (*NAMED_TOKENS, "chat_template")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"tokenizer_config: {name} is not taken; these are: {', '.join(known)}")
        if not isinstance(value, str):
            raise ValueError(f"tokenizer_config: {name} must be a string, it is {shown(value)}")
        if name in NAMED_TOKENS and tokens.token_to_id(value) is None:
            raise ValueError(f"tokenizer_config: {name} {shown(value)} is no token of this model")
    return given


def _content(token: Any) -> str:
    """A token in tokenizer_config.json: a string, or an object with its properties."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


def _vocabulary(tokens: tokenizers.Tokenizer) -> int:
    """One more than the highest id: ids may have holes."""
    return max(tokens.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _eos_ids(
    folder: Path, generation: Mapping[str, Any], tokens: tokenizers.Tokenizer, eos_token: str | None, rows: int
) -> list[int]:
    """The ids that end a reply: generation_config.json's, else config.json's, and the tokenizer's own."""
    config = _read_json(folder, "config.json")
    inner = config.get("text_config")
    sources = [generation, config, *([inner] if isinstance(inner, dict) else [])]
    given: Any = next((one["eos_token_id"] for one in sources if one.get("eos_token_id") is not None), [])
    own = tokens.token_to_id(eos_token) if eos_token is not None else None
    found = [*(given if isinstance(given, list) else [given]), *([own] if own is not None else [])]
    good = [id for id in found if type(id) is int and 0 <= id < rows]
    if bad := [id for id in found if id not in good]:
        log.warning("%s: end-of-text ids that the model does not have are ignored: %s", folder, shown(bad))
    if not good:
        log.warning("%s: no end-of-text token is known: replies end by their length, or at a stop string", folder)
    return good
