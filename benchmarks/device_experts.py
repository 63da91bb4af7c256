"""Experts in host memory, a part of them cached on a GPU: python benchmarks/device_experts.py

Random weights in the shape of Qwen3.5-35B-A3B. First everything is on the GPU, and says which bits are right and how
fast it is; then the same model with its experts in pinned host memory. Prints how fast the bus is by itself, the hit
rate, tokens a second, and what hit rate and bus allow: a step takes at least as long as its misses over the bus.

--part 0.25        of all experts that is in slots            --tokens 256   that are timed
--layers N         fewer, for a look                          --explain      the calls of a step, what is copied beside
--sizes            of the launches that copy, compared
--ahead 0 1 2      experts of the next layer that are guessed and copied while a layer computes, tried in turn

--disk             instead: experts in files, --held 0.5 of them in host memory and --part on the GPU; of a checkpoint
                   of --layers (8) that is written to a temporary folder; --dtype float32 for activations
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from random_models import build  # first: it finds the package
from residency import ANY, LAYER, make

from halfbyte import cuda, memory
from halfbyte.accounting import skeleton
from halfbyte.compilation import compile_kernels
from halfbyte.device_experts import DeviceResidency
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import size
from halfbyte.fitting import TEXT, TEXTS, Allowed, device_room
from halfbyte.foresight import blocks_of
from halfbyte.host_experts import pin
from halfbyte.kernels.triton import slots
from halfbyte.loading import load_model
from halfbyte.ops.experts import Experts
from halfbyte.ops.quant import Packed
from halfbyte.prefilling import prefill
from halfbyte.sampling import SamplingParams

NAME = "Qwen3.5-35B-A3B"
FIRST = 96  # tokens before the timed ones: caches fill up, steps are captured
PROMPT = 2048
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def say(*words, **more):
    print(*words, flush=True, **more)


def to_host(tensor):
    """A copy in memory of its own, which the GPU can read."""
    area = memory.allocate(max(tensor.nbytes, memory.LARGE), CPU)
    pin(area, GPU)
    return area[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def moved(experts):
    projections = (experts.gate, experts.up, experts.down)
    return Experts(
        *(Packed(to_host(w.words), to_host(w.scales), to_host(w.biases), w.bits, w.group) for w in projections)
    )


def built(layers, part=None):
    """The model, all of it on the GPU, or with the experts of each layer moved away as soon as the model is there."""
    model, _ = build(NAME, "cuda", layers=layers)
    if part is None:
        compile_kernels(model)
        return model
    blocks = blocks_of(model.layers)
    hosts = {}
    for number, block in enumerate(blocks):
        hosts[str(number)], block.experts = moved(block.experts), None
    torch.cuda.empty_cache()
    count = round(part * model.expert_count)
    model.residency = DeviceResidency(hosts, [count] * len(hosts), GPU)
    for block, lender in zip(blocks, model.residency.lenders.values(), strict=True):
        block.experts = lender
    model.residency.foresee(model.layers)
    compile_kernels(model)
    return model


def answered(model, tokens, wants_logits=False):
    """(ids, logits, seconds of each step, what was asked of experts in the timed ones) of a reply to one token."""
    engine = Engine(model, model.new_cache(1, FIRST + tokens + 16))
    request = Request([1], FIRST + tokens + 2, SamplingParams(temperature=1.0, seed=0))
    request.wants_logits = wants_logits
    engine.submit(request)
    rows = [one.logits for _ in range(FIRST) for one in engine.step()]
    torch.cuda.synchronize()
    before = counts(model)
    start = time.perf_counter()
    for _ in range(tokens):
        rows += [one.logits for one in engine.step()]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = counts(model)
    return request.made, rows, seconds / tokens, [b - a for a, b in zip(before, after, strict=True)]


def counts(model):
    if model.residency is None:
        return [0] * 4
    return [sum(column) for column in zip(*model.residency.counts, strict=True)]


def bus_rate(residency):
    """Bytes a second: copies of a whole part by the copy engine, and the kernel's copies of experts into slots."""
    lender = next(iter(residency.lenders.values()))
    source = lender.sources[0]
    landed = torch.empty(source.shape, dtype=source.dtype, device=GPU)
    engine = source.nbytes / cuda.timed(lambda: landed.copy_(source, non_blocking=True), 9)
    rates = {}
    for count in (1, 2, 6, 8):
        seconds = cuda.graph_seconds([lender.copy_again(count)] * 8)
        rates[count] = count * lender.expert_bytes / seconds
    return engine, rates


