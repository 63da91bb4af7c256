"""`halfbyte serve`: a model behind OpenAI's API."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from ..errors import size
from . import arguments as shared
from .numbers import at_least, positive, seconds, whole

SHARED = ("device", "revision", "offline")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PACKAGES = ("starlette", "uvicorn", "h11", "llguidance")  # the extra `serve`
HELLO = "Tell me a story about a fox."


def arguments(parser: argparse.ArgumentParser) -> None:
    from ..server.settings import Settings

    parser.add_argument(
        "model", nargs="?", default=shared.DEFAULT_MODEL,
        help=f"folder of an MLX checkpoint, or owner/name on the hub (default: {shared.DEFAULT_MODEL}, of the package)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8080, help="(default: 8080; 0 takes a free one)")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="asked of every client; repeatable"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="more of them, one a line")
    parser.add_argument(
        "--served-model-name", "--alias", action="append", default=[], metavar="NAME", help="instead of MODEL"
    )
    parser.add_argument(
        "--cors-origins", action="append", default=[], metavar="ORIGIN", help="pages that may call; none by default"
    )
    parser.add_argument(
        "--allowed-hosts", action="append", default=[], metavar="NAME", help="names this server goes by; * is any"
    )
    parser.add_argument("--exit-on-fatal", action="store_true", help="exit with status 1 when the engine dies or hangs")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    shared.add_loading(parser)
    shared.add_memory(parser)
    shared.add_top_k_experts(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the activations")
    shared.add_cpu_activations(parser)
    shared.add_deterministic(parser)
    parser.add_argument("-t", "--threads", type=whole, metavar="N", help="CPU threads (default: one a core)")
    group = parser.add_argument_group("limits")
    for name, kind, default, metavar, help, least in Settings.flags():
        flag, read = f"--{name.replace('_', '-')}", at_least(least) if kind is int else positive if least else seconds
        group.add_argument(flag, type=read, default=default, metavar=metavar, help=f"{help} (default: {default:g})")


def run(args: argparse.Namespace) -> int:
    """Serve a model over HTTP, as OpenAI's API. Ctrl-C or SIGTERM lets replies under way end first."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        args.parser.error(f"{', '.join(missing)} must be installed to serve: pip install {' '.join(missing)}")
    import logging

    from ..server import app as application
    from ..server import process
    from ..server.service import Service
    from ..server.settings import Settings

    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(**{name: getattr(args, name) for name, *_ in Settings.flags()})
    keys = read_keys(args)
    shared.take_threads(args)
    sock = process.listen(args.host, args.port)
    model, tokenizer = shared.loaded(args.model, args, args.load, settings.max_concurrency)
    names = args.served_model_name or [args.model]
    service = Service(model, tokenizer, names, settings)
    held: list[process.Process] = []
    app = application.create(
        service, keys=keys, hosts=[*args.allowed_hosts, args.host], origins=args.cors_origins,
        fatal=lambda: held[0].fail() if args.exit_on_fatal else None,
    )  # fmt: skip
    host, port = args.host, sock.getsockname()[1]
    print(greeting(f"http://{f'[{host}]' if ':' in host else host}:{port}", names[0], bool(keys)), flush=True)
    room = f"{settings.max_concurrency} requests at a time, of {service.cache.capacity} tokens each"
    print(f"{room}, in {size(service.cache.nbytes)}. Ctrl-C ends it.", flush=True)
    if not keys and host not in LOOPBACK:
        print("Anyone who reaches this address can use it: --api-key KEY asks for a key.", flush=True)
    return process.serve(app, service, sock, held)


def read_keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            args.parser.error(
                f"argument --api-key-file: {args.api_key_file}: {why}. Name a file with a key in each line"
            )
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            args.parser.error(f"argument --api-key-file: {args.api_key_file} has no key")
    if not all(key.isascii() and key.isprintable() and key.strip() == key and key for key in keys):
        args.parser.error("argument --api-key: a key is printable ASCII without spaces around it")
    return keys


def greeting(address: str, name: str, guarded: bool) -> str:
    """What to type next."""
    key = " -H 'Authorization: Bearer KEY'" if guarded else ""
    return f"""\
halfbyte serves {name} on {address}
The page to chat on: {address}/

curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "{HELLO}"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="{"KEY" if guarded else "none"}")
reply = client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "{HELLO}"}}])
print(reply.choices[0].message.content)
"""
