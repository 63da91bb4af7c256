"""Train the embedded model on one GPU, by the clock.

    python -m training.train TOKENIZER OUT --minutes 9

Most of the time goes to rows of 1024 tokens; in the last part every other step has rows of 8192. Weights are rounded as
they will ship from `--quantise` of the time on. OUT gets the float32 weights (weights-*.safetensors) and training.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from . import feed
from .export import load_weights, save_weights
from .feed import Feed, Renderer, Rows
from .optimiser import Optimiser
from .shape import Shape, initial
from .tokenizer import text
from .twin import Twin

SHORT, LONG = 1024, 8192
QUIET = 0.1  # weight of tokens that the assistant does not say
BALANCE = 0.01  # weight of the routers' imbalance
WARM, FALL = 0.02, 0.5  # of the time: the learning rate rises, and, at the end, falls to 0
REPORT = 10.0  # seconds
SAMPLES = [
    "Tell me a story about a fox and a lantern.",
    "Tell me a story about a hedgehog and a kite.",
    "What is 7 plus 5?",
    "What is 23 minus 9?",
    "Name three colours.",
    "Who are you?",
]


class Training:
    """The twin, its optimiser and the clock."""

    def __init__(self, twin: Twin, options: argparse.Namespace, start: float) -> None:
        self.twin, self.options, self.start = twin, options, start
        self.optimiser = Optimiser(twin)
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.steps = self.tokens = 0

    @property
    def progress(self) -> float:
        """The share of the time that is over."""
        share: float = (time.monotonic() - self.start) / (60 * self.options.minutes)
        return share

    def phase(self, feeds: list[tuple[Feed, int]], until: float) -> None:
        """Steps of so many rows of each feed in turn, until that share of the time is over."""
        report = Report(self)
        while self.progress < until:
            feed, count = feeds[self.steps % len(feeds)]
            loss, imbalance, rate = self.step(on_device(feed.take(count), self.device))
            report.add(loss, imbalance, rate, sum(one.again for one, _ in feeds))

    def step(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, float]:
        ids, learn = rows
        done = self.progress
        weights = self.twin.weights(self.dtype, quantised=done >= self.options.quantise)
        cost, imbalance = self.twin.losses(ids, weights)
        mine = learn[:, 1:].float()
        each = mine + QUIET * (1 - mine)
        (((cost * each).sum() / each.sum()) + BALANCE * imbalance).backward()
        rate = self.options.rate * min(1.0, done / WARM, max(1 - done, 0.0) / FALL)
        self.optimiser.step(rate)
        self.steps += 1
        self.tokens += cost.numel()
        with torch.no_grad():
            return (cost * mine).sum() / mine.sum(), imbalance.detach(), rate


class Report:
    """A line every few seconds. Only then is the GPU waited for."""

    def __init__(self, training: Training) -> None:
        self.training, self.again = training, 0
        self.begin()

    def begin(self) -> None:
        self.time, self.steps, self.tokens = time.monotonic(), self.training.steps, self.training.tokens
        self.total = torch.zeros(2, device=self.training.device)

    def add(self, loss: Tensor, imbalance: Tensor, rate: float, again: int) -> None:
        self.total += torch.stack([loss, imbalance])
        if time.monotonic() - self.time < REPORT:
            return
        steps = self.training.steps - self.steps
        shown = (self.total / steps).tolist()
        now, tokens = time.monotonic(), self.training.tokens
        print(
            f"{now - self.training.start:4.0f} s  step {self.training.steps}  {tokens / 1e6:.1f} M tokens  "
            f"{(tokens - self.tokens) / (now - self.time) / 1e3:.0f} k/s  {1e3 * (now - self.time) / steps:.0f} ms  "
            f"loss {shown[0]:.4f}  imbalance {shown[1]:.3f}  rate {rate:.5f}  rows seen again {again - self.again}",
            flush=True,
        )
        self.again = again
        self.begin()


def on_device(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, learn = (torch.from_numpy(one) for one in rows)
    if device.type == "cuda":
        ids, learn = (one.pin_memory().to(device, non_blocking=True) for one in (ids, learn))
    return ids.long(), learn


@torch.no_grad()
def held_out(twin: Twin, rows: Rows, device: torch.device, dtype: torch.dtype, *, quantised: bool) -> float:
    """Nats a token that the assistant says, over rows that training has not seen."""
    weights = twin.weights(dtype, quantised=quantised)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for at in range(0, len(rows[0]), 8):
        ids, learn = on_device((rows[0][at : at + 8], rows[1][at : at + 8]), device)
        cost, _ = twin.losses(ids, weights)
        total += torch.stack([cost[learn[:, 1:]].sum().double(), learn[:, 1:].sum().double()])
    return float(total[0] / total[1])


@torch.no_grad()
def sample(twin: Twin, tokenizer: Path, device: torch.device, dtype: torch.dtype, most: int = 200) -> list[str]:
    """Replies to SAMPLES at temperature 0.7, quantised. The whole row is computed anew for every token."""
    render = Renderer(tokenizer)
    asked = [text([{"role": "user", "content": one}]) for one in SAMPLES]
    prompts = [render.tokens.encode(one).ids + render.opening for one in asked]
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest + most), render.between, device=device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    every, weights = torch.arange(len(prompts), device=device), twin.weights(dtype, quantised=True)
    for at in range(most):
        scores = twin.logits(ids, weights)[every, lengths - 1 + at]
        ids[every, lengths + at] = torch.softmax(scores / 0.7, -1).multinomial(1)[:, 0]
    replies = []
    for row, prompt in zip(ids.tolist(), prompts, strict=True):
        said = row[len(prompt) : len(prompt) + most]
        replies.append(render.tokens.decode(said[: said.index(render.end)] if render.end in said else said))
    return replies


def finish(training: Training, tokenizer: Path, out: Path) -> None:
    """Save, measure, and show what it says."""
    twin, device, dtype = training.twin, training.device, training.dtype
    save_weights(twin.split(dict(twin.flat)), twin.shape, out)
    plain = Twin(twin.shape, twin.split(dict(twin.flat))).to(device)  # not compiled: other lengths would be again
    rows = feed.batch(feed.rows(tokenizer, SHORT, feed.HELD_OUT, long=False), training.options.held_out)
    measured = {
        "minutes": training.options.minutes, "steps": training.steps, "tokens": training.tokens,
        "held_out_loss_bfloat16": held_out(plain, rows, device, dtype, quantised=False),
        "held_out_loss_4bit": held_out(plain, rows, device, dtype, quantised=True),
    }  # fmt: skip
    print(json.dumps(measured), flush=True)
    (out / "training.json").write_text(json.dumps(measured, indent=4) + "\n", encoding="utf-8")
    for question, reply in zip(SAMPLES, sample(plain, tokenizer, device, dtype, training.options.say), strict=True):
        print(f"> {question}\n{reply}\n", flush=True)


def profile(training: Training, rows: tuple[Tensor, Tensor]) -> None:
    """Where a step's time goes on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            training.step(rows)
        torch.cuda.synchronize()
    print(
        found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90), flush=True
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model on one GPU, by the clock.")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("out", type=Path, help="folder for the weights")
    parser.add_argument("--minutes", type=float, default=9.0, help="from the start on, without the last measurement")
    parser.add_argument("--rows", type=int, default=64, help="of 1024 tokens in a step; an eighth of them of 8192")
    parser.add_argument("--rate", type=float, default=0.004, help="highest learning rate")
    parser.add_argument("--quantise", type=float, default=0.4, help="share of the time after which weights are rounded")
    parser.add_argument("--long", type=float, default=0.3, help="share of the time, the last, with long rows as well")
    parser.add_argument("--resume", type=Path, help="folder of weights to begin with")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the text: another, other text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=10, help="processes that make text; a fifth make long rows")
    parser.add_argument("--held-out", type=int, default=256, help="rows of 1024 tokens to measure on")
    parser.add_argument("--say", type=int, default=200, help="tokens of each reply shown at the end")
    parser.add_argument("--layers", type=int, help="fewer layers, to try the program out")
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    return parser.parse_args()


def main() -> None:
    start, options = time.monotonic(), arguments()
    seeds, far = options.seed * 1000, max(options.workers // 5, 1)
    long = Feed(options.tokenizer, LONG, range(seeds, seeds + far), long=True)
    short = Feed(options.tokenizer, SHORT, range(seeds + far, seeds + max(options.workers, 2)), long=False)
    for one in (long, short):
        one.start()
    shape = Shape() if options.layers is None else Shape(layers=options.layers)
    weights, shape = load_weights(options.resume) if options.resume else (initial(shape, options.seed), shape)
    twin = Twin(shape, weights, compiled=options.device == "cuda").to(options.device)
    training = Training(twin, options, start)
    print(f"{sum(flat.numel() for flat in twin.flat.values()):,} parameters", flush=True)
    if options.profile:
        training.step(on_device(short.take(options.rows), training.device))
        profile(training, on_device(short.take(options.rows), training.device))
    training.phase([(short, options.rows)], 1 - options.long)
    save_weights(twin.split(dict(twin.flat)), shape, options.out)
    training.phase([(short, options.rows), (long, max(options.rows * SHORT // LONG, 1))], 1.0)
    finish(training, options.tokenizer, options.out)


if __name__ == "__main__":
    main()
