"""Many clients against a server: python benchmarks/serve.py

Clients with prompts and replies of mixed lengths, some of which go away in the middle. Prints tokens per second, the
time to the first token and between tokens, and how memory grew; checks that every reply which came to its end is that
computed alone, and that no slot is left taken. Then, with nothing else under way: how many times the tokens of one
client 32 get, what a short prompt waits while a long one is read, and what a shared beginning saves.

--clients 200      at a time                           --model NAME    folder or hub name (default: tiny)
--requests 2000    in all                              --url URL       a server that runs already; nothing is compared
--leave 0.1        of them go before the end           --flags ...     of `halfbyte serve`, as --flags=--max-queue=64
--only load|bars   one half of it
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

PROMPTS, LONGEST, MOST = 24, 300, 48  # different prompts, their longest in tokens, tokens of the longest reply
HEROES = ["fox", "hen", "cat", "dog", "bear", "bird", "boy", "girl", "frog", "mouse", "king", "duck", "fish", "cow"]
GREEDY = {"temperature": 0, "logit_bias": {"0": -100, "2": -100}}  # and no end of text


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


class Reading(asyncio.Protocol):
    """Keeps what comes and when: clients share the cores with the server, so they do nothing else until the end."""

    def __init__(self, leave):
        self.leave, self.data, self.times = leave, bytearray(), []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data
        if new := data.count(b"data: {"):
            self.times += [time.monotonic()] * new
        if self.leave is not None and len(self.times) >= self.leave:
            self.transport.abort()

    def connection_lost(self, error):
        if not self.ended.done():
            self.ended.set_result(None)


async def ask(port, prompt, count, leave, load, wanted):
    """One streamed completion over a connection of its own. `leave`: after so many tokens; None stays."""
    body = json.dumps({"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}).encode()
    begun = time.monotonic()
    transport, reading = await asyncio.get_running_loop().create_connection(lambda: Reading(leave), "127.0.0.1", port)
    transport.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
    await reading.ended
    status = int(reading.data[9:12] or 0)
    load.statuses[status] = load.statuses.get(status, 0) + 1
    if status != 200:
        return status
    load.first += [at - begun for at in reading.times[:1]]
    load.between += [later - at for at, later in pairwise(reading.times)]
    if leave is not None:
        load.left += 1
        return status
    chunks = [json.loads(line[6:]) for line in reading.data.splitlines() if line.startswith(b"data: {")]
    load.wrong += [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)
    load.done += 1
    load.tokens += len(chunks)
    if wanted is not None and text != wanted:
        load.wrong.append(f"{text!r} is not {wanted!r}")
    return status


async def run(port, requests, clients, alone):
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


def stories(tokenizer, count):
    """Short prompts and long replies: what many clients gain lies in the replies."""
    prompts = [tokenizer.chat_ids([{"role": "user", "content": f"Tell me a story about a {hero}."}]) for hero in HEROES]
    return [(prompts[number % len(prompts)], 64, None) for number in range(count)]


def computed_alone(model, tokenizer, requests):
    import halfbyte

    return {
        (tuple(prompt), count): halfbyte.generate(model, tokenizer, prompt, max_tokens=count, temperature=0)
        for prompt, count in {(tuple(prompt), count) for prompt, count, _ in requests}
    }


def load_of(server, args, alone, requests):
    """Whether all went as it must."""
    print(f"{args.clients} clients:")
    half = len(requests) // 2
    first, _ = asyncio.run(run(server.port, requests[:half], args.clients, alone))
    middle = server.memory()
    second, _ = asyncio.run(run(server.port, requests[half:], args.clients, alone))
    growth, idle = server.memory() - middle, server.idle(1)
    wrong = [*first.wrong, *second.wrong]
    print(f"memory grew by {growth / 1e6:.1f} MB over the second half")
    print(f"slots are {'free' if idle else 'NOT FREE'} within a second; {len(wrong)} replies are wrong {wrong[:2]}")
    return idle and not wrong


def bars_of(server, tokenizer):
    for clients in (32, 1):  # what is recorded once is recorded then
        asyncio.run(run(server.port, stories(tokenizer, clients), clients, {}))
    print("one client:")
    _, single = asyncio.run(run(server.port, stories(tokenizer, 8), 1, {}))
    print("32 clients:")
    _, many = asyncio.run(run(server.port, stories(tokenizer, 128), 32, {}))
    print(f"32 clients get {many / single:.1f} times the tokens of one")
    waits, savings = [], []
    for seed in range(5):
        rng = random.Random(seed)
        long, begin = rng.choices(range(10, 3000), k=4000), rng.choices(range(10, 3000), k=2000)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(seconds, server, long)
            while not server.metric("requests_running"):
                time.sleep(0.005)
            waits.append(seconds(server, [5, 6, 7]))
            assert not reading.done(), "the long prompt was read before the short one came"
        cold = seconds(server, [*begin, 5, 6, 7])
        savings.append(cold / seconds(server, [*begin, 8, 9, 10]))
    print(f"a short prompt beside one of 4000 tokens: {max(waits):.2f} s at most of {len(waits)}")
    print(f"after 2000 shared tokens a prompt is {statistics.median(savings):.1f} times as fast {savings}")


def seconds(server, prompt):
    start = time.monotonic()
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **GREEDY}).raise_for_status()
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--leave", type=float, default=0.1)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--url")
    parser.add_argument("--flags", action="append", default=[])
    parser.add_argument("--only", choices=["load", "bars"])
    args = parser.parse_args()
    requests = requests_of(args.requests, args.leave)
    if args.url:
        asyncio.run(run(int(args.url.rpartition(":")[2]), requests, args.clients, {}))
        return 0
    from serving import serving

    import halfbyte

    model, tokenizer = halfbyte.load(args.model, device="cpu")
    alone = computed_alone(model, tokenizer, requests) if args.only != "bars" else {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *args.flags, model=args.model) as server:
        well = args.only == "bars" or load_of(server, args, alone, requests)
        if args.only != "load":
            bars_of(server, tokenizer)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
