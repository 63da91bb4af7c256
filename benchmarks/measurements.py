"""Measurements of one model on a GPU: whether its steps are right, how long they take, and where the time goes."""

import statistics
import time
from contextlib import nullcontext

import torch
from random_models import build, fill, prompt_flops, step_bytes

from halfbyte import cuda
from halfbyte.decoding import DecodeStep
from halfbyte.engine import Engine, Request
from halfbyte.ops.dispatch import reference

CHUNK = 2048
REPLAYS, SECONDS = 48, 1.0  # decode steps of a measurement: so many, or fewer where they would take longer
HEADROOM = 256  # rows of a cache beyond the context that is measured
FEW_LAYERS = 2  # one of each kind: all that kernels are compiled for
DEVICE = "cuda"


def prepared(model, streams, context):
    """A decode step of so many texts of this length: recorded, fused, captured, and replayed once."""
    cache = model.new_cache(streams, context + HEADROOM, chunk=CHUNK)
    fill(cache, context)
    step = DecodeStep(model, cache, streams)
    step.bind(list(range(streams)), [17 + slot for slot in range(streams)])
    for _ in range(4):
        step.launch().tolist()
    return step


def decode(model, given, streams, context):
    """Tokens a second: as an engine gives them, and of steps alone, launched one ahead of what is read."""
    step = prepared(model, streams, context)
    finite = bool(torch.isfinite(step.logits).all())
    start = time.perf_counter()
    step.launch().tolist()
    replays = max(4, min(REPLAYS, int(SECONDS / (time.perf_counter() - start))))
    device = cuda.timed(step.launch, replays)
    wall = time.perf_counter()
    pending = step.launch()
    for _ in range(replays - 1):
        after = step.launch()
        pending.tolist()
        pending = after
    pending.tolist()
    wall = (time.perf_counter() - wall) / replays
    launches = len(launched(step.launch))
    moved = step_bytes(model, given, streams, context)
    return {
        "streams": streams, "context": context, "tokens_per_second": streams / wall, "step_us": wall * 1e6,
        "engine_tokens_per_second": streams / engine_step(model, step.cache, context, replays),
        "device_us": device * 1e6, "eager_us": eager_step(model, step.cache, pending.tolist()) * 1e6,
        "floor_us": moved / cuda.read_bandwidth() * 1e6, "of_floor": moved / cuda.read_bandwidth() / wall,
        "launches": launches, "calls": len(step.calls), "finite": finite,
        **memory(given, step.cache),
    }  # fmt: skip


def memory(given, cache):
    """Bytes: the most that was in use since the last reset, and how much of it are neither weights nor caches."""
    peak = torch.cuda.max_memory_allocated()
    return {
        "cache_bytes": cache.nbytes,
        "peak_bytes": peak,
        "beside_bytes": peak - sum(given["bytes"].values()) - cache.nbytes,
    }


def engine_step(model, cache, context, steps):
    """Seconds of a step of an engine whose requests are all being answered; one of them keeps its state."""
    cache.lengths = [context] * cache.padding.stop
    engine = Engine(model, cache)
    for slot in range(cache.slots):
        keeps = cache.slots == 1
        engine.running.append(Request([1], HEADROOM, slot=slot, computed=1, made=[17 + slot], keeps=keeps))
    engine.free = []
    for _ in range(2):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - start) / steps


