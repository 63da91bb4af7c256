"""Each original Metal kernel, computed through the public ops.

A function here takes the kernel's buffers as tensors and its scalars, and gives the buffers that the kernel writes. It
does views, casts, packing and op calls, nothing else; only the COMPOSITES have torch arithmetic between op calls.
Sizes come from the arrays and scalars, never from this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.ops.attention import attention, latent_attention
from halfbyte.ops.cache import append
from halfbyte.ops.dispatch import trace, using
from halfbyte.ops.experts import Scattered, expert_qmm
from halfbyte.ops.quant import Packed, embed, qmm
from halfbyte.ops.recurrent import causal_conv, delta_gates, gated_delta
from halfbyte.ops.routing import combine, route
from halfbyte.ops.rowwise import glu, rms_norm, rms_norm_chain, rms_norm_many, rope

Buffers = dict[str, Tensor]
Scalars = dict[str, Any]
Kernel = Callable[[Buffers, Scalars], Buffers]

# Originals that are one stage of an op of ours, or a copy: what stands between the op calls, and why.
COMPOSITES = {
    "rms_norm_sum_sq": "only the statistic of rms_norm: the dot product of x with itself, by qmm",
    "rms_norm_apply": "rms_norm with its statistic given: rsqrt and the weight in torch, the product by combine",
    "rms_norm_apply_bf16": "rms_norm with its statistic given: rsqrt and the weight in torch, the product by combine",
    "attn_scores_batched": "the scores inside attention: qmm of queries and keys, times the scale",
    "attn_softmax_batched": "the softmax inside attention: exp(s - lse) with attention's own lse at head size 1",
    "attn_values_batched": "the weighted values inside attention: qmm over the rows of the cache",
    "mla_sdpa_tile_accumulate": "one step inside latent_attention: its output and lse over the tile, then the running "
    "maximum, denominator and partial sum in torch",
    "mla_sdpa_tile_finalize": "the division at the end of latent_attention: combine with 1 / denominator",
    "moe_normalize_weights": "the renormalisation inside route: the sum by qmm, the division by combine",
    "conv1d_state_update": "the state that causal_conv leaves behind; its output is dropped",
    "residual_add": "a sum of two tensors: combine with weight one",
    "residual_add_n_tokens": "a sum of two tensors: combine with weight one",
    "rope_n_tokens": "forms its angle in float32, ours in float64: that angle is given to rope as its table",
    "yarn_rope_apply": "forms its angle in float32, ours in float64: that angle is given to rope as its table",
    "mla_split_q_kv": "a copy: tensor views",
    "split_q_gate": "a copy: tensor views",
}
COPIES = frozenset({"mla_split_q_kv", "split_q_gate"})


def run(
    kernel: str, inputs: dict[str, np.ndarray], scalars: dict[str, Any], meta: dict[str, Any], *, language: str
) -> dict[str, np.ndarray]:
    """What the original `kernel` computes, through our ops in `language`; fails where an op had no kernel there.

    The torch bodies run in float64: they are the meaning, and so stand here without their own rounding.
    """
    name, device = kernel.split("__")[0], device_of(language)
    buffers = {key: tensor(array).to(device) for key, array in inputs.items()}
    if language == "torch":
        buffers = {key: t.double() if t.dtype == torch.float32 else t for key, t in buffers.items()}
    numbers = {key.split(".")[-1]: value for key, value in scalars.items()} | {"meta": meta}
    with torch.device(device), using(language), trace() as entries:
        outputs = KERNELS[name](buffers, numbers)
    if language != "torch":
        assert entries or name in COPIES or left_alone(inputs, outputs), f"{name}: no op was called"
        bodies = sorted({entry.op for entry in entries if entry.language != language})
        assert not bodies, f"{name}: no {language} kernel ran for {', '.join(bodies)}"
    return {key: array_of(value) for key, value in outputs.items()}


def left_alone(inputs: dict[str, np.ndarray], outputs: Buffers) -> bool:
    """Whether the buffers that a kernel writes are as they were: an empty tile needs no op."""
    return all(key in inputs and np.array_equal(array_of(value), inputs[key]) for key, value in outputs.items())


def device_of(language: str) -> str:
    """Where a language runs; without its GPU, on a CPU: Triton's interpreter, Metal's executor (tests/metal)."""
    if language == "metal":
        from metal import executor

        return executor.install()
    return "cuda" if language == "triton" and torch.cuda.is_available() else "cpu"


def tensor(array: np.ndarray) -> Tensor:
    """A copy of a buffer; uint16 is how the files store bfloat16."""
    made = torch.from_numpy(np.array(array, order="C"))
    return made.view(torch.bfloat16) if made.dtype == torch.uint16 else made


def array_of(value: Tensor) -> np.ndarray:
    value = (value.float() if value.dtype == torch.float64 else value).contiguous().cpu()
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def eps_of(b: Buffers, n: Scalars) -> float:
    """S0's kernels take [eps, D] in a float buffer, the others a scalar."""
    return b["params"][0].item() if "params" in b else n["eps"]


