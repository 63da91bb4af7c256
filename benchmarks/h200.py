"""Whole models on one GPU, random weights at the published shapes: python benchmarks/h200.py

Checks a few layers against the float32 bodies, then prints decode and prefill speed, how near they are to the bytes
or arithmetic they need, memory, and where a step's time goes. Kernels are compiled first, by many processes at once.

--models qwen3.5 qwen3     these models                      --quick     one stream at 1k, a prompt of 2048
--only decode profile      these sections                    --limit S   seconds that the whole may take
--json FILE                the numbers (default: $OUT/h200.json where OUT is set)
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import measurements
import torch
from random_models import build
from side_by_side import side_by_side
from starting import start as measure_start

from halfbyte import cuda

NAMES = {
    "qwen3.5": "Qwen3.5-35B-A3B", "qwen3": "Qwen3-30B-A3B", "gemma4": "gemma-4-26B-A4B",
    "deepseek": "DeepSeek-V3", "qwen3.5-397b": "Qwen3.5-397B-A17B",
}  # fmt: skip
PARTLY = ("DeepSeek-V3", "Qwen3.5-397B-A17B")  # too large for one GPU: some of their layers, fewer measurements
SECTIONS = ("start", "check", "decode", "prefill", "profile")
STREAMS, CONTEXTS, PROMPTS = (1, 8, 32), (1024, 32768), (512, 2048, 16384)
BAD = ("WRONG", "FAILED", "NOT FINITE")  # in the last lines: the exit status is 1
ROOM = 0.55  # of the GPU's memory that weights may take: caches need the rest


class Clock:
    """What is left of the time that all may take."""

    def __init__(self, limit):
        self.end = time.monotonic() + limit

    @property
    def left(self):
        return self.end - time.monotonic()


def say(*words):
    print(*words, flush=True)


def layers_that_fit(name):
    """None for all of them, or as many as leave room for caches."""
    model, given = build(name, "meta")
    total, count = sum(given["bytes"].values()), len(model.layers)
    room = torch.cuda.get_device_properties(0).total_memory * ROOM
    return None if total <= room else max(4, int(room / (total / count)) // 4 * 4)


def sections_of(args, name):
    """What is to be measured of a model: (section, its arguments)."""
    first, few = name == NAMES["qwen3.5"], args.quick or name in PARTLY
    shapes = [(streams, context) for streams in STREAMS for context in CONTEXTS]
    if first and not args.quick:
        yield "start", ()
    if name not in PARTLY:
        yield "check", (("float32", "bfloat16") if first else ("bfloat16",),)
    yield from (("decode", shape) for shape in (shapes[:1] if args.quick else shapes[:3] if few else shapes))
    yield from (("prefill", (tokens,)) for tokens in (PROMPTS[1:2] if few else PROMPTS))
    yield from (("profile", (streams, CONTEXTS[0])) for streams in (STREAMS[::2] if first and not few else STREAMS[:1]))


def said_memory(row):
    beside = f"{row['beside_bytes'] / 1e9:.2f} GB beside weights and caches"
    return f"peak {row['peak_bytes'] / 1e9:.1f} GB, {beside}{'' if row['finite'] else ', NOT FINITE'}"


def line_of(section, row):
    if section == "decode":
        return (
            f"{row['streams']:3} streams at {row['context']:5}: {row['tokens_per_second']:8.0f} tok/s (engine "
            f"{row['engine_tokens_per_second']:.0f}), step {row['step_us']:7.0f} us (device {row['device_us']:.0f}, "
            f"eager {row['eager_us']:.0f}, floor {row['floor_us']:.0f}), {row['of_floor']:4.0%} of floor, "
            f"{row['launches']} launches, {said_memory(row)}"
        )
    if section == "prefill":
        return (
            f"prompt of {row['tokens']:5}: {row['tokens_per_second']:8.0f} tok/s ({row['seconds'] * 1e3:.1f} ms; "
            f"without graphs {row['eager_tokens_per_second']:.0f} tok/s), {row['of_matmul']:4.0%} of matmul, "
            f"{said_memory(row)}"
        )
    if section == "start":
        return "\n".join(
            f"    {label}: {one['first_token']:.1f} s from weights to the first token, {one['compiled']} kernels "
            f"compiled in {one['compiling']:.1f} s; the next steps {one['steps_ms']} ms; CUDA {one['cuda']:.1f} s, "
            f"weights {one['weights']:.1f} s before"
            for label, one in row.items()
        )
    if section == "check":
        said = ", ".join(f"{r['layer']} {r['dtype']} {r['median']:.1e} (worst {r['worst']:.1e})" for r in row["layers"])
        said += "".join(
            f"\n    {r['streams']} streams: replay {'the same bits' if r['same'] else 'OTHER BITS'}, fused "
            f"{r['fused']:.1e} away, twice {'the same bits' if r['again'] else 'OTHER BITS'}, calls {r['calls']}"
            for r in row["replays"]
        )
        return f"{'right' if row['right'] else 'WRONG'}: layers {said}"
    lines = [
        f"{row['streams']} streams: {row['launches']:.0f} launches a step, their times sum to {row['summed_us']:.0f} us"
    ]
    for one in row["kernels"][:18]:
        lines.append(
            f"    {one['count']:6.0f} x {one['each_us']:7.2f} us = {one['total_us']:8.1f} us  {one['kernel'][:90]}"
        )
    return "\n".join(lines)


def measure(args, name, clock):
    """All sections of one model. One that fails is said, and the others go on."""
    torch.cuda.reset_peak_memory_stats()
    start, fitting = time.monotonic(), layers_that_fit(name)
    model, given = build(name, measurements.DEVICE, layers=fitting)
    torch.cuda.synchronize()
    weights = sum(given["bytes"].values())
    result = {"model": name, "layers": len(model.layers), "weight_bytes": weights, "sections": []}
    of_all = "" if fitting is None else f" of {len(build(name, 'meta')[0].layers)}"
    say(f"\n{name}: {len(model.layers)}{of_all} layers, {weights / 1e9:.1f} GB; {time.monotonic() - start:.1f} s")
    for section, shape in sections_of(args, name):
        if section not in args.only:
            continue
        if clock.left < 8:
            say(f"{section} {shape}: left out, the time is up")
            continue
        torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        try:
            subject = (name,) if section in ("start", "check") else (model, given)
            row = (measure_start if section == "start" else getattr(measurements, section))(*subject, *shape)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
            say(f"{name} {section} {shape} FAILED: {row['error'][:500]}")
            traceback.print_exc(limit=-3)
        else:
            say(line_of(section, row), f"[{time.monotonic() - began:.1f} s]")
        result["sections"].append({"section": section, "shape": shape, **row})
        torch.cuda.empty_cache()
    return result


def summary(results):
    """One line a model: what the bars ask for."""
    lines = []
    for one in results:
        rows = [row for row in one["sections"] if "error" not in row]
        decodes = [
            f"{row['streams']}x{row['context']} {row['tokens_per_second']:.0f} (engine "
            f"{row['engine_tokens_per_second']:.0f}, {row['of_floor']:.0%})"
            for row in rows
            if row["section"] == "decode"
        ]
        prompts = [f"{row['tokens']} {row['tokens_per_second']:.0f}" for row in rows if row["section"] == "prefill"]
        beside = max((row["beside_bytes"] for row in rows if "beside_bytes" in row), default=0)
        checks = ["right" if row["right"] else "WRONG" for row in rows if row["section"] == "check"]
        failed = [f"{row['section']} FAILED" for row in one["sections"] if "error" in row]
        failed += [f"{row['section']} {row['shape']} NOT FINITE" for row in rows if not row.get("finite", True)]
        lines.append(f"{one['model']}, {one['layers']} layers: " + "; ".join([
            *checks, "decode tok/s (of floor) " + ", ".join(decodes), "prefill tok/s " + ", ".join(prompts),
            f"at most {beside / 1e9:.2f} GB beside weights and caches", *failed,
        ]))  # fmt: skip
    return "\n".join(lines)


def compiling(args, name):
    """What compiles every kernel that will be timed: (model, section, which), each for a process of its own."""
    wanted = [(section, shape) for section, shape in sections_of(args, name) if section in args.only]
    for streams in sorted({shape[0] for section, shape in wanted if section in ("decode", "profile")}):
        yield name, "decode", streams
    yield from ((name, "check", dtype) for section, shape in wanted if section == "check" for dtype in shape[0])
    yield from ((name, "prefill", shape[0]) for section, shape in wanted if section == "prefill" and shape[0] <= 2048)


def compile_one(name, section, which):
    """Run a model with a layer of each kind, and throw the results away; kernels stay in Triton's cache on the disk."""
    model, given = build(name, measurements.DEVICE, layers=measurements.FEW_LAYERS)
    if section == "check":
        measurements.check_layers(model, [which])
    elif section == "prefill":
        measurements.prefill(model, given, which)
    else:
        for context in CONTEXTS:
            measurements.prepared(model, which, context)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=440)
    parser.add_argument("--warm-limit", type=float, default=150)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--json", default=os.path.join(os.environ["OUT"], "h200.json") if "OUT" in os.environ else "")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.one:
        return compile_one(*json.loads(args.one))
    clock = Clock(args.limit)
    names = [NAMES[given] for given in args.models]
    if args.processes:
        jobs = [job for name in names for job in compiling(args, name)]
        jobs.sort(key=lambda job: ("check", "decode", "prefill").index(job[1]))  # the longest first
        commands = [[sys.executable, __file__, "--one", json.dumps(job)] for job in jobs]
        say(side_by_side(commands, args.processes, min(args.warm_limit, clock.left - 60)))
    machine = cuda.facts()
    say("\n".join(cuda.header(machine)))
    results = []
    for name in names:
        try:
            results.append(measure(args, name, clock))
        except Exception as error:
            say(f"{name} FAILED: {type(error).__name__}: {error}")
            traceback.print_exc(limit=-3)
        torch.cuda.empty_cache()
        if args.json:
            Path(args.json).write_text(json.dumps({"machine": machine, "models": results}, indent=1))
    said = summary(results)
    say(f"\n{said}\n{args.limit - clock.left:.0f} s in all")
    return int(len(results) < len(names) or any(word in said for word in BAD))


if __name__ == "__main__":
    sys.exit(main())
