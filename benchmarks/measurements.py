"""Measurements of one model on a GPU: whether its steps are right, how long they take, and where the time goes."""

import statistics
import time
from contextlib import nullcontext

import torch
from random_models import build, fill, prompt_flops, step_bytes

from halfbyte import cuda, fusion
from halfbyte.decoding import DecodeStep
from halfbyte.ops.dispatch import reference
from halfbyte.step import Run, Step

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
    """Tokens a second: steps launched one ahead of what is read, and the device's own time for them."""
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
    eager = eager_step(model, step.cache, pending.tolist())
    moved = step_bytes(model, given, streams, context)
    return {
        "streams": streams, "context": context, "tokens_per_second": streams / wall, "step_us": wall * 1e6,
        "device_us": device * 1e6, "eager_us": eager * 1e6, "floor_us": moved / cuda.read_bandwidth() * 1e6,
        "of_floor": moved / cuda.read_bandwidth() / wall, "calls": len(step.calls), "finite": finite,
        "cache_bytes": step.cache.nbytes, "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def eager_step(model, cache, ids):
    """Seconds of a step without a graph, as the engine runs it today."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work = [(slot, [id]) for slot, id in enumerate(ids)]
        ids = model(cache.plan(work), cache).argmax(-1).tolist()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def prefill(model, given, tokens):
    """Tokens a second of one prompt, computed in chunks: as the engine does, and the launches alone, as a graph."""
    cache = model.new_cache(1, tokens, chunk=CHUNK)
    ids = torch.randint(model.vocabulary, (tokens,)).tolist()
    pieces = [ids[start : start + CHUNK] for start in range(0, tokens, CHUNK)]

    def whole():
        cache.reset(0)
        for piece in pieces:
            work = [(0, piece)]
            logits = model(cache.plan(work, "last" if piece is pieces[-1] else "none"), cache)
            cache.advance(work)
        return logits

    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        finite = bool(torch.isfinite(whole()).all())
        seconds.append(time.perf_counter() - start)
    wall, device = min(seconds[1:]), chunk_graph(model, cache, len(pieces[0])) * len(pieces)
    flops = prompt_flops(model, given, tokens)
    return {
        "tokens": tokens, "tokens_per_second": tokens / wall, "seconds": wall, "first_seconds": seconds[0],
        "graph_tokens_per_second": tokens / device, "of_matmul": flops / cuda.matmul_rate() / wall, "flops": flops,
        "finite": finite, "cache_bytes": cache.nbytes, "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def chunk_graph(model, cache, tokens):
    """Seconds of the last chunk of the cache's room, as one captured graph: the GPU's time without the host's."""
    end, device = cache.capacity, model.device

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    run = Run(0, 1, tokens, int32([0]), int32([end]))
    positions = torch.arange(end - tokens, end, dtype=torch.int32, device=device)
    step = Step(positions, positions, (run,), cache.dtype, int32([tokens - 1]))
    return cuda.graph_seconds([lambda: model(step, cache)], 4)


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


def variants(model, given, streams, context):
    """The device's time for a step with all fusions, with none, and without each of them."""
    rows, setting = [], fusion.WITHOUT
    for without in ((), tuple(fusion.FUSIONS), *((name,) for name in fusion.FUSIONS)):
        fusion.WITHOUT = frozenset(without)
        step = prepared(model, streams, context)
        rows.append({"without": without, "device_us": cuda.timed(step.launch, 24) * 1e6})
    fusion.WITHOUT = setting
    return {"streams": streams, "context": context, "rows": rows}


def profile(model, given, streams, context, steps=4):
    """The kernels of a decode step by name: how many, how long. Overlapping launches count their wait as well."""
    step = prepared(model, streams, context)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step.launch()
        torch.cuda.synchronize()
    names = {}
    for event in seen.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and not event.name().startswith(("Memcpy", "Memset")):
            names.setdefault(event.name(), []).append(event.duration_ns() / 1e3)
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
