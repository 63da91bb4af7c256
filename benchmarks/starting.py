"""How long a model takes to its first token: in a process of its own, the first time ever and with kernels cached.

python benchmarks/starting.py MODEL    weights are random and made on the GPU, so only what follows them counts
python benchmarks/starting.py tiny     the embedded model on a CPU; kernels are those that the cache has
python benchmarks/starting.py FOLDER   memory instead: of a checkpoint on a CPU, after each part of a start and a reply
python benchmarks/starting.py memory   of the model that benchmarks/cpu.py has
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGUN = time.perf_counter()
import torch  # noqa: E402
from random_models import build  # noqa: E402

from halfbyte.compilation import compile_kernels  # noqa: E402
from halfbyte.engine import Engine, Request  # noqa: E402

PROMPT, REPLY = 100, 6  # tokens


def start(name):
    """{first ever, kernels cached}: each as `once` gives it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        rows = {}
        for label in ("first ever", "kernels cached"):
            done = subprocess.run(
                [sys.executable, __file__, name], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            rows[label] = json.loads(done.stdout.splitlines()[-1])
    return rows


def once(name):
    """Seconds: of CUDA's own start, of making weights, of compiling, and from the weights to the first token."""
    marks = [time.perf_counter()]

    def lap():
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    torch.zeros(1, device="cuda")
    cuda = lap()
    model, _ = build(name, "cuda")
    weights = lap()
    compiled = compile_kernels(model)
    compiling = lap()
    cache = model.new_cache()
    cache.reserve(PROMPT + REPLY)
    engine, request = Engine(model, cache), Request(torch.randint(model.vocabulary, (PROMPT,)).tolist(), REPLY)
    engine.submit(request)
    while not request.made:
        engine.step()
    first, steps = compiling + lap(), []
    while engine.busy:
        engine.step()
        steps.append(round(lap() * 1e3))
    return {
        "cuda": cuda, "weights": weights, "compiled": compiled, "compiling": compiling, "first_token": first,
        "steps_ms": steps,
    }  # fmt: skip


def on_cpu():
    """Seconds of imports, of weights, of kernels (compiled, or loaded from the cache), and of a prompt."""
    begun = time.perf_counter()
    from halfbyte.loading import load

    imported = time.perf_counter()
    model, _ = load("tiny", "cpu")
    loaded = time.perf_counter()
    compiled = compile_kernels(model)
    ready = time.perf_counter()
    engine, request = Engine(model, model.new_cache(1, PROMPT + REPLY)), Request(list(range(PROMPT)), REPLY)
    engine.submit(request)
    while not request.made:
        engine.step()
    spans = (BEGUN, begun, imported, loaded, ready, time.perf_counter())
    names = ("torch and imports", "loader", "weights", "kernels", "prompt")
    seconds = {name: round(end - start, 3) for name, start, end in zip(names, spans, spans[1:], strict=False)}
    return {"compiled": compiled, **seconds}


def memory_on_cpu(folder):
    """Resident MB of the process, and how many of those at the highest are neither weights nor caches nor imports."""
    from halfbyte import memory
    from halfbyte.loading import load_model

    cpu = torch.device("cpu")
    held = {"imports": memory.held(cpu)}
    model = load_model(folder)
    held["weights"] = memory.held(cpu)
    compile_kernels(model)
    held["kernels"] = memory.held(cpu)
    memory.forget_peak(cpu)
    cache = model.new_cache(1, 512 + 64)
    engine, request = Engine(model, cache), Request(list(range(512)), 32)
    engine.submit(request)
    while engine.busy:
        engine.step()
    held["a prompt of 512 and 32 tokens, at the highest"] = highest = memory.peak(cpu)
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    held |= {"the files": size, "the cache": cache.nbytes, "beside": highest - size - cache.nbytes - held["imports"]}
    return {name: round(count / 1e6) for name, count in held.items()}


def memory_of_competitor():
    """The same of the model that benchmarks/cpu.py times: 30 tokens, and a prompt of 512."""
    from cpu_competitors import Halfbyte

    from halfbyte import memory

    cpu, found = torch.device("cpu"), Halfbyte(os.cpu_count())
    rows = {"imports": memory.held(cpu)}
    for kind, times in (("decode", 30), ("prefill", 2)):
        (run,) = found.model(kind)
        memory.forget_peak(cpu)
        for _ in range(times):
            run()
        engine = getattr(run, "__self__", None)
        cache = engine.cache.nbytes if engine is not None else 0  # a prompt's is small
        weights = sum(found.weights.given["bytes"].values())
        rows |= {f"weights, {kind}": weights, f"cache, {kind}": cache}
        rows[f"beside, {kind}"] = memory.peak(cpu) - weights - cache - rows["imports"]
        del run, engine
    return {name: round(count / 1e6) for name, count in rows.items()}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    asked = sys.argv[1]
    if asked in ("tiny", "memory"):
        print(json.dumps(on_cpu() if asked == "tiny" else memory_of_competitor()))
    else:
        print(json.dumps(memory_on_cpu(asked) if Path(asked).is_dir() else once(asked)))
