"""Measure a finished model folder through halfbyte itself, as its users will run it.

    python -m training.evaluate FOLDER [--dense FOLDER] [--stories 100] [--sums 200] [--rows 16]

Prints each number as it is known, what the checker refuses, and at the end all numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

import halfbyte
from halfbyte.chat import Tokenizer
from halfbyte.models.decoder import Decoder

from . import checker, feed
from .conversations import conversation, held_out_prompts, held_out_sums

PAIRS = [
    ("bear", "drum"), ("cat", "kite"), ("dog", "mirror"), ("duck", "map"), ("frog", "crown"), ("goat", "bell"),
    ("hedgehog", "balloon"), ("horse", "hat"), ("lion", "flute"), ("mouse", "clock"), ("owl", "book"),
    ("penguin", "scarf"), ("pig", "key"), ("rabbit", "boat"), ("sheep", "ring"), ("snail", "umbrella"),
    ("squirrel", "basket"), ("tiger", "candle"), ("turtle", "ladder"), ("wolf", "pumpkin"),
]  # fmt: skip
MOST = 300  # tokens of a story
LONG = 4000  # tokens of a long prompt


class Model:
    def __init__(self, folder: Path, sampling: dict[str, float]) -> None:
        self.decoder: Decoder
        self.tokenizer: Tokenizer
        self.decoder, self.tokenizer = halfbyte.load(folder, "cpu")
        self.sampling = sampling

    def replies(self, prompts: list[str], seed: int, most: int = MOST) -> list[tuple[str, bool]]:
        """What is said to each prompt, and whether it ended by itself."""
        ids = [self.tokenizer.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
        made = halfbyte.batch_generate(
            self.decoder, self.tokenizer, ids, max_tokens=most, completion_batch_size=16, seed=seed, **self.sampling
        )
        return [(said, why == "stop") for said, why in zip(made.texts, made.finish_reasons, strict=True)]

    def loss(self, rows: feed.Rows) -> float:
        """Nats a token that the assistant says."""
        costs = []
        for ids, learn in zip(*rows, strict=True):
            scores, _ = halfbyte.logits(self.decoder, ids[:-1].tolist())
            cost = torch.nn.functional.cross_entropy(scores, torch.from_numpy(ids[1:]).long(), reduction="none")
            costs.append(cost[torch.from_numpy(learn[1:])])
        return float(torch.cat(costs).mean())


def bar(model: Model, seeds: int) -> dict[str, Any]:
    """Twenty pairs, seeds 0, 1, ...: the story mentions both, ends by itself, and repeats no sentence."""
    prompts = [f"Tell me a story about {article(one)} {one} and {article(other)} {other}." for one, other in PAIRS]
    passed, diagonal = [], 0
    for seed in range(seeds):
        told = model.replies(prompts, seed)
        good = [fine(pair, *reply) for pair, reply in zip(PAIRS, told, strict=True)]
        diagonal += good[seed % len(good)]
        passed.append(sum(good))
        for prompt, (story, ended), right in zip(prompts, told, good, strict=True):
            if not right:
                print(f"  seed {seed}, {prompt} (ended: {ended})\n    {story}")
    return {"pairs": len(PAIRS), "passed_by_seed": passed, "passed_where_seed_is_pair": diagonal}


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def fine(pair: tuple[str, str], story: str, ended: bool) -> bool:
    told = [sentence.lower().strip('"') for sentence in checker.sentences(story)]
    return ended and all(re.search(rf"\b{noun}", story, re.I) for noun in pair) and len(set(told)) == len(told) > 1


def stories(model: Model, count: int) -> dict[str, float]:
    """Of stories about pairs that training never had: how many the checker accepts, and how many end."""
    prompts = held_out_prompts(count)
    told = model.replies(prompts, 0)
    accepted = 0
    for prompt, (story, _) in zip(prompts, told, strict=True):
        problems = checker.check(prompt, story)
        accepted += not problems
        if problems:
            print(f"  {prompt}\n    {story}\n    {problems}")
    return {"accepted": accepted / count, "ended": sum(ended for _, ended in told) / count}


def sums(model: Model, count: int) -> float:
    asked = held_out_sums(count)
    said = model.replies(asked, 0, 60)
    wrong = [(q, a) for q, (a, _) in zip(asked, said, strict=True) if not checker.arithmetic(q, a)]
    for question, answer in wrong[:20]:
        print(f"  {question} -> {answer}")
    return 1 - len(wrong) / count


def long_prompts(model: Model, count: int) -> dict[str, Any]:
    """After a prompt of about LONG tokens it still answers, and stops."""
    answers = []
    for seed in range(count):
        messages = conversation(Random(feed.HELD_OUT + seed), tokens=LONG)
        last = max(at for at, one in enumerate(messages) if one["role"] == "user")
        ids = model.tokenizer.chat_ids(messages[: last + 1])
        made = halfbyte.batch_generate(model.decoder, model.tokenizer, [ids], max_tokens=MOST, **model.sampling)
        same = made.texts[0] == messages[last + 1]["content"]
        answers.append((len(ids), made.finish_reasons[0] == "stop", same))
        print(f"  {len(ids)} tokens, {messages[last]['content'][-80:]!r} -> {made.texts[0]!r}")
    return {
        "tokens": [tokens for tokens, _, _ in answers],
        "ended": sum(ended for _, ended, _ in answers),
        "as_written": sum(same for _, _, same in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a finished model folder through halfbyte itself.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", type=Path, help="the same model in bfloat16 (training.export --dense)")
    parser.add_argument("--stories", type=int, default=100)
    parser.add_argument("--sums", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="of 1024 tokens, for the held-out loss")
    parser.add_argument("--long", type=int, default=4, help="prompts of 4000 tokens")
    parser.add_argument("--seeds", type=int, default=20, help="of the twenty pairs")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="instead of generation_config.json's")
    options = parser.parse_args()
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    model = Model(
        options.folder, {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    )
    tasks: dict[str, Any] = {
        "stories": lambda: stories(model, options.stories),
        "sums": lambda: sums(model, options.sums),
        "pairs": lambda: bar(model, options.seeds),
        "long_prompts": lambda: long_prompts(model, options.long),
    }
    rows = feed.batch(feed.rows(options.folder / "tokenizer.json", 1024, feed.HELD_OUT, long=False), options.rows)
    tasks["held_out_loss_4bit"] = lambda: model.loss(rows)
    if options.dense:
        tasks["held_out_loss_bfloat16"] = lambda: Model(options.dense, {}).loss(rows)
    found = {}
    for name, task in tasks.items():
        start = time.monotonic()
        found[name] = task()
        print(f"{name}: {json.dumps(found[name])}  ({time.monotonic() - start:.0f} s)", flush=True)
    print(json.dumps(found, indent=4))


if __name__ == "__main__":
    main()