# Norms.


def norm(b: Buffers, n: Scalars) -> Buffers:
    return {"output": rms_norm(b["input"], b.get("weight"), eps_of(b, n), mul=b.get("scale"))}


def norm_dual(b: Buffers, n: Scalars) -> Buffers:
    y, copy = rms_norm(b["input"], None, eps_of(b, n), extra_dtype=torch.bfloat16)
    return {"output": y, "output_bf16": copy}


def norm_dual_perm(b: Buffers, n: Scalars) -> Buffers:
    heads, tokens = b["aux_params"].tolist()
    x = b["input"].view(tokens, heads, -1)
    y, copy = rms_norm(x, None, eps_of(b, n), extra_dtype=torch.bfloat16, head_major=True)
    return {"output": y.view_as(b["input"]), "output_bf16": copy.reshape(b["input"].shape)}


def norm_triple(b: Buffers, n: Scalars) -> Buffers:
    results = rms_norm_many(b["input"], [b[f"weight_{i}"] for i in "abc"], eps_of(b, n))
    return dict(zip(("output_a", "output_b", "output_c"), results, strict=True))


def post_attention(b: Buffers, n: Scalars) -> Buffers:
    weights = [b[f"weight_{i}"] for i in "abc"]
    results = rms_norm_chain(b["attn_out"], b["post_attn_w"], b["hidden"], weights, n["eps"])
    return dict(zip(("residual_out", "output_a", "output_b", "output_c"), results, strict=True))


def end_of_layer(b: Buffers, n: Scalars) -> Buffers:
    return _end_of_layer(b["moe_accum"], b, n)


def end_of_layer_from_experts(b: Buffers, n: Scalars) -> Buffers:
    return _end_of_layer(combine(b["expert_outputs"], b["routing_weights"]), b, n)


def _end_of_layer(moe: Tensor, b: Buffers, n: Scalars) -> Buffers:
    middle, hidden = rms_norm_chain(
        moe, b["w2"], b["attn_out"], [b["w3"]], n["eps"], residual2=b["residual"], scale=scale_of(b["layer_scalar"], n)
    )
    return {"mlp_down": middle, "hidden": hidden}


def scale_of(scale: Tensor, n: Scalars) -> Tensor:
    """One number, or one a channel."""
    return scale[: n["dim"]] if n["scalar_is_vector"] else scale[:1]


def norm_add(b: Buffers, n: Scalars) -> Buffers:
    scale = scale_of(b["scalar"], n) if "scalar" in b else None
    return {"output": rms_norm(b["input"], b["weight"], n["eps"], residual=b["residual"], scale=scale)}


def residual_norm(b: Buffers, n: Scalars) -> Buffers:
    y, total = rms_norm(b["input"], b["weight"], n["eps"], add=b["residual"], return_sum=True)
    return {"normed_output": y, "sum_output": total if n["write_sum"] else b["sum_output"]}


def residual_norm_scaled(b: Buffers, n: Scalars) -> Buffers:
    return {"output": rms_norm(b["input"], b["weight"], n["eps"], add=b["residual"], scale=scale_of(b["scalar"], n))}


