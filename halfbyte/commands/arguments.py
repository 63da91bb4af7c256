"""What the commands that answer share: the arguments about model and reply, their checks, and loading."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..progress import bar, kernels
from .numbers import byte_count, whole
from .pull import located

if TYPE_CHECKING:
    from ..chat import Tokenizer
    from ..checkpoint.weights import Load
    from ..fitting import Allowed
    from ..models.decoder import Decoder

DEFAULT_MODEL = "tiny"  # the one in the package
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
OURS = {"messages", "self", "add_generation_prompt"}  # variables of a template that commands give


class Wishes(NamedTuple):
    sampling: dict[str, Any]  # None where nothing was asked
    template_args: dict[str, Any]


def add(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """`max_tokens`: the command's default; None is as far as the context goes."""
    limit = "as the context has room" if max_tokens is None else max_tokens
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL,
        help=f"folder of an MLX checkpoint, or owner/name on the hub (default: {DEFAULT_MODEL}, which comes along)",
    )  # fmt: skip
    parser.add_argument("--system-prompt", metavar="TEXT", help="put before the conversation")
    parser.add_argument(
        "-m", "--max-tokens", "-n", type=whole, default=max_tokens, metavar="N", help=f"of a reply (default: {limit})"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a reply before this text")
    parser.add_argument("--ignore-chat-template", action="store_true", help="give the model the text as it stands")
    parser.add_argument(
        "--chat-template-args", "--chat-template-config", metavar="JSON", help="such as '{\"enable_thinking\": false}'"
    )
    parser.add_argument("--prefill-step-size", type=whole, metavar="N", help="tokens of a prompt computed at a time")
    add_loading(parser)
    add_memory(parser)
    add_top_k_experts(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the activations")
    add_cpu_activations(parser)
    add_deterministic(parser)
    parser.add_argument("-t", "--threads", type=whole, metavar="N", help="CPU threads (default: one a core)")
    _add_sampling(parser.add_argument_group("sampling", "what is not given comes from the model"))


def add_loading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", choices=["read", "map"], default="read", help="map: weights stay in the files (CPU)")
    parser.add_argument(
        "--check-weights", choices=["sampled", "all", "none"], default="sampled",
        help="for NaN and infinities: of experts in memory a few and of all else everything (sampled, the default), "
        "all, or nothing; an expert on disk is checked when it is first read",
    )  # fmt: skip


def add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory", "sizes as 4GB; what is too small is refused with the least that is not")
    add_expert_cache(group)
    sized = {
        "--ram": "of weights and caches on the host", "--memory-limit": "of the whole process on the host",
        "--gpu-memory": "of weights, caches and working memory on a CUDA GPU",
    }  # fmt: skip
    for name, help in sized.items():
        group.add_argument(name, type=byte_count, metavar="SIZE", help=f"at most, {help} (default: what is free)")
    group.add_argument(
        "--fit", choices=["on", "off"], default="on",
        help="on: where memory has no room for all experts, leave some in host memory (CUDA) or on disk; off: refuse "
        "(default: on)",
    )  # fmt: skip


def add_expert_cache(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--expert-cache", type=byte_count, metavar="SIZE",
        help="leave experts on disk and keep so much of them in host memory, as 4GB; results are the same",
    )  # fmt: skip


def add_top_k_experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--top-k-experts", type=whole, metavar="N",
        help="fewer experts a token than the model was made for: faster and worse (`perplexity --kl` says how much)",
    )  # fmt: skip


def allowed(args: argparse.Namespace) -> Allowed:
    """What the flags of `add_memory` say, for a command that has them."""
    from ..fitting import Allowed

    given = {name: getattr(args, name, None) for name in ("expert_cache", "ram", "memory_limit", "gpu_memory")}
    return Allowed(**given, fit=getattr(args, "fit", "on") == "on")


def add_deterministic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deterministic", action="store_true",
        help="a reply's bits do not depend on what else is computed beside it; slower on a GPU",
    )  # fmt: skip


