"""A server on a GPU under load: python benchmarks/serve_gpu.py

A model of a published shape with random weights, behind a real socket, in a process of its own; 64 clients in this one.
Prints what the engine gives alone for as many streams, what the clients get, and the time between their tokens.

--model NAME       of random_models.py (default: Qwen3.5-35B-A3B)     --layers N     fewer of them
--clients 64       at a time                                          --reply 256    tokens of a reply
--requests 256     in all                                             --device cuda
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import measurements
import serve
import tokenizers
import torch
from random_models import build

PROMPT = 128  # tokens


def words(folder, count):
    """A tokenizer folder whose every id is a word: random weights say all of them."""
    vocabulary = {f"w{id}": id for id in range(count)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(Path(folder) / "tokenizer.json"))


def server(args):
    """Says where it listens and what its engine gives alone, then serves until it is ended."""
    from halfbyte.chat import Tokenizer
    from halfbyte.compilation import compile_kernels
    from halfbyte.server import app, process
    from halfbyte.server.service import Service
    from halfbyte.server.settings import Settings

    torch.set_grad_enabled(False)
    settings = Settings(max_concurrency=args.clients, max_context=PROMPT + args.reply + 64)
    model, _ = build(args.model, args.device, **({"layers": args.layers} if args.layers else {}))
    compile_kernels(model, slots=args.clients)
    context = PROMPT + args.reply // 2
    cache = model.new_cache(args.clients, context + measurements.HEADROOM)
    measurements.fill(cache, context)
    alone = args.clients / measurements.engine_step(model, cache, context, 32)
    del cache
    with tempfile.TemporaryDirectory() as folder:
        words(folder, model.vocabulary)
        tokenizer = Tokenizer.open(folder, model.vocabulary)
    service = Service(model, tokenizer, [args.model], settings)
    while service.scheduler.recordings.left:  # as an idle server does
        service.scheduler.recordings.record()
    sock = process.listen("127.0.0.1", 0)
    print(json.dumps({"port": sock.getsockname()[1], "alone": alone}), flush=True)
    made = app.create(service, keys=[], hosts=["127.0.0.1"], origins=[], fatal=lambda: None)
    return process.serve(made, service, sock, [])


def requests_of(args):
    rng = random.Random(1)
    return [(rng.choices(range(10, 1000), k=PROMPT), args.reply, None) for _ in range(args.requests)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3.5-35B-A3B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--reply", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        return server(args)
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--server"], stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(next(line for line in child.stdout if line.startswith("{")))
        requests = requests_of(args)
        asyncio.run(serve.run(said["port"], requests[: args.clients], args.clients, {}))  # steps are recorded meanwhile
        load, rate = asyncio.run(serve.run(said["port"], requests, args.clients, {}))
    finally:
        child.terminate()
        child.wait()
    cuts = statistics.quantiles(load.between, n=100, method="inclusive")
    print(f"the engine alone: {said['alone']:.0f} tok/s with {args.clients} streams")
    print(f"{args.clients} clients: {rate:.0f} tok/s, {rate / said['alone']:.0%} of that (bar 80 %), prompts included")
    print(f"between tokens: p99 {cuts[98] / cuts[49]:.1f} times the median (bar 3)")
    return 0 if not load.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