def experts_norm_add(b: Buffers, n: Scalars) -> Buffers:
    y = combine(b["expert_outputs"], b["weights"])
    return {"output": rms_norm(y, b["norm_weight"], n["eps"], residual=b["residual"])}


def experts_norm_add_norm(b: Buffers, n: Scalars) -> Buffers:
    residual = rms_norm(b["residual"], b["res_norm_weight"], n["eps"])
    y = combine(b["expert_outputs"], b["weights"])
    return {"output": rms_norm(y, b["moe_norm_weight"], n["eps"], residual=residual)}


def norm_rows(b: Buffers, n: Scalars) -> Buffers:
    return {"out": rms_norm(b["x"], b["weight"], n["eps"])}


def norm_per_head(b: Buffers, n: Scalars) -> Buffers:
    heads = b["x"].view(-1, n["num_heads"], n["head_dim"])
    return {"x": rms_norm(heads, b["weight"], n["eps"]).view_as(b["x"])}


def norm_gated(b: Buffers, n: Scalars) -> Buffers:
    return {"output": rms_norm(b["values"], b["weight"], n["eps"], gate=b["z"])}


def norm_qk(b: Buffers, n: Scalars) -> Buffers:
    """q and k of each head, in place in a row that holds more than them."""
    x, size, heads = b["x"].view(-1, n["per_token_total"]), n["key_dim"], n["meta"]["grid_threadgroups"][0]
    for start, scale in ((0, n["inv_scale"] ** 2), (n["key_offset_per_token"], n["inv_scale"])):
        part = x[:, start : start + heads * size].unflatten(-1, (heads, size))
        rms_norm(part, None, 1e-6, scale=scale, out=part)
    return {"x": x}


def sum_of_squares(b: Buffers, n: Scalars) -> Buffers:
    x = b["x"].view(1, -1)
    return {"sum_sq": qmm(x, x.clone()).view(1)}


def norm_apply(b: Buffers, n: Scalars) -> Buffers:
    factor = torch.rsqrt(b["sum_sq"] / n["dim"] + n["eps"])
    return {"out": combine(b["x"].view(1, 1, -1), factor.view(1, 1)).view(-1) * b["weight"].float()}


# Elementwise.


def swiglu(b: Buffers, n: Scalars) -> Buffers:
    return {"out": glu(b["gate"], b["up"])}


def sigmoid_gate(b: Buffers, n: Scalars) -> Buffers:
    return {"x_out": glu(b["gate"], b["x_out"], "sigmoid", out=b["x_out"])}


def add(b: Buffers, n: Scalars) -> Buffers:
    y = combine(b["b"][..., None, :], ones(*b["b"].shape[:-1], 1), residual=b["a"])
    return {"out": y}


def rope_tokens(b: Buffers, n: Scalars) -> Buffers:
    x = b["x"].view(-1, n["num_heads"], n["head_dim"])
    for token in range(n["n_tokens"]):
        _rotate(x[token : token + 1], float(n["start_pos"] + token), b["inv_freq"], n["rotary_dim"], 1.0)
    return {"x": x.view_as(b["x"])}


def rope_yarn(b: Buffers, n: Scalars) -> Buffers:
    x = b["x"].view(1, n["num_heads"], n["rotary_dim"])
    _rotate(x, n["pos_f"], b["inv_freq"], n["rotary_dim"], n["mscale"])
    return {"x": x.view_as(b["x"])}


def _rotate(x: Tensor, position: float, inv_freq: Tensor, rotary: int, scale: float) -> None:
    """In place, by the angles that the originals round to float32: frequencies are data, so they are a table at 1."""
    angles = torch.tensor(position, dtype=torch.float32) * inv_freq.float()
    rope(x, torch.ones(1, dtype=torch.int32), angles, rotary=rotary, scale=scale, out=x)


def split_mla(b: Buffers, n: Scalars) -> Buffers:
    q = b["q_full"].view(n["num_heads"], n["qk_nope"] + n["qk_rope"])
    latent, k_pe = b["kv_pre"].split([n["kv_lora_rank"], n["qk_rope"]])
    q_nope, q_pe = q.split([n["qk_nope"], n["qk_rope"]], -1)
    return {"q_nope": q_nope, "q_pe": q_pe, "kv_lat": latent, "k_pe": k_pe}