def add_cpu_activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-activations", choices=["f32", "i16", "i8"], default="f32",
        help="of products on a CPU: f32, or faster i16 (error about 1e-4) or i8 (1e-2) (default: f32)",
    )  # fmt: skip


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    def number(*names: str, type: type = float, metavar: str = "X", **more: Any) -> None:
        group.add_argument(*names, type=type, metavar=metavar, **more)

    number("--temp", "--temperature", dest="temperature", help="0 takes the likeliest token")
    number("--top-p", help="keep the likeliest tokens of this probability together")
    number("--top-k", type=int, metavar="N", help="keep so many of the likeliest tokens; 0 keeps all")
    number("--min-p", help="keep tokens at least this fraction as likely as the likeliest")
    number("--repetition-penalty", help="above 1: make what was said before less likely")
    number("--presence-penalty", help="above 0: make what the reply has said less likely")
    number("--frequency-penalty", help="above 0: the same, by how often it was said")
    number("--seed", type=int, metavar="N", help="the same seed draws the same reply")


def checked(args: argparse.Namespace) -> Wishes:
    """What was asked, refused before anything is loaded."""
    from ..sampling import SamplingParams
    from ..text.decoder import Stops

    if args.ignore_chat_template and args.system_prompt:
        args.parser.error("argument --system-prompt: goes with a chat template, which --ignore-chat-template forgoes")
    sampling = {name: getattr(args, name) for name in SAMPLING}
    try:
        SamplingParams.of(None, **sampling)
        Stops(args.stop)
    except ValueError as error:
        args.parser.error(str(error))
    template_args = read_template_args(args)
    take_threads(args)
    return Wishes(sampling, template_args)


def take_threads(args: argparse.Namespace) -> None:
    if args.threads is None:
        return
    from ..machine import use_threads

    try:
        use_threads(args.threads)
    except ValueError as error:
        args.parser.error(f"argument --threads: {error}")


def require_template(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """A system prompt has a place in the text; that is known when the model is."""
    if args.system_prompt and not tokenizer.templates:
        args.parser.error(
            f"argument --system-prompt: goes with a chat template, which {args.model} lacks; put it into the prompt"
        )


def read_template_args(args: argparse.Namespace) -> dict[str, Any]:
    try:
        given = json.loads(args.chat_template_args or "{}")
    except (ValueError, RecursionError) as error:
        args.parser.error(f"argument --chat-template-args: it is not JSON: {error}")
    if not isinstance(given, dict):
        args.parser.error("argument --chat-template-args: a JSON object was expected")
    if taken := OURS & given.keys():
        args.parser.error(f"argument --chat-template-args: {', '.join(sorted(taken))} cannot be set with it")
    return dict(given)


def require_device(args: argparse.Namespace) -> None:
    """The device that was asked for is here, nothing asked is always right; and how it computes is settled."""
    import torch

    from ..loading import pick_device

    if args.device == "cuda" and not torch.cuda.is_available():
        args.parser.error("argument --device: torch finds no CUDA GPU here; `halfbyte doctor` says what there is")
    if args.device == "mps" and not torch.backends.mps.is_available():
        args.parser.error("argument --device: torch finds no Apple GPU here; `halfbyte doctor` says what there is")
    foretold = getattr(args, "trace", None) is not None  # what a GPU would do that need not be here
    if getattr(args, "gpu_memory", None) is not None and not foretold and pick_device(args.device).type == "cpu":
        args.parser.error("argument --gpu-memory: it runs on the CPU; --ram and --memory-limit are for that")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()  # others are always deterministic
    if on_gpu and getattr(args, "deterministic", False):
        from ..ops.dispatch import make_deterministic

        make_deterministic()
    if (kind := getattr(args, "cpu_activations", "f32")) != "f32":
        from ..ops.dispatch import use_cpu_activations

        use_cpu_activations(kind)


def loaded(
    name: str, args: argparse.Namespace, load: Load = "read", slots: int = 1, *, fewer: bool = True
) -> tuple[Decoder, Tokenizer]:
    """A model that a command was given, and its tokenizer: fetched, loaded and compiled, as far as that is needed.

    `slots`: how many requests are to be answered at a time. `fewer`: whether --top-k-experts is meant for it.
    """
    from .. import loading
    from ..compilation import compile_kernels

    require_device(args)
    folder = located(name, args)
    model, tokenizer = loading.load(
        folder, args.device, args.dtype, load=load, progress=bar(f"loading {name}"), allowed=allowed(args),
        top_k_experts=getattr(args, "top_k_experts", None) if fewer else None,
        check=getattr(args, "check_weights", "sampled"),
    )  # fmt: skip
    compile_kernels(model, kernels(model.device.type), slots)
    return model, tokenizer
