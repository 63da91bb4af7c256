"""`halfbyte generate`: one prompt, one reply."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .terminal import bar, counter


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")
    parser.add_argument("-p", "--prompt", required=True, help="the prompt; - reads it from standard input")
    parser.add_argument("--system-prompt", help="put before the conversation")
    parser.add_argument("-m", "--max-tokens", "-n", type=int, default=1024, help="of the reply (default: 1024)")
    parser.add_argument("--ignore-chat-template", action="store_true", help="give the prompt to the model as it stands")
    parser.add_argument(
        "--chat-template-args", "--chat-template-config", metavar="JSON", help="e.g. an enable_thinking"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the reply before this text")
    parser.add_argument("--no-stream", action="store_true", help="print the reply when it is complete")
    parser.add_argument("--prompt-cache-file", type=Path, metavar="FILE", help="go on from, and keep, the text's state")
    parser.add_argument("--prefill-step-size", type=int, metavar="N", help="tokens of a prompt computed at a time")
    parser.add_argument("--load", choices=["read", "map"], default="read", help="map: weights stay in the files (CPU)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the activations")
    sampling(parser)


def sampling(parser: argparse.ArgumentParser) -> None:
    """What is not given comes from the model's generation_config.json."""
    parser.add_argument("--temp", "--temperature", dest="temperature", type=float, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens of this probability together")
    parser.add_argument("--top-k", type=int, help="keep so many of the likeliest tokens; 0 keeps all")
    parser.add_argument("--min-p", type=float, help="keep tokens at least this fraction as likely as the likeliest")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: make what was said less likely")
    parser.add_argument("--presence-penalty", type=float)
    parser.add_argument("--frequency-penalty", type=float)
    parser.add_argument("--seed", type=int, help="the same seed draws the same reply")


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Answer one prompt. The reply goes to standard output; speed and memory go to standard error."""
    wishes, template_args = checked(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt

    from .. import cache_file
    from ..generation import GenerationResponse, stream_generate
    from ..loading import load

    model, tokenizer = load(
        args.model, args.device, args.dtype, revision=args.revision, offline=args.offline, load=args.load,
        progress=bar("loading"),
    )  # fmt: skip
    if args.ignore_chat_template or not tokenizer.templates:
        ids = tokenizer.prompt_ids(prompt)
    else:
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        ids = tokenizer.chat_ids([*system, {"role": "user", "content": prompt}], **template_args)
    cache, held = kept_state(args, model, ids)
    text, made, last = "", [], None
    for last in stream_generate(
        model, tokenizer, ids[held:], args.max_tokens, stop=args.stop, prefill_step_size=args.prefill_step_size,
        prompt_cache=cache, prompt_progress_callback=counter("tokens of the prompt"), **wishes,
    ):  # fmt: skip
        text += last.text
        made.append(last.token)
        if not (args.no_stream or args.json):
            print(last.text, end="", flush=True)
    assert isinstance(last, GenerationResponse)
    if cache is not None:
        cache_file.save(args.prompt_cache_file, model, cache, [*ids, *made[:-1]])
    speed = {
        "prompt_tokens": last.prompt_tokens, "prompt_tps": last.prompt_tps,
        "generation_tokens": last.generation_tokens, "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
    }  # fmt: skip
    if args.json:
        print(json.dumps({"text": text, "tokens": made, "finish_reason": last.finish_reason, **speed}))
        return 0
    print(text if args.no_stream else "")
    print(
        "prompt {prompt_tokens} tokens, {prompt_tps:.1f} tok/s; reply {generation_tokens} tokens, "
        "{generation_tps:.1f} tok/s; peak memory {peak_memory:.2f} GB".format_map(speed),
        file=sys.stderr,
    )
    return 0


def checked(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked of sampling and of the template, refused before anything is loaded."""
    from ..sampling import SamplingParams

    wishes = {name: getattr(args, name) for name in SAMPLING}
    try:
        SamplingParams.of(None, **wishes)
        template_args = json.loads(args.chat_template_args or "{}")
    except ValueError as error:
        args.parser.error(str(error))
    if not isinstance(template_args, dict):
        args.parser.error("argument --chat-template-args: a JSON object was expected")
    if args.max_tokens < 1:
        args.parser.error("argument --max-tokens: must be 1 or more")
    return wishes, template_args


def kept_state(args: argparse.Namespace, model: Any, ids: list[int]) -> tuple[Any, int]:
    """The cache to go on from, where a file for one is named, and how many of the ids it holds."""
    from .. import cache_file

    path = args.prompt_cache_file
    if path is None:
        return None, 0
    if not path.exists():
        return model.new_cache(1, len(ids), args.prefill_step_size), 0
    cache, held = cache_file.load(path, model)
    if held != ids[: len(held)] or len(held) >= len(ids):
        args.parser.error(f"argument --prompt-cache-file: {path} holds the beginning of another text")
    return cache, len(held)
