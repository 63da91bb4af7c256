"""The messages of a conversation in a JSON file: {"model": name, "messages": [{"role": ..., "content": ...}, ...]}."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import files, limits
from .errors import HalfbyteError, StorageError, shown, size

FIELDS = ("role", "content", "reasoning_content")
ROLES = ("system", "user", "assistant")


class BadConversation(HalfbyteError, ValueError):
    """A file that holds no conversation, or must not be overwritten with one."""

    exit_code = 2


def save(path: Path | str, messages: Sequence[Mapping[str, str]], model: str) -> None:
    """The file appears whole or not at all. One that is no saved conversation is not overwritten."""
    path = Path(path)
    if os.path.lexists(path):
        try:
            load(path)
        except (BadConversation, StorageError):
            raise BadConversation(f"{path}: it exists, and is no saved conversation. Give another name.") from None
    text = json.dumps({"model": model, "messages": list(messages)}, ensure_ascii=False, indent=1)
    # A message may hold half of a surrogate pair (bytes of a terminal that were no UTF-8), which a file cannot.
    files.write_whole(path, text.encode("utf-8", "replace"), "the conversation")


def load(path: Path | str) -> list[dict[str, str]]:
    """The messages of a file that `save` wrote, or of a bare list of messages, checked."""
    path = Path(path)
    try:
        if path.stat().st_size > limits.CONVERSATION_BYTES:
            _refuse(path, f"it has more than {size(limits.CONVERSATION_BYTES)}")
        if not path.is_file():  # nor a pipe or a device, which might never end
            _refuse(path, "it is no file")
        given = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadConversation):
            raise
        _refuse(path, "it is not JSON in UTF-8")
    messages = given.get("messages") if isinstance(given, dict) else given
    if not isinstance(messages, list) or len(messages) > limits.MESSAGES:
        _refuse(path, f'a list of at most {limits.MESSAGES} messages was expected under "messages"')
    return [_checked(message, index, path) for index, message in enumerate(messages)]


def _checked(message: Any, index: int, path: Path) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        _refuse(path, f"messages[{index}] needs a role, one of {', '.join(ROLES)}: {shown(message)}")
    if message["role"] == "system" and index:
        _refuse(path, f"messages[{index}]: a system prompt stands first")
    one = {name: message[name] for name in FIELDS if message.get(name) is not None}
    if "content" not in one or not all(isinstance(value, str) for value in one.values()):
        _refuse(path, f"messages[{index}] needs a text as its content: {shown(message)}")
    return one


def _refuse(path: Path, why: str) -> NoReturn:
    raise BadConversation(f"{path}: not a conversation: {why}.")
