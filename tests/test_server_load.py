"""Many clients at once, against a real server process: rows 47, 48 and 77, and bars of speed as far as a loaded machine
holds them. benchmarks/serve.py is the same at length."""

import asyncio
import json
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import COMPLETIONS, serving

import halfbyte

GO_ON = {"logit_bias": {"0": -100, "2": -100}, "temperature": 0}  # greedy, and no end of text


@pytest.fixture(scope="module")
def loaded():
    return halfbyte.load("tiny", device="cpu")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--max-queue", "64", "--max-concurrency", "32", "--prompt-cache-bytes", "16000000")
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


async def ask(port, body):
    """Status, headers and body of an answer, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                 f"Content-Length: {len(data)}\r\n\r\n".encode() + data)  # fmt: skip
    async with asyncio.timeout(100):
        answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), rest


def test_row_47_a_thousand_at_once_complete_or_are_told_to_come_back(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))

    async def all_at_once():
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True, **GO_ON}
        return await asyncio.gather(*(ask(server.port, body) for _ in range(1000)))

    answers = asyncio.run(all_at_once())
    statuses = [status for status, _, _ in answers]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 64 + 32 and 429 in statuses
    for status, head, rest in answers:
        assert b"retry-after: " in head if status == 429 else b"data: [DONE]" in rest
    assert server.idle(2)


def test_row_48_shared_beginnings_evictions_and_company_change_no_reply(server, loaded):
    rng = random.Random(3)
    begins = [rng.choices(range(10, 3000), k=200) for _ in range(6)]
    asked = [
        ([*rng.choice(begins), *rng.choices(range(10, 3000), k=rng.randint(1, 40))], rng.randint(1, 8))
        for _ in range(40)
    ]
    asked *= 2

    def reply(one):
        prompt, count = one
        answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": count, **GO_ON}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(reply, asked))
    assert sum(cached > 0 for _, cached in replies) > 20 and server.metric("prefix_cache_bytes") <= 16e6
    model, tokenizer = loaded
    for (prompt, count), (text, _) in list(zip(asked, replies, strict=True))[:10]:
        wanted = halfbyte.generate(
            model, tokenizer, prompt, max_tokens=count, temperature=0, logit_bias={0: -100, 2: -100}
        )
        assert text == wanted
    assert [text for text, _ in replies[40:]] == [text for text, _ in replies[:40]]
    assert server.idle(2)


def seconds(server, prompt):
    start = time.monotonic()
    answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, **GO_ON}).json()
    return (
        time.monotonic() - start,
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        answer["choices"][0]["text"],
    )


def test_a_shared_beginning_of_2000_tokens_makes_the_second_prompt_ten_times_faster(server, loaded):
    rng = random.Random(5)
    begin = rng.choices(range(10, 3000), k=2000)
    cold = seconds(server, [*begin, 5, 6, 7])
    warm = seconds(server, [*begin, 8, 9, 10])
    assert warm[1] >= 1900 and (len(begin) + 3) / (len(begin) + 3 - warm[1]) >= 10  # what is computed
    assert warm[0] < cold[0] / 4  # how long it takes; ten times on a machine of its own
    model, tokenizer = loaded
    wish = {"max_tokens": 1, "temperature": 0, "logit_bias": {0: -100, 2: -100}}
    assert warm[2] == halfbyte.generate(model, tokenizer, [*begin, 8, 9, 10], **wish)


def test_a_short_prompt_does_not_wait_for_a_long_one(server):
    """Under half a second on a machine of its own; here, before the long one is through."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(seconds, server, random.Random(9).choices(range(10, 3000), k=4000))
        while not server.metric("requests_running"):
            time.sleep(0.005)
        short = seconds(server, [5, 6, 7])
        assert not long.done() and short[0] < 1.5
        assert short[0] < long.result()[0] / 2