def copy_sizes(residency):
    """Launch sizes of the kernel that copies: words of a program, warps."""
    lender = next(iter(residency.lenders.values()))
    usual = slots.BLOCK, slots.WARPS
    for block, warps in ((1024, 2), (2048, 4), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (16384, 8), (16384, 16)):
        slots.BLOCK, slots.WARPS = block, warps
        seconds = cuda.graph_seconds([lender.copy_again(6)] * 8)
        say(f"    {block} words, {warps} warps: {6 * lender.expert_bytes / seconds / 1e9:.1f} GB/s")
    slots.BLOCK, slots.WARPS = usual


def prompt_seconds(model, ids):
    """Of a prompt of one piece, as a graph; and the logits of its last token."""
    cache, times = model.new_cache(1, len(ids) + 16), []
    for _ in range(6):
        cache.reset(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = prefill(model, cache, (0, ids))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]), found.clone()


def reported(residency, ahead, asked, tokens, seconds, resident, bus, kernel):
    """One way of decoding: what came of it, said and returned."""
    needed, missing, foreseen, guessed = (count / tokens for count in asked)
    each = next(iter(residency.lenders.values())).expert_bytes
    absent, copied = (missing + foreseen) * each, (missing + guessed) * each
    allowed = 1 / max(absent / bus, resident)
    beside = max(0.0, copied / kernel + resident - seconds)
    say(f"{ahead} ahead: {1 / seconds:.1f} tok/s; hit rate {1 - (missing + foreseen) / needed:.1%},", end=" ")
    say(f"{absent / 1e6:.0f} MB a token missing, {copied / 1e6:.0f} copied; of what was missing", end=" ")
    say(f"{foreseen / max(missing + foreseen, 1):.0%} foreseen, of guesses {foreseen / max(guessed, 1):.0%} right")
    say(f"    hit rate and bus allow {allowed:.1f} tok/s: {1 / seconds / allowed:.1%} of that (bar: 70%)")
    say(
        f"    a step {seconds * 1e3:.2f} ms: copies {copied / kernel * 1e3:.2f}, all else {resident * 1e3:.2f},",
        end=" ",
    )
    say(f"{beside * 1e3:.2f} side by side")
    return {
        "ahead": ahead, "tokens_per_second": 1 / seconds, "resident_tokens_per_second": 1 / resident,
        "hit_rate": 1 - (missing + foreseen) / needed, "missing_bytes": absent, "copied_bytes": copied,
        "foreseen": foreseen, "guessed": guessed, "bus_bytes_per_second": bus, "kernel_bytes_per_second": kernel,
        "allowed": allowed, "of_allowed": 1 / seconds / allowed, "side_by_side_seconds": beside,
    }  # fmt: skip


def explained(model):
    from halfbyte.commands.explaining import how, new_table, row
    from halfbyte.explain import explain

    found = explain(model, model.new_cache(1, 256), cuda.read_bandwidth())
    table = new_table("md")
    for line in (*found.lines, found.calls, found.step):
        table.add(row(line, found.seconds))
    say(how(found, "cuda"))


def as_written(model, tokens):
    """(ids, logits, seconds of a step) of a reply whose steps are not recorded: as steps are whose experts are read."""
    engine = Engine(model, model.new_cache(1, FIRST + tokens + 16), replays=False)
    request = Request([1], FIRST + tokens + 2, SamplingParams(temperature=1.0, seed=0))
    request.wants_logits = True
    engine.submit(request)
    rows = [one.logits for _ in range(FIRST) for one in engine.step()]
    start = time.perf_counter()
    rows += [one.logits for _ in range(tokens) for one in engine.step()]
    seconds = (time.perf_counter() - start) / tokens
    return request.made, [row.cpu() for row in rows], seconds


def gpu_for(folder, part):
    """Bytes of a GPU on which this part of all experts has slots: the sum of fitting.device_room, backwards."""
    _, ledger, account = skeleton(folder)
    text, dense = account.cache(min(account.context, TEXT)), account.weights - account.experts
    wanted = part * account.experts + account.experts // len(ledger.mixtures)
    least = wanted + device_room(0, ledger, text).beside
    return round(max(least, (least - text - dense / TEXTS) * TEXTS / (TEXTS - 1))), account.experts


def verdict(same):
    """Says what had the bits of everything resident; the exit status, 1 where something had not."""
    say("the same bits as resident:", ", ".join(f"{name} {'yes' if yes else 'NO'}" for name, yes in same.items()))
    return 0 if all(same.values()) else 1


