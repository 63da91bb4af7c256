"""The competitors of benchmarks/cpu.py. Each runs in a process of its own: `python cpu_competitors.py NAME THREADS`.

A line on standard input asks for a case to be made or timed, a line on standard output answers. A case is a list of
calls on different weights, more together than any cache holds; a turn goes round that list.
"""

import json
import os
import sys
import time
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from halfbyte.machine import compiled_read, queueing_seconds

ROTATED = 192 << 20  # bytes of weights that a case goes round
TURN = 0.04  # seconds of a turn, at least
SHAPE = {"hidden": 1024, "layers": 12, "heads": 16, "groups": 4, "D": 128, "experts": 64, "chosen": 8, "inner": 512,
         "vocabulary": 32000}  # fmt: skip
CONTEXT = 256  # tokens that a decode step looks back on


def recorded(call):
    import torch

    from halfbyte.graph import bound, record

    return bound(record(call)[1], torch.device("cpu"))


def copies(case):
    return max(2, -(-case.get("rotated", ROTATED) // case["bytes"]))


class Read:
    """Every byte once, eight streams a thread, summed, and the sum verified. In large pages, as our weights are."""

    def __init__(self, threads):
        self.threads = threads

    def make(self, case):
        import torch

        from halfbyte.memory import allocate

        size, here = case["bytes"] // 8, torch.device("cpu")
        data = [
            allocate(8 * size, here).view(torch.int64).copy_(torch.arange(size)).numpy() for _ in range(copies(case))
        ]
        read, expected = compiled_read(), size * (size - 1) // 2

        def one(part):
            if read(part, self.threads) != expected:
                raise RuntimeError("the read did not sum up to what it must: its time means nothing")

        return [lambda part=part: one(part) for part in data]


class Halfbyte:
    """Calls are recorded once and then run again, as a decode step's are; llama.cpp's graphs are built once as well."""

    def __init__(self, threads):
        import torch

        from halfbyte.machine import use_threads

        use_threads(threads)
        self.random = torch.Generator().manual_seed(0)

    def packed(self, shape, bits, group=64):
        import torch
        from random_models import packed_memory

        from halfbyte.ops.quant import Packed

        *lead, K = shape
        words, scales, biases = packed_memory(lead, K, bits, group, "cpu")
        words.random_(-(2**31), 2**31, generator=self.random)
        scales.fill_(2.0**-bits * K**-0.5)
        return Packed(words, scales, torch.mul(scales, -(2.0 ** (bits - 1)), out=biases), bits, group)

    def make(self, case):
        import torch

        from halfbyte.ops.attention import attention
        from halfbyte.ops.dispatch import use_cpu_activations
        from halfbyte.ops.experts import Experts, expert_mlp
        from halfbyte.ops.quant import qmm

        use_cpu_activations(case.get("activations", "f32"))
        kind, sizes = case["kind"], case["sizes"]
        if kind == "product":
            rows, N, K, bits = sizes
            x, weights = torch.randn(rows, K), [self.packed((N, K), bits) for _ in range(copies(case))]
            return [recorded(lambda w=w: qmm(x, w)) for w in weights]
        if kind == "experts":
            E, chosen, inner, hidden = sizes
            x = torch.randn(1, hidden)
            experts = Experts(*(self.packed(size, 4) for size in ((E, inner, hidden),) * 2 + ((E, hidden, inner),)))
            ids = [torch.randperm(E)[:chosen][None].int() for _ in range(copies(case))]
            return [recorded(lambda chosen=chosen: expert_mlp(x, chosen, experts, "silu")) for chosen in ids]
        if kind == "attention":
            S, H, G, D = sizes
            q, caches = torch.randn(1, 1, H, D), [torch.randn(2, 1, S, G, D) for _ in range(copies(case))]
            return [recorded(lambda kv=kv: attention(q, *kv, scale=D**-0.5)) for kv in caches]
        return self.model(kind)

    def model(self, kind):
        import torch
        from random_models import RandomWeights, fill, lay_together

        from halfbyte import config
        from halfbyte.engine import Engine, Request
        from halfbyte.models import MODELS

        values = {**mlx_arguments(), "model_type": "qwen3_moe", "max_position_embeddings": 4096}
        torch.manual_seed(0)
        self.weights = RandomWeights("cpu")
        made = MODELS["qwen3_moe"](config.from_dict(values, Path("random"), set(MODELS)), self.weights)
        made.dtype = torch.float32
        lay_together(made)
        if kind == "prefill":
            cache = made.new_cache(1, 600, chunk=512)

            def prompt():
                engine = Engine(made, cache)
                engine.submit(Request(list(range(512)), 1))
                while engine.busy:
                    engine.step()

            return [prompt]
        cache = made.new_cache(1, CONTEXT + 4096, chunk=512)
        fill(cache, CONTEXT)
        engine = Engine(made, cache)
        engine.running.append(Request([1], 4000, slot=0, computed=1, made=[17]))
        engine.free = []
        return [engine.step]


class Torch:
    """float32 products with dense weights, and attention; int4 weights with bfloat16 activations for one row."""

    def __init__(self, threads):
        import torch

        torch.set_num_threads(threads)

    def make(self, case):
        import torch

        kind, sizes = case["kind"], case["sizes"]
        if kind == "attention":
            S, H, G, D = sizes
            q, caches = torch.randn(1, H, 1, D), [torch.randn(2, 1, G, S, D) for _ in range(copies(case))]
            attend = torch.nn.functional.scaled_dot_product_attention
            return [lambda kv=kv: attend(q, *kv, enable_gqa=True) for kv in caches]
        if kind != "product" or sizes[3] != 4:
            return None
        rows, N, K, _ = sizes
        if rows > 1:
            x, weights = torch.randn(rows, K), [torch.randn(N, K) for _ in range(2)]
            return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
        codes = torch.randint(16, (N, K), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        x, scales = torch.randn(1, K, dtype=torch.bfloat16), torch.rand(K // 64, N, 2).bfloat16()
        weights = [packed.clone() for _ in range(copies(case))]
        return [lambda w=w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 64, scales) for w in weights]


def mlx_arguments():
    s = SHAPE
    return {
        "model_type": "qwen3_moe", "hidden_size": s["hidden"], "num_hidden_layers": s["layers"],
        "intermediate_size": s["inner"], "num_attention_heads": s["heads"], "num_experts": s["experts"],
        "num_experts_per_tok": s["chosen"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": s["inner"], "rms_norm_eps": 1e-6, "vocab_size": s["vocabulary"],
        "num_key_value_heads": s["groups"], "head_dim": s["D"], "rope_theta": 1e6, "tie_word_embeddings": False,
        "max_position_embeddings": 4096, "norm_topk_prob": True,
    }  # fmt: skip


class Mlx:
    """float32 activations: bfloat16 is several times slower on a CPU. mlx-lm for whole models."""

    def __init__(self, threads):
        pass  # it has one thread for a stream

    def make(self, case):
        import mlx.core as mx

        kind, sizes = case["kind"], case["sizes"]
        if kind == "product" and sizes[0] == 1 and sizes[3] == 4:
            _, N, K, bits = sizes
            x, parts = mx.random.normal((1, K)), mx.quantize(mx.random.normal((N, K)), 64, bits)
            return [lambda: mx.eval(mx.quantized_matmul(x, *parts, group_size=64, bits=bits))]
        if kind == "decode":
            return [self.decode()]
        return None

    def decode(self):
        import mlx.core as mx
        import mlx.nn as nn
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.models.qwen3_moe import Model, ModelArgs

        model = Model(ModelArgs(**mlx_arguments()))
        nn.quantize(model, 64, 4)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        cache = make_prompt_cache(model)
        rows = mx.random.normal((1, SHAPE["groups"], CONTEXT, SHAPE["D"]))
        for layer in cache:
            layer.update_and_fetch(rows, rows)
        last = [mx.array([[17]])]

        def step():
            last[0] = mx.argmax(model(last[0], cache)[:, -1:], -1)
            mx.eval(last[0])

        return step


class Llama:
    """llama.cpp, its threads as many as ours; `ggml.py` says how."""

    def __init__(self, threads):
        import llama_cpp

        self.threads = threads
        self.says = llama_cpp.llama_print_system_info().decode()

    def make(self, case):
        import ggml

        kind, sizes = case["kind"], case["sizes"]
        if kind == "product" and sizes[3] == 4:
            rows, N, K, _ = sizes
            return ggml.Ggml(self.threads).product(rows, N, K, copies(case) if rows == 1 else 2)
        if kind == "experts":
            return ggml.Ggml(self.threads).experts(*sizes, copies(case))
        if kind not in ("decode", "prefill"):
            return None
        model = ggml.Model(SHAPE, self.threads)
        if kind == "prefill":
            return [lambda: (model.forget(), model.forward(range(512)))]
        model.forward(range(CONTEXT))
        return [lambda: model.forward([17])]


COMPETITORS = {"read": Read, "halfbyte": Halfbyte, "torch": Torch, "mlx": Mlx, "llama.cpp": Llama}


def turn(calls):
    """One turn: seconds a call, the CPU time and the queueing of all threads, as parts of the time."""
    queued, used, count = queueing_seconds(), time.process_time(), 0
    start = time.perf_counter()
    while count == 0 or time.perf_counter() - start < TURN:
        next(calls)()
        count += 1
    took = time.perf_counter() - start
    return {"seconds": took / count, "queued": (queueing_seconds() - queued) / took,
            "share": (time.process_time() - used) / took}  # fmt: skip


def serve(name, threads):
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    competitor, calls = COMPETITORS[name](threads), None

    def answer(**values):
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(ready=True, says=getattr(competitor, "says", ""))
    for line in sys.stdin:
        asked = json.loads(line)
        if "make" in asked:
            calls = None  # the last case's weights go first
            made = competitor.make(asked["make"])
            if made is not None:
                for one in made[:2]:
                    one()
                calls = cycle(made)
            answer(offered=made is not None)
        else:
            next(calls)()  # awake again after the others' turns
            answer(**turn(calls))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
