"""`halfbyte generate`: one prompt, one reply."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import StorageError, size
from ..progress import prompt_progress
from . import arguments as shared
from .terminal import tolerate_any_text
from .wrapping import Writer

if TYPE_CHECKING:
    from ..cache import Cache
    from ..chat import Tokenizer
    from ..grammar import Follower
    from ..models.decoder import Decoder


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - (and nothing in a pipe) reads it there")
    parser.add_argument("--no-stream", action="store_true", help="print the reply when it is complete")
    parser.add_argument(
        "--prompt-cache-file",
        type=Path,
        metavar="FILE",
        help="go on from the state of the prompt's beginning in FILE; where there is no FILE, keep this prompt's there",
    )
    parser.add_argument("--json-schema", metavar="FILE|JSON", help="the reply is JSON that follows this schema")
    shared.add(parser, max_tokens=1024)


def run(args: argparse.Namespace) -> int:
    """Answer one prompt. The reply goes to standard output; speed and memory go to standard error."""
    wishes = shared.checked(args)
    schema = read_schema(args)
    tolerate_any_text()
    require_place(args.prompt_cache_file)
    return answer(args, wishes, read_prompt(args), schema)


def answer(args: argparse.Namespace, wishes: shared.Wishes, prompt: str, schema: str | None) -> int:
    from .. import cache_file
    from ..generation import stream_generate

    model, tokenizer = shared.loaded(args.model, args, args.load)
    shared.require_template(args, tokenizer)
    start = time.perf_counter()
    if args.ignore_chat_template or not tokenizer.templates:
        ids = tokenizer.prompt_ids(prompt)
    else:
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        ids = tokenizer.chat_ids([*system, {"role": "user", "content": prompt}], **wishes.template_args)
    if not 0 < len(ids) < model.context:
        args.parser.error(f"argument --prompt: it has {len(ids)} tokens, and the model takes 1 to {model.context - 1}")
    cache, held = kept_state(args, model, ids)
    keep = None
    if cache is not None and not held and len(ids) > 1:  # what is there already stays
        keep = partial(cache_file.save, args.prompt_cache_file, model, cache, ids[:-1])
    follow = [] if schema is None else [follower(schema, model, tokenizer, ids)]
    writer, progress, text, first = Writer(sys.stdout), prompt_progress(), "", 0.0
    for piece in stream_generate(
        model, tokenizer, ids[held:], args.max_tokens, stop=args.stop, prefill_step_size=args.prefill_step_size,
        prompt_cache=cache, held_ids=ids[:held], prompt_progress_callback=progress, prompt_state_callback=keep,
        logits_processors=follow, **wishes.sampling,
    ):  # fmt: skip
        text += piece.text
        first = first or time.perf_counter()
        if not (args.no_stream or args.json):
            writer.write(piece.text)
    result = {
        "text": text, "finish_reason": piece.finish_reason, "prompt_tokens": piece.prompt_tokens,
        "generation_tokens": piece.generation_tokens, "prompt_tps": piece.prompt_tps,
        "generation_tps": piece.generation_tps, "ttft_s": first - start, "peak_memory": piece.peak_memory,
        "model": args.model, "device": str(model.device),
    }  # fmt: skip
    report(result, args)
    return 0


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """The end of a reply that was streamed, or all of it; and what it took."""
    if args.json:
        print(json.dumps(result))
        return
    if args.no_stream:
        Writer(sys.stdout).write(result["text"])
    print()
    memory = size(int(result["peak_memory"] * 1e9))
    print(
        "prompt {prompt_tokens} tokens, {prompt_tps:.1f} tok/s; reply {generation_tokens} tokens, "
        "{generation_tps:.1f} tok/s; first token {ttft_s:.2f} s; peak memory {memory}".format(**result, memory=memory),
        file=sys.stderr,
    )


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is None and sys.stdin.isatty():
        args.parser.error("a prompt is needed: -p TEXT, or text from a pipe; `halfbyte chat` asks for it")
    # The newline that ends what a pipe brings is the pipe's, as in "$(...)".
    prompt: str = sys.stdin.read().removesuffix("\n") if args.prompt in (None, "-") else args.prompt
    if not prompt.strip():
        args.parser.error("argument --prompt: it is empty")
    return prompt


def read_schema(args: argparse.Namespace) -> str | None:
    """The schema that a reply must follow, given as JSON or in a file; checked before anything is loaded."""
    given = args.json_schema
    if given is None:
        return None
    if find_spec("llguidance") is None:
        args.parser.error("argument --json-schema: llguidance must be installed: pip install llguidance")
    from .. import grammar

    try:
        source: str = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
        if not isinstance(json.loads(source), dict):
            raise ValueError("a schema is a JSON object")
        grammar.check(("json_schema", source))
    except OSError as error:
        args.parser.error(f"argument --json-schema: {given}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        args.parser.error(f"argument --json-schema: {error}")
    return source


def follower(schema: str, model: Decoder, tokenizer: Tokenizer, ids: list[int]) -> Follower:
    from ..grammar import Follower, Grammars

    return Follower(Grammars(tokenizer, model.vocabulary).constraint("json_schema", schema), tokenizer, ids)


def require_place(path: Path | None) -> None:
    """Where a prompt cache cannot be written is said before a reply is computed; a pipe would wait for ever."""
    if path is None or path.is_file():
        return
    if path.exists() or not path.absolute().parent.is_dir():
        kind = "it is a folder" if path.is_dir() else "it is a pipe or a device"
        why = kind if path.exists() else f"there is no folder {path.absolute().parent}"
        raise StorageError(f"{path}: no prompt cache can be written there: {why}. Name a file in a folder that exists.")


def kept_state(args: argparse.Namespace, model: Decoder, ids: list[int]) -> tuple[Cache | None, int]:
    """The cache to go on from, where a file for one is named, and how many of the ids it holds."""
    from .. import cache_file

    path = args.prompt_cache_file
    if path is None:
        return None, 0
    if not path.exists():
        return model.new_cache(1, len(ids), args.prefill_step_size), 0
    cache, held = cache_file.load(path, model)
    if held != ids[: len(held)] or len(held) >= len(ids):
        args.parser.error(
            f"argument --prompt-cache-file: {path} holds the beginning of another text, or more of this one than the "
            "prompt has. Name another file, or delete it."
        )
    return cache, len(held)
