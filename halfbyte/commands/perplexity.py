"""`halfbyte perplexity`: how well a model predicts a text."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..progress import counter
from .arguments import add_cpu_activations, add_expert_cache, add_top_k_experts, loaded
from .terminal import show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of an MLX checkpoint, or owner/name on the hub")
    parser.add_argument("file", type=Path, help="a text file, UTF-8")
    parser.add_argument(
        "--kl", metavar="BASE",
        help="also compare with this model, whole and exact (it may be the same): divergence, and how often both agree",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of a window (default: 512)")
    add_expert_cache(parser)
    add_top_k_experts(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the activations")
    add_cpu_activations(parser)


def run(args: argparse.Namespace) -> int:
    """Measure how well a model predicts a text; with --kl, how far it is from another model of the same vocabulary.

    What a faster way to compute costs, compare with the same model: --cpu-activations i16 --kl MODEL. Where memory has
    no room for two models, --expert-cache leaves most experts of both on disk.
    """
    from ..errors import CheckpointError
    from ..quality import quality

    if args.context < 2:
        args.parser.error("argument --context: must be 2 or more")
    try:
        text = args.file.read_text(encoding="utf-8")
    except OSError as error:
        args.parser.error(f"argument FILE: {args.file}: {error.strerror}")
    except UnicodeDecodeError as error:
        args.parser.error(f"argument FILE: {args.file}: it is not UTF-8: {error.reason} at byte {error.start}")

    model, tokenizer = loaded(args.model, args)
    ids = tokenizer.encode(text, special=False)
    if len(ids) < 2:
        args.parser.error(f"argument FILE: {args.file} has {len(ids)} tokens, at least 2 are needed")
    base = None
    if args.kl is not None:
        same = args.kl == args.model and args.top_k_experts is None  # only --cpu-activations can tell them apart
        base, other = (model, tokenizer) if same else loaded(args.kl, args, fewer=False)
        if other.encode(text, special=False) != ids or base.vocabulary != model.vocabulary:
            raise CheckpointError(
                f"{args.kl}: its tokens are others than those of {args.model}: they cannot be compared."
            )
    found = quality(
        model, ids, base, context=min(args.context, model.context), cpu_activations=args.cpu_activations,
        progress=counter("windows"),
    )  # fmt: skip
    rows = [
        ("perplexity", f"{found.perplexity:.4f}"),
        ("loss", f"{found.loss:.5f} ± {found.loss_error:.5f} nats a token, {found.tokens} tokens"),
    ]
    values = {"model": args.model, "tokens": found.tokens, "loss": found.loss, "perplexity": found.perplexity}
    if found.kl is not None:
        rows += [("divergence", f"{found.kl:.6f} nats a token"), ("same guess", f"{found.agreement:.2%}")]
        values |= {"base": args.kl, "kl": found.kl, "agreement": found.agreement}
    show(values, rows, args.json)
    return 0
