"""Chat templates: where a model folder keeps them, and rendering in a process that is killed when it takes too much."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files, limits, strict_json
from ..errors import CheckpointError, HalfbyteError, shown
from .confined import Worker


class TemplateError(HalfbyteError, ValueError):
    """A chat template that is missing, wrong, too slow or too greedy, or messages it does not take."""

    exit_code = 3


def find(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model folder by name; the one most use is "default".

    chat_template.jinja comes before tokenizer_config.json's chat_template, a string or a list of names and templates,
    and that before the old chat_template.json. additional_chat_templates/ holds further ones. An empty one is none.
    """
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").exists():
        found["default"] = _text(folder, "chat_template.jinja")
    else:
        given, where = tokenizer_config.get("chat_template"), folder / "tokenizer_config.json"
        if given is None and (folder / "chat_template.json").exists():
            where = files.find(folder, "chat_template.json")
            read = strict_json.parse_object(files.read_small(where, limits.CONFIG_BYTES), str(where))
            given = read.get("chat_template")
        found |= _named(given, where)
    if (more := folder / "additional_chat_templates").is_dir():
        found |= {path.stem: _text(more, path.name) for path in sorted(more.glob("*.jinja"))}
    return {name: source for name, source in found.items() if source.strip()}


def _named(given: Any, where: Path) -> dict[str, str]:
    if given is None:
        return {}
    pairs = [{"name": "default", "template": given}] if isinstance(given, str) else given
    try:
        named = {str(pair["name"]): pair["template"] for pair in pairs}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(source, str) for source in named.values()):
        raise CheckpointError(f"{where}: chat_template: a string or a list of names and templates was expected, "
                              f"it is {shown(given)}.")  # fmt: skip
    return named


def _text(folder: Path, name: str) -> str:
    path = files.find(folder, name)
    try:
        return files.read_small(path, limits.CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: it is not UTF-8 at byte {error.start}. Download the file again.") from None


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of its variables, which must be JSON."""
    try:
        answer = worker.ask(template=source, variables=variables)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError(f"The messages cannot be given to the chat template: {error}.") from None
    if "error" in answer:
        raise TemplateError(f"The chat template failed: {answer['error']}")
    return answer["text"]


worker = Worker(
    "template_worker.py", limits.TEMPLATE_SECONDS, limits.TEMPLATE_MEMORY, limits.TEMPLATE_OUTPUT,
    lambda: TemplateError("The process that renders chat templates does not start. Is jinja2 installed?"),
)  # fmt: skip