def eager_step(model, cache, ids):
    """Seconds of a step without a graph: Python launches every kernel."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work = [(slot, [id]) for slot, id in enumerate(ids)]
        ids = model(cache.plan(work), cache).argmax(-1).tolist()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def prefill(model, given, tokens):
    """Tokens a second of one prompt, in chunks, through the engine to its first token; and without graphs."""
    cache = model.new_cache(1, tokens, chunk=CHUNK)
    ids = torch.randint(model.vocabulary, (tokens,)).tolist()

    def seconds(replays):
        request, engine = Request(ids, 1), Engine(model, cache, replays=replays)
        engine.submit(request)
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = []
        while engine.busy:
            made = engine.step()
        return time.perf_counter() - start, bool(torch.isfinite(made[0].logits).all())

    turns = [seconds(True) for _ in range(2)]  # as written, so that kernels are compiled; captured
    turns += [seconds(True) for _ in range(3)]
    wall, eager, flops = min(turns[2:])[0], seconds(False)[0], prompt_flops(model, given, tokens)
    return {
        "tokens": tokens, "tokens_per_second": tokens / wall, "seconds": wall, "first_seconds": turns[0][0],
        "eager_tokens_per_second": tokens / eager, "of_matmul": flops / cuda.matmul_rate() / wall, "flops": flops,
        "finite": all(finite for _, finite in turns), **memory(given, cache),
    }  # fmt: skip


def check(name, dtypes=("float32", "bfloat16"), limit=5e-2):
    """Each kind of layer on the same input against the bodies in float32; then replays against the eager step.

    Of the tokens' relative errors the median counts in bfloat16: a rounded router may choose another expert.
    """
    model, _ = build(name, DEVICE, layers=FEW_LAYERS)
    rows = check_layers(model, dtypes)
    right = all(row["median"] < (1e-4 if row["dtype"] == "float32" else limit) for row in rows)
    model.dtype = torch.bfloat16
    replays = [check_replay(model, streams) for streams in (1, 8)] if "bfloat16" in dtypes else []
    right = right and all(one["same"] and one["again"] and one["fused"] < limit for one in replays)
    return {"layers": rows, "replays": replays, "right": right}


def check_layers(model, dtypes):
    tokens, rows = 8, []
    for index, layer in enumerate(model.layers):
        h = torch.randn(tokens + 1, model.norm.weight.shape[0], device=DEVICE)
        results = {}
        for label in ("body", *dtypes):
            model.dtype = getattr(torch, "float32" if label == "body" else label)
            cache = model.new_cache(1, 64, chunk=64)
            with reference() if label == "body" else nullcontext():
                parts = []
                for piece in (h[:tokens], h[tokens:]):  # a prompt, then a token
                    step = cache.plan([(0, [0] * len(piece))], "all")
                    out = layer(piece, None, step, cache.layers[index]) if hasattr(layer, "mixer") else (
                        layer(piece, step, cache.layers[index], None),)  # fmt: skip
                    cache.advance([(0, [0] * len(piece))])
                    parts.append(torch.stack([part.float() for part in out]).sum(0))
            results[label] = torch.cat(parts)
        exact = results.pop("body")
        for label, got in results.items():
            error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
            rows.append({"layer": index, "dtype": label, "median": float(error.median()), "worst": float(error.max())})
    return rows


def check_replay(model, streams, steps=6):
    """A recorded step against the eager one, on the same tokens: the same bits, and, fused, nearly the same numbers."""
    caches = []
    for _ in range(4):
        caches.append(model.new_cache(streams, 128, chunk=CHUNK))
        torch.manual_seed(3)
        fill(caches[-1], 100)
    eager, *others = caches
    replays = [DecodeStep(model, other, streams, fused=fused) for other, fused in zip(others, (0, 1, 1), strict=True)]
    ids, same, again, errors = [5 + slot for slot in range(streams)], True, True, []
    for _ in range(steps):
        work = [(slot, [id]) for slot, id in enumerate(ids)]
        expected = model(eager.plan(work), eager)
        eager.advance(work)
        for step in replays:
            step.bind(list(range(streams)), ids)
            step.launch()
        plain, fused, twin = (step.logits for step in replays)
        same, again = same and torch.equal(plain, expected), again and torch.equal(fused, twin)
        error = (fused.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        errors += error.tolist()
        ids = expected.argmax(-1).tolist()
    calls = [len(step.calls) for step in replays[:2]]
    return {"streams": streams, "same": same, "again": again, "fused": statistics.median(errors), "calls": calls}


def profile(model, given, streams, context, steps=4):
    """The kernels of a decode step by name: how many, how long. Overlapping launches count their wait as well."""
    step = prepared(model, streams, context)
    names = {}
    for name, took in launched(step.launch, steps):
        names.setdefault(name, []).append(took)
    rows = [
        {"kernel": kernel, "count": len(each) / steps, "total_us": sum(each) / steps, "each_us": statistics.mean(each)}
        for kernel, each in names.items()
    ]
    rows.sort(key=lambda row: -row["total_us"])
    calls = {}
    for call in step.calls:
        calls[call.name] = calls.get(call.name, 0) + 1
    return {
        "streams": streams, "context": context, "launches": sum(row["count"] for row in rows),
        "summed_us": sum(row["total_us"] for row in rows), "kernels": rows, "calls": calls,
    }  # fmt: skip


def launched(work, times=1):
    """(kernel, microseconds) of everything that some calls launch."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    return [
        (event.name(), event.duration_ns() / 1e3)
        for event in seen.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type()) and not event.name().startswith(("Memcpy", "Memset"))
    ]
