"""Many clients against a server: python benchmarks/serve.py

Clients with prompts and replies of mixed lengths, some of which go away in the middle. Prints tokens per second, the
time to the first token and between tokens, and how memory grew; checks that every reply which came to its end is that
computed alone, that no slot is left taken, and says how many times the tokens of one client many get.

--clients 200      at a time                           --model NAME    folder or hub name (default: tiny)
--requests 2000    in all                              --url URL       a server that runs already; nothing is compared
--leave 0.1        of them go before the end           --flags ...     of `halfbyte serve`, as --flags=--max-queue=64
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

PROMPTS, LONGEST, MOST = 24, 300, 48  # different prompts, their longest in tokens, tokens of the longest reply


class Load:
    """What happened to the requests."""

    def __init__(self):
        self.first, self.between, self.wrong, self.statuses = [], [], [], {}
        self.tokens = self.left = self.done = 0

    def report(self, seconds):
        def percentiles(values):
            cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [0.0] * 99
            return f"p50 {cuts[49] * 1e3:.0f} ms, p90 {cuts[89] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms"

        print(f"{self.done} replies, {self.left} left before the end, by status {self.statuses}, in {seconds:.1f} s")
        print(f"{self.tokens / seconds:.0f} tokens per second; time to first token {percentiles(self.first)}")
        print(f"between tokens {percentiles(self.between)}", flush=True)


async def ask(port, prompt, count, leave, load, wanted):
    """One streamed completion over a connection of its own. `leave`: after so many tokens; None stays."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + data)  # fmt: skip
        status = int((await reader.readline()).split()[1])
        load.statuses[status] = load.statuses.get(status, 0) + 1
        if status != 200:
            return status
        text, last, tokens = "", 0.0, 0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now, chunk = time.monotonic(), json.loads(line[6:])
            if "error" in chunk:
                load.wrong.append(chunk["error"]["message"])
                return status
            (load.between if last else load.first).append(now - (last or begun))
            last, tokens, text = now, tokens + 1, text + chunk["choices"][0]["text"]
            if leave is not None and tokens >= leave:
                load.left += 1
                writer.transport.abort()
                return status
        load.done += 1
        load.tokens += tokens
        if wanted is not None and text != wanted:
            load.wrong.append(f"{text!r} is not {wanted!r}")
        return status
    finally:
        writer.close()


async def run(port, args, requests, clients, alone):
    load, left = Load(), iter(requests)

    async def client():
        for prompt, count, leave in left:
            wanted = alone[tuple(prompt), count] if alone else None
            while await ask(port, prompt, count, leave, load, wanted) == 429:
                await asyncio.sleep(1)

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.report(time.monotonic() - start)
    return load, load.tokens / (time.monotonic() - start)


def requests_of(count, leave, seed=1):
    rng = random.Random(seed)
    prompts = [rng.choices(range(10, 1000), k=rng.choice([3, 20, 60, LONGEST])) for _ in range(PROMPTS)]
    counts = [4, 12, MOST]
    return [
        (rng.choice(prompts), rng.choice(counts), rng.randint(0, 5) if rng.random() < leave else None)
        for _ in range(count)
    ]


def computed_alone(name, requests):
    import halfbyte

    model, tokenizer = halfbyte.load(name, device="cpu")
    return {
        (tuple(prompt), count): halfbyte.generate(model, tokenizer, prompt, max_tokens=count, temperature=0)
        for prompt, count in {(tuple(prompt), count) for prompt, count, _ in requests}
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--leave", type=float, default=0.1)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--url")
    parser.add_argument("--flags", action="append", default=[])
    args = parser.parse_args()
    requests = requests_of(args.requests, args.leave)
    if args.url:
        asyncio.run(run(int(args.url.rpartition(":")[2]), args, requests, args.clients, {}))
        return 0
    from serving import serving

    alone = computed_alone(args.model, requests)
    with serving(
        Path(subprocess.check_output(["mktemp", "-d"], text=True).strip()), *args.flags, model=args.model
    ) as server:
        print("one client:")
        _, single = asyncio.run(run(server.port, args, requests_of(60, 0.0), 1, {}))
        print(f"{args.clients} clients:")
        half = len(requests) // 2
        first, _ = asyncio.run(run(server.port, args, requests[:half], args.clients, alone))
        middle = server.memory()
        second, many = asyncio.run(run(server.port, args, requests[half:], args.clients, alone))
        growth, idle = server.memory() - middle, server.idle(1)
    wrong = [*first.wrong, *second.wrong]
    print(
        f"{many / single:.1f} times the tokens of one client; memory grew by {growth / 1e6:.1f} MB over the second half"
    )
    print(f"slots are {'free' if idle else 'NOT FREE'} within a second; {len(wrong)} replies are wrong {wrong[:2]}")
    return 1 if wrong or not idle else 0


if __name__ == "__main__":
    sys.exit(main())