def split_gate(b: Buffers, n: Scalars) -> Buffers:
    q, gate = b["q_proj"].view(-1, n["num_heads"], 2 * n["head_dim"]).split(n["head_dim"], -1)
    return {"q_out": q, "gate_out": gate}


# Products with quantised and dense weights.


def packed(words: Tensor, scales: Tensor, biases: Tensor, n: Scalars, bits: int = 4) -> Packed:
    return Packed(words, scales, biases, bits, n["group_size"])


def matvec(bits: int) -> Kernel:
    def product(b: Buffers, n: Scalars) -> Buffers:
        x = b["x"] if "x" in b else b["x_inputs"]
        return {"out": qmm(x, packed(b["W_packed"], b["scales"], b["biases"], n, bits))}

    return product


def dense(b: Buffers, n: Scalars) -> Buffers:
    return {"output": qmm(b["input"], b["w"])}


def gate_up(b: Buffers, n: Scalars) -> Buffers:
    gate, up = (packed(b[f"{part}_W"], b[f"{part}_s"], b[f"{part}_b"], n) for part in ("gate", "up"))
    return {"out": glu(qmm(b["x"], gate), qmm(b["x"], up))}


def gather(b: Buffers, n: Scalars) -> Buffers:
    return {"out": embed(b["token_ids"], packed(b["W_packed"], b["scales"], b["biases"], n))}


def heads_of(b: Buffers, n: Scalars, rows: slice) -> Packed:
    """Some rows of each head of a packed [heads x rows a head, R] matrix."""
    parts = (
        b[name].unflatten(0, (n["num_heads"], n["kv_b_per_head"]))[:, rows] for name in ("W_packed", "scales", "biases")
    )
    return packed(*parts, n)


def mla_q_prime(b: Buffers, n: Scalars) -> Buffers:
    return {"q_prime": qmm(b["q_nope"], heads_of(b, n, slice(0, n["nope"])), transpose=False)}


def mla_out(b: Buffers, n: Scalars) -> Buffers:
    rows = slice(n["nope"], n["nope"] + n["v_head_dim"])
    return {"out_per_head": qmm(b["v_combine"], heads_of(b, n, rows))}


# Attention and caches.