def from_disk(args, folder):
    """The model of a folder with its experts on disk, in host memory and on the GPU, beside the same on the GPU."""
    ids = torch.randint(0, 100_000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    gpu, experts = gpu_for(folder, args.part)
    found = []
    for allowed in (Allowed(), Allowed(expert_cache=round(args.held * experts), gpu_memory=gpu, ram=ANY)):
        model = load_model(folder, "cuda", args.dtype, allowed=allowed)
        compile_kernels(model)
        prompts = [logits(model, ids[:count])[0].cpu() for count in (100, PROMPT)]
        found.append((prompts, *as_written(model, args.tokens)))
        residency = model.residency
        del model  # what is left of the first counts as used by the second
        gc.collect()
        torch.cuda.empty_cache()
    (prompts, made, rows, resident), (others, told, other_rows, seconds) = found
    same = {
        "prompt of 100": torch.equal(prompts[0], others[0]), f"prompt of {PROMPT}": torch.equal(prompts[1], others[1]),
        "tokens": made == told, "their logits": all(map(torch.equal, rows, other_rows)),
    }  # fmt: skip
    reads, counts = residency.reads, {lender.count for lender in residency.lenders.values()}
    say(f"on the GPU {size(residency.device_bytes)}, {counts} slots a layer;", end=" ")
    say(f"in host memory {size(residency.below.nbytes)}")
    say(f"of {reads.needed} experts {reads.missing / reads.needed:.1%} came from disk,", end=" ")
    say(f"{residency.copied / reads.needed:.1%} over the bus; {size(reads.bytes)} read", end=" ")
    say(f"at {size(round(reads.bytes / reads.seconds))}/s")
    say(f"{1 / seconds:.1f} tok/s; all on the GPU, as written, {1 / resident:.1f}")
    residency.close()
    return verdict(same)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--held", type=float, default=0.5)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    if args.disk:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made, "model")
            make(argparse.Namespace(folder=folder, gigabytes=(args.layers or 8) * LAYER / 1e9))
            return from_disk(args, folder)
    start = time.perf_counter()
    ids = torch.randint(0, 100_000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    model = built(args.layers)
    short, _ = logits(model, ids[:100])
    resident_prompt, long = prompt_seconds(model, ids)
    said, rows, _, _ = answered(model, 64, wants_logits=True)
    _, _, resident, _ = answered(model, args.tokens)
    say(f"{time.perf_counter() - start:.0f} s: everything resident: {1 / resident:.0f} tok/s,", end=" ")
    say(f"a prompt of {PROMPT} in {resident_prompt * 1e3:.0f} ms")
    del model
    torch.cuda.empty_cache()
    model = built(args.layers, part=args.part)
    residency = model.residency
    say(f"{time.perf_counter() - start:.0f} s: experts in host memory; {residency.nbytes / 1e9:.2f} GB on the GPU")
    same = {"prompt of 100": torch.equal(short, logits(model, ids[:100])[0])}
    prompt, found = prompt_seconds(model, ids)
    same[f"prompt of {PROMPT}"] = torch.equal(found, long)
    rate, kernel_rates = bus_rate(residency)
    say(f"bus: {rate / 1e9:.1f} GB/s by the copy engine; kernels that copy 1, 2, 6, 8 experts:", end=" ")
    say(", ".join(f"{one / 1e9:.1f}" for one in kernel_rates.values()), "GB/s")
    if args.sizes:
        copy_sizes(residency)
    results = []
    for ahead in args.ahead:
        residency.foresee(model.layers, ahead)
        others, other_rows, _, _ = answered(model, 64, wants_logits=True)
        same[f"tokens, {ahead} ahead"] = others == said
        same[f"their logits, {ahead} ahead"] = all(map(torch.equal, rows, other_rows))
        _, _, seconds, asked = answered(model, args.tokens)
        results.append(reported(residency, ahead, asked, args.tokens, seconds, resident, rate, kernel_rates[8]))
    wrong = verdict(same)
    layers = len(residency.lenders)
    whole = sum(part.nbytes for part in residency.whole[0].layers[0]) * layers / rate
    say(f"prompt of {PROMPT}: {prompt * 1e3:.0f} ms ({PROMPT / prompt:.0f} tok/s); resident", end=" ")
    say(f"{resident_prompt * 1e3:.0f} ms; all experts over the bus {whole * 1e3:.0f} ms")
    if args.explain:
        residency.foresee(model.layers, max(args.ahead))
        explained(model)
    say(f"{time.perf_counter() - start:.0f} s in all")
    if out := os.environ.get("OUT"):
        found = {
            "same_bits": same,
            "prompt_seconds": prompt,
            "resident_prompt_seconds": resident_prompt,
            "decode": results,
        }
        Path(out, "device_experts.json").write_text(json.dumps(found, indent=1))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