def heads_read(cache: Tensor, heads: int, n: Scalars) -> Tensor:
    """What each query head reads of a cache [S, kv_dim]: [H, S, D]. A row may hold more than the key heads."""
    size, key_head = n["head_dim"], torch.arange(heads) // n["heads_per_kv"]
    rows = cache[: n["seq_len"], : cache.shape[-1] // size * size].unflatten(-1, (-1, size))
    return rows.transpose(0, 1)[key_head]


def scores(b: Buffers, n: Scalars) -> Buffers:
    queries, whole = b["Q"].view(-1, n["head_dim"]), b["scores"].view(-1, n["seq_stride"])
    whole[:, : n["seq_len"]] = qmm(queries, heads_read(b["K_cache"], len(queries), n)) * n["scale"]
    return {"scores": whole}


def softmax(b: Buffers, n: Scalars) -> Buffers:
    whole = b["scores"].view(-1, n["seq_stride"])
    s = whole[:, : n["seq_len"]]
    peak = s.amax(-1, keepdim=True)
    shifted = s - torch.where(peak == -torch.inf, 0.0, peak)
    keys = shifted.T[None, :, :, None].contiguous()  # [1, S, H, 1]
    _, lse = attention(ones(1, 1, len(s), 1), keys, keys, scale=1.0, causal=False, return_lse=True)
    lse = lse.view(-1, 1)
    whole[:, : n["seq_len"]] = torch.where(lse == -torch.inf, 0.0, torch.exp(shifted - lse))
    return {"scores": whole}


def values(b: Buffers, n: Scalars) -> Buffers:
    p = b["scores"].view(-1, n["seq_stride"])[:, : n["seq_len"]]
    return {"out": qmm(p, heads_read(b["V_cache"], len(p), n), transpose=False)}


def mla(b: Buffers, n: Scalars) -> Buffers:
    length = n["cache_len"]
    q, q_pe = b["q_prime"][None, None], b["q_pe"][None, None]
    latent, k_pe = b["latent_cache"][None, :length], b["rope_k_cache"][None, :length]
    o = latent_attention(q, q_pe, latent, k_pe, scale=n["softmax_scale"], causal=False)
    return {"v_combine": o[0, 0]}


def mla_tile(b: Buffers, n: Scalars) -> Buffers:
    tile = slice(n["tile_start"], n["tile_end"])
    q, q_pe, latent, k_pe = b["q_prime"], b["q_pe"], b["latent_cache"][tile], b["rope_k_cache"][tile]
    state = {
        "running_max": b["running_max"],
        "running_denom": b["running_denom"],
        "v_combine_partial": b["v_combine_partial"],
    }
    if len(latent) == 0:
        return state
    o, lse = latent_attention(
        q[None, None], q_pe[None, None], latent[None], k_pe[None],
        scale=n["softmax_scale"], causal=False, return_lse=True,
    )  # fmt: skip
    top = ((qmm(q, latent) + qmm(q_pe, k_pe)) * n["softmax_scale"]).amax(-1)
    before, denominator, partial = state.values()
    if n["is_first_tile"]:
        before, denominator, partial = (
            torch.full_like(top, -torch.inf),
            torch.zeros_like(top),
            torch.zeros_like(partial),
        )
    highest = torch.maximum(before, top)
    kept, added = torch.exp(before - highest), torch.exp(lse[0, 0] - highest)
    state["running_max"], state["running_denom"] = highest, denominator * kept + added
    state["v_combine_partial"] = partial * kept[:, None] + o[0, 0] * added[:, None]
    return state


def mla_finalize(b: Buffers, n: Scalars) -> Buffers:
    inverse = torch.where(b["running_denom"] > 0, 1 / b["running_denom"], 0.0)
    return {"v_combine": combine(b["v_combine_partial"][:, None], inverse[:, None])}


def length_of(length: int) -> Tensor:
    return torch.tensor([length], dtype=torch.int32)


def append_kv(b: Buffers, n: Scalars) -> Buffers:
    lengths = length_of(n["kv_start"] + n["n_tokens"])
    for part in ("k", "v"):
        append(b[f"{part}_cache"][None], b[f"{part}_src"][None], lengths=lengths)
    return {"k_cache": b["k_cache"], "v_cache": b["v_cache"]}


def append_latent(b: Buffers, n: Scalars) -> Buffers:
    lengths = length_of(n["pos"] + 1)
    append(b["latent_cache"][None], b["kv_lat"][None, None], lengths=lengths)
    append(b["rope_k_cache"][None], b["k_pe"][None, None], lengths=lengths)
    return {"latent_cache": b["latent_cache"], "rope_k_cache": b["rope_k_cache"]}


# Recurrences.


def delta(form: str) -> Kernel:
    def product(b: Buffers, n: Scalars) -> Buffers:
        state, tokens, width = b["state"], n["n_tokens"], n["key_total"]
        Hv, Dv, Dk = state.shape
        q, k, v = b["conv_out"].view(tokens, -1).split([width, width, Hv * Dv], -1)
        per = n["k_heads_per_v"]  # value heads of a key head; the last one may have fewer
        reads = torch.arange(Hv) // per if Hv % per else slice(Hv // per)
        q, k = (part.unflatten(-1, (-1, Dk))[None][:, :, reads] for part in (q, k))
        g, beta = (b[name].view(1, tokens, Hv) for name in ("g_decay", "beta_gate"))
        o = gated_delta(q, k, v.unflatten(-1, (Hv, Dv))[None], g, beta, state[None], form=form)
        return {"state": state, "output": o[0]}

    return product


def conv(b: Buffers, n: Scalars) -> Buffers:
    return {"output": causal_conv(b["input"][None], b["weights"], b["conv_state"][None])[0]}


def conv_state(b: Buffers, n: Scalars) -> Buffers:
    state = b["conv_state"]
    causal_conv(b["input"][None], torch.zeros(n["conv_dim"], len(state) + 1), state[None])
    return {"conv_state": state}


def decay_and_beta(b: Buffers, n: Scalars) -> Buffers:
    g, beta = delta_gates(b["alpha_out"], b["beta_out"], b["A_log"], b["dt_bias"])
    return {"g_decay": g, "beta_gate": beta}


# Experts.


def experts_at_offsets(b: Buffers, n: Scalars) -> Buffers:
    offsets = [b[name].tolist() for name in ("w_offsets", "s_offsets", "b_offsets")]
    shape = n["out_dim"], n["in_dim"]
    w = Scattered.at_elements((b["W_packed"], b["scales"], b["biases"]), offsets, shape, 4, n["group_size"])
    return {"out": expert_qmm(b["x_inputs"].view(1, -1, n["in_dim"]), first_experts(len(offsets[0])), w)[0]}


def experts_in_blobs(b: Buffers, n: Scalars) -> Buffers:
    active, shape = n["k_active"], (n["out_dim"], n["in_dim"])
    offsets = [n[name] for name in ("w_byte_off", "s_byte_off", "b_byte_off")]
    w = Scattered.at_bytes([b[f"blob{i}"] for i in range(active)], offsets, shape, 4, n["group_size"])
    x = b["x"][: n["in_dim"]]
    if n["input_stride"]:
        x = b["x"].as_strided((active, n["in_dim"]), (n["input_stride"], 1))
    return {"out": expert_qmm(x[None], first_experts(active), w)[0]}


def first_experts(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)[None]


def weighted_sum(b: Buffers, n: Scalars) -> Buffers:
    return {"out": combine(b["expert_outs"], b["weights"][: n["K"]])}


def combine_experts(shared_is_gated: bool) -> Kernel:
    def product(b: Buffers, n: Scalars) -> Buffers:
        active = n["K"]
        y = b["expert_out"][:active] if "expert_out" in b else torch.stack([b[f"expert_out{i}"] for i in range(active)])
        gate = b["params"][16:17] if shared_is_gated else None
        h = combine(
            y[None],
            b["params"][None, :active],
            residual=b["h_mid"][None],
            shared=b["shared_out"][None],
            shared_gate=gate,
        )
        return {"hidden_out": h[0]}

    return product


def combine_tokens(b: Buffers, n: Scalars) -> Buffers:
    h = combine(
        b["moe_sum"][:, None], ones(len(b["moe_sum"]), 1),
        residual=b["h_mid"], shared=b["shared_out"], shared_gate=b["shared_gate"],
    )  # fmt: skip
    return {"hidden_out": h}


def accumulate_bucket(b: Buffers, n: Scalars) -> Buffers:
    return {"out_sum": combine(b["bucket_out"], b["weights"], residual=b["out_sum"], tokens=b["token_idx"])}


def routing(b: Buffers, n: Scalars) -> Buffers:
    whole = "logits_all" in b
    logits, suffix = (b["logits_all"], "_all") if whole else (b["logits"][None], "")
    ids, weights = route(logits, n["top_k"], per_expert_scale=b["per_expert_scale"])
    ids, weights = (ids, weights) if whole else (ids[0], weights[0])
    return {f"expert_ids{suffix}": ids.view(torch.uint32), f"routing_weights{suffix}": weights}


def topk_slots(b: Buffers, n: Scalars) -> Buffers:
    logits = b["logits"].float()  # slots are taken by float32 probabilities
    ids, weights = route(logits.view(-1, n["n_experts"]), n["k"], renormalise=False, order="slot")
    return {"out_indices": ids, "out_weights": weights}


def normalise_weights(b: Buffers, n: Scalars) -> Buffers:
    w = b["weights"].view(-1, n["k"])
    total = qmm(w, ones(1, n["k"]))
    inverse = torch.where(total > 0, 1 / total, 1.0)
    return {"weights": combine(w[:, None], inverse)}


COVERED_BY: dict[Kernel, str] = {
    norm: """
        rms_norm_f32 rms_norm_f32_v2 rms_norm_no_scale_f32 rms_norm_no_scale_f32_v2 rms_norm_f16 rms_norm_bf16
        rms_norm_no_scale_bf16 rms_norm_mul_f32 rms_norm_mul_bf16 rms_norm_mul_f16""",
    norm_dual: "rms_norm_no_scale_f32_dual",
    norm_dual_perm: "rms_norm_no_scale_f32_dual_perm",
    norm_triple: "rms_norm_f32_triple",
    post_attention: "fused_post_attn_triple_norm_f32 fused_post_attn_triple_norm_f32_v2",
    end_of_layer: "fused_post_ff_norm2_endlayer_f32 fused_post_ff_norm2_endlayer_f32_v2",
    end_of_layer_from_experts: "fused_moe_wsum_post_ff_norm2_endlayer_f32_v2",
    norm_add: "fused_norm_add_f32 fused_norm_add_scalar_f32",
    residual_norm: "fused_residual_norm_f32",
    residual_norm_scaled: "fused_residual_norm_scalar_f32",
    experts_norm_add: "fused_moe_wsum_norm_add_f32",
    experts_norm_add_norm: "fused_moe_wsum_dnorm_add_f32",
    norm_rows: "rms_norm_bf16_fused_n_tokens",
    norm_per_head: "rms_norm_per_head_n_tokens",
    norm_gated: "gated_rms_norm",
    norm_qk: "rms_norm_qk",
    sum_of_squares: "rms_norm_sum_sq",
    norm_apply: "rms_norm_apply rms_norm_apply_bf16",
    swiglu: "swiglu_fused swiglu_fused_vec4 swiglu_fused_batched",
    sigmoid_gate: "sigmoid_gate",
    add: "residual_add residual_add_n_tokens",
    rope_tokens: "rope_n_tokens",
    rope_yarn: "yarn_rope_apply",
    split_mla: "mla_split_q_kv",
    split_gate: "split_q_gate",
    matvec(2): "dequant_matvec_2bit",
    matvec(4): """
        dequant_matvec_4bit dequant_matvec_4bit_fast dequant_matvec_4bit_fast_n_tokens dequant_matvec_4bit_v3
        dequant_matvec_4bit_v3_n_tokens dequant_matvec_4bit_v4 dequant_matvec_4bit_v5""",
    matvec(8): "dequant_matvec_8bit_v3 dequant_matvec_8bit_v3_n_tokens",
    dense: "bf16_matvec bf16_matmul_n_tokens",
    gate_up: "fused_gate_up_swiglu",
    gather: "embed_gather_4bit",
    mla_q_prime: "mla_q_prime_4bit",
    mla_out: "mla_out_per_head_4bit",
    scores: "attn_scores_batched",
    softmax: "attn_softmax_batched",
    values: "attn_values_batched",
    mla: "mla_sdpa_folded",
    mla_tile: "mla_sdpa_tile_accumulate",
    mla_finalize: "mla_sdpa_tile_finalize",
    append_kv: "kv_cache_append_n_tokens",
    append_latent: "mla_kv_cache_append",
    delta("sequential"): "gated_delta_net_step gated_delta_net_sequential",
    delta("chunked"): "gated_delta_net_chunkwise",
    conv: "conv1d_step",
    conv_state: "conv1d_state_update",
    decay_and_beta: "compute_decay_beta",
    experts_at_offsets: "dequant_matvec_4bit_batched",
    experts_in_blobs: "dequant_matvec_4bit_v3_experts",
    weighted_sum: "weighted_sum",
    combine_experts(shared_is_gated=True): "moe_combine_residual moe_combine_residual_flat",
    combine_experts(shared_is_gated=False): "moe_combine_residual_unscaled",
    combine_tokens: "moe_combine_residual_n_tokens",
    accumulate_bucket: "moe_bucket_accumulate",
    routing: "fused_moe_routing_f32 fused_moe_routing_batch_f32",
    topk_slots: "moe_softmax_topk",
    normalise_weights: "moe_normalize_weights",
}
KERNELS = {name: function for function, names in COVERED_BY.items() for name in names.split()}
